"""What Llama and the models after it share: RMSNorm, rotary positions, gated MLP, grouped heads."""

from collections.abc import Callable, Sequence
from typing import Any

from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.layers import MLPParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.read_out import ReadOut
from rank_collapse.pretrained.rotary import num_positions, rotary_entry, rotary_fields
from rank_collapse.pretrained.weights import Draw, Weights

ANCHORS = ("embed_tokens.weight",)
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "sliding_window": None,
    "layer_types": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
KINDS = dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), (int,))
KINDS |= {"rope_theta": (float,), "rope_scaling": (dict,), "rope_parameters": (dict,)}
KINDS |= {"layer_types": (list,), "pad_token_id": (int,)}
GATES = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}
GATES |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "geglu_tanh")
LAYER_TYPES = ("full_attention", "sliding_attention")


def only(settings: dict[str, Any], name: str, *allowed: Any) -> None:
    """Refuses values of an entry that the network has no field for.

    Raises:
        ValueError: Another value; the message names the entry, the value and the model type.
    """
    if settings[name] not in allowed:
        values = " or ".join(map(repr, allowed))
        raise ValueError(
            f"{name}={settings[name]!r} of a {settings['model_type']} model is not supported, "
            f"only {values}"
        )


def gated(settings: dict[str, Any], name: str = "hidden_act") -> str:
    """The gated MLP with the activation that an entry names.

    Raises:
        ValueError: One of which there is none.
    """
    only(settings, name, *GATES)
    return GATES[settings[name]]


def groups_of(settings: dict[str, Any]) -> int:
    """Groups of heads that share keys and values.

    Raises:
        ValueError: A number that does not divide that of the heads.
    """
    h = settings["num_attention_heads"]
    groups = settings["num_key_value_heads"] or h
    if min(h, groups) < 1 or h % groups:
        raise ValueError(f"num_key_value_heads={groups} does not divide num_attention_heads={h}")
    return groups


def windows_of(
    settings: dict[str, Any], local: Sequence[bool], distance: int | None
) -> tuple[int, ...]:
    """The field `windows`: `distance` in layers that are local, 0 in the others.

    `layer_types` of the settings, where it is there, says which are local.

    Raises:
        ValueError: Another kind of layer, or a number of them that is not the depth.
    """
    kinds = settings["layer_types"]
    if kinds is not None:
        wrong = [k for k in kinds if k not in LAYER_TYPES]
        if wrong:
            raise ValueError(f"layer_types has {wrong[0]!r}, only {LAYER_TYPES} are supported")
        if len(kinds) != settings["num_hidden_layers"]:
            raise ValueError(
                f"layer_types has {len(kinds)} entries for "
                f"num_hidden_layers={settings['num_hidden_layers']}"
            )
        local = [k == "sliding_attention" for k in kinds]
    if distance is None or not any(local):
        return ()
    if distance < 1:
        raise ValueError(f"sliding_window={settings.get('sliding_window')!r} leaves no other token")
    return tuple(distance if is_local else 0 for is_local in local)


def decoder_config(settings: dict[str, Any], **fields: Any) -> TransformerConfig:
    """Llama's network, with other values of some fields.

    Args:
        settings: Entries of config.json.
        **fields: Of `TransformerConfig`, in place of Llama's; None for one that is left as it is.

    Raises:
        ValueError: A variant that is not supported.
    """
    d, h = settings["hidden_size"], settings["num_attention_heads"]
    groups_of(settings)
    width = settings["head_dim"] or d // max(h, 1)
    entry = rotary_entry(settings, "full_attention")
    limit = settings["sliding_window"]
    usual = {
        "depth": settings["num_hidden_layers"],
        "num_heads": h,
        "d_model": d,
        "d_qk": width,
        "d_v": width,
        "d_ff": settings["intermediate_size"],
        "mlp": None if "mlp" in fields else gated(settings),
        "attention_skip": True,
        "mlp_skip": True,
        "norm_placement": "pre",
        "norm": "rms",
        "norm_eps": settings["rms_norm_eps"],
        "final_norm": True,
        "mask": "causal",
        "windows": windows_of(
            settings, [True] * settings["num_hidden_layers"], limit and limit - 1
        ),
        "init": "bert",
        "embedding": EmbeddingConfig(
            vocab_size=settings["vocab_size"],
            d_embed=d,
            num_positions=num_positions(entry, settings),
            norm=False,
        ),
    }
    if "position" not in fields:
        usual |= rotary_fields(entry, settings, width)
    return TransformerConfig(**usual | fields)


def attention(
    weights: Weights,
    name: str,
    config: TransformerConfig,
    groups: int,
    *,
    into: bool = False,
    out: bool = False,
    gain: Callable[[str, int], Any] | None = None,
) -> AttentionParams:
    """Attention from `q_proj`, `k_proj`, `v_proj` and `o_proj`, keys and values in groups.

    Args:
        weights: Of the model.
        name: What stands before those names.
        config: The network.
        groups: Of keys and values.
        into, out: Whether the first three and the last have biases.
        gain: (name, width) → gain of `q_norm` and `k_norm`, where `config.qk_norm` has them: [k]
            of each head or [h k] over all. None for what is stored.
    """
    d, h, k = config.d_model, config.num_heads, config.qk_width
    w_q, b_q = weights.heads_in(f"{name}.q_proj", d, h, k, into)
    w_k, b_k = weights.heads_in(f"{name}.k_proj", d, groups, k, into)
    w_v, b_v = weights.heads_in(f"{name}.v_proj", d, groups, k, into)
    w_o, b_o = weights.heads_out(f"{name}.o_proj", d, h, k, out)
    gain = gain or (lambda part, width: weights.take(f"{part}.weight", width))
    gains = {}
    if config.qk_norm != "none":
        wide = config.qk_norm == "width"
        for part, count in (("q_norm", h), ("k_norm", groups)):
            own = gain(f"{name}.{part}", count * k if wide else k)
            gains[part] = own.reshape(count, k) if wide else own
    return AttentionParams(
        w_q=w_q, b_q=b_q, w_k=w_k, b_k=b_k, w_v=w_v, b_v=b_v, w_o=w_o, b_o=b_o, **gains
    )


def mlp(weights: Weights, name: str, d: int, f: int, bias: bool = False) -> MLPParams:
    """A gated MLP from `gate_proj`, `up_proj` and `down_proj`."""
    w_gate, b_gate = weights.linear(f"{name}.gate_proj", d, f, bias)
    w_in, b_in = weights.linear(f"{name}.up_proj", d, f, bias)
    w_out, b_out = weights.linear(f"{name}.down_proj", f, d, bias)
    return MLPParams(w_in=w_in, b_in=b_in, w_out=w_out, b_out=b_out, w_gate=w_gate, b_gate=b_gate)


def pre_norm_params(
    weights: Weights,
    config: TransformerConfig,
    attention: Callable[[str], AttentionParams],
    mlp: Callable[[str], MLPParams],
) -> TransformerParams:
    """`decoder_params` of layers with a norm before attention and one before the MLP.

    Args:
        weights: Of the model.
        config: The network.
        attention, mlp: (what stands before the names of a layer) → their parameters.
    """

    def norm(name):
        return weights.norm(name, config.d_model, bias=False)

    def layer(name):
        return BlockParams(
            attention=attention(name),
            attention_norm=norm(f"{name}.input_layernorm"),
            mlp=mlp(name),
            mlp_norm=norm(f"{name}.post_attention_layernorm"),
        )

    return decoder_params(weights, config, layer, norm)


def decoder_params(
    weights: Weights,
    config: TransformerConfig,
    layer: Callable[[str], BlockParams],
    norm: Callable[[str], Any],
) -> TransformerParams:
    """The parameters of all layers, `embed_tokens` and the last `norm`.

    Args:
        weights: Of the model.
        config: The network.
        layer: (what stands before the names of a layer) → its parameters.
        norm: name → NormParams.
    """
    weights.check_depth("layers.{}", config.depth)
    tokens = weights.table("embed_tokens.weight", config.embedding.vocab_size, config.d_model)
    return TransformerParams(
        layers=weights.stack(range(config.depth), lambda i: layer(f"layers.{i}")),
        final_norm=weights.to_device(norm("norm")),
        embedding=weights.to_device(EmbeddingParams(tokens=tokens)),
    )


def read_out(
    weights: Weights,
    settings: dict[str, Any],
    config: TransformerConfig,
    *,
    own: str = "lm_head.weight",
    tokens: str = ANCHORS[0],
) -> ReadOut | None:
    """The language-model head: a table of its own, or that of the tokens; None without one."""
    name = tokens if settings["tie_word_embeddings"] else own
    if not weights.has(name):
        return None
    table = weights.table(name, config.embedding.vocab_size, config.d_model)
    return ReadOut(table, softcap=settings.get("final_logit_softcapping") or None)


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """Normal(0, initializer_range); unit gains, zero biases, a zero row for padding."""
    if name.endswith(".bias"):
        return Draw(value=0.0)
    if "norm" in name:
        return Draw(value=1.0)
    zero_row = settings["pad_token_id"] if name == "embed_tokens.weight" else None
    return Draw(std=settings["initializer_range"], zero_row=zero_row)


def family(
    model_type: str,
    defaults: dict[str, Any],
    config: Callable[..., TransformerConfig],
    params: Callable[..., TransformerParams],
    **others: Any,
) -> Family:
    """A `Family` with Llama's names, drawing and read-out; `others` are fields in their place."""
    usual = {"anchors": ANCHORS, "draw": draw, "read_out": read_out, "kinds": KINDS}
    return Family(model_type, defaults, config=config, params=params, **usual | others)
