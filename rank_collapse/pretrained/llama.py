"""Llama (Touvron et al. 2023), Mistral, Qwen2: causal, pre-RMSNorm, rotary, gated, grouped heads.

Heads that share keys and values are groups here; `enter` gives each head its own, so that it stands
alone in a path.
"""

import dataclasses
from typing import Any

from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.layers import MLPParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained.family import Family, check_entry
from rank_collapse.pretrained.read_out import ReadOut
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
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
KINDS = dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), (int,))
KINDS |= {"rope_theta": (float,), "rope_scaling": (dict,), "rope_parameters": (dict,)}
KINDS |= {"use_sliding_window": (bool,), "pad_token_id": (int,)}


def rotary(settings: dict[str, Any]) -> tuple[float, tuple[float, ...]]:
    """(theta, scaling) of the rotary positions, as `TransformerConfig` takes them.

    Raises:
        ValueError: A kind of scaling that is not supported, or one of its numbers missing.
    """
    entry = (settings["rope_scaling"] or {}) | (settings["rope_parameters"] or {})

    def number(name, default=None):
        value = entry.get(name) or default
        check_entry(name, value, (float,))
        return float(value)

    theta = number("rope_theta", settings["rope_theta"] or 10000.0)
    kind = entry.get("rope_type", entry.get("type", "default"))
    if kind == "default":
        return theta, ()
    if kind == "linear":
        return theta, (number("factor"),)
    if kind == "llama3":
        names = "factor low_freq_factor high_freq_factor original_max_position_embeddings"
        return theta, tuple(number(n) for n in names.split())
    raise ValueError(f"rope_type={kind!r} is not 'default', 'linear' or 'llama3'")


def window(settings: dict[str, Any]) -> int:
    """Tokens up to which the model is the plain causal one: its positions, or a sliding window."""
    limit, positions = settings["sliding_window"], settings["max_position_embeddings"]
    return min(positions, limit) if settings["use_sliding_window"] and limit else positions


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    d, h = settings["hidden_size"], settings["num_attention_heads"]
    groups = settings["num_key_value_heads"] or h
    if settings["hidden_act"] not in ("silu", "swish"):
        raise ValueError(f"hidden_act={settings['hidden_act']!r} is not supported, only 'silu'")
    if min(h, groups) < 1 or h % groups:
        raise ValueError(f"num_key_value_heads={groups} does not divide num_attention_heads={h}")
    theta, scaling = rotary(settings)
    width = settings["head_dim"] or d // h
    return TransformerConfig(
        depth=settings["num_hidden_layers"],
        num_heads=h,
        d_model=d,
        d_qk=width,
        d_v=width,
        d_ff=settings["intermediate_size"],
        mlp="swiglu",
        attention_skip=True,
        mlp_skip=True,
        norm_placement="pre",
        norm="rms",
        norm_eps=settings["rms_norm_eps"],
        final_norm=True,
        mask="causal",
        position="rotary",
        rotary_theta=theta,
        rotary_scaling=scaling,
        init="bert",
        embedding=EmbeddingConfig(
            vocab_size=settings["vocab_size"], d_embed=d, num_positions=window(settings), norm=False
        ),
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors."""
    bias = bool(settings["attention_bias"])
    return _params(weights, settings, config, into=bias, out=bias)


def _qwen2_params(weights, settings, config):
    """Qwen2 has biases on queries, keys and values and none behind them; its config is silent."""
    return _params(weights, settings, config, into=True, out=False)


def _params(weights, settings, config, *, into, out):
    d, f, h, k = config.d_model, config.d_ff, config.num_heads, config.qk_width
    groups = settings["num_key_value_heads"] or h
    weights.check_depth("layers.{}", config.depth)

    def mlp(name):
        maps = [weights.linear(f"{name}.{p}_proj", d, f, settings["mlp_bias"]) for p in _IN]
        w_out, b_out = weights.linear(f"{name}.down_proj", f, d, settings["mlp_bias"])
        (w_gate, b_gate), (w_in, b_in) = maps
        return MLPParams(
            w_in=w_in, b_in=b_in, w_out=w_out, b_out=b_out, w_gate=w_gate, b_gate=b_gate
        )

    def layer(i):
        name = f"layers.{i}"
        w_q, b_q = weights.heads_in(f"{name}.self_attn.q_proj", d, h, k, into)
        w_k, b_k = weights.heads_in(f"{name}.self_attn.k_proj", d, groups, k, into)
        w_v, b_v = weights.heads_in(f"{name}.self_attn.v_proj", d, groups, k, into)
        w_o, b_o = weights.heads_out(f"{name}.self_attn.o_proj", d, h, k, out)
        return BlockParams(
            attention=AttentionParams(
                w_q=w_q, b_q=b_q, w_k=w_k, b_k=b_k, w_v=w_v, b_v=b_v, w_o=w_o, b_o=b_o
            ),
            attention_norm=weights.norm(f"{name}.input_layernorm", d, bias=False),
            mlp=mlp(f"{name}.mlp"),
            mlp_norm=weights.norm(f"{name}.post_attention_layernorm", d, bias=False),
        )

    tokens = weights.table("embed_tokens.weight", config.embedding.vocab_size, d)
    return TransformerParams(
        layers=weights.stack(range(config.depth), layer),
        final_norm=weights.to_device(weights.norm("norm", d, bias=False)),
        embedding=weights.to_device(EmbeddingParams(tokens=tokens)),
    )


_IN = ("gate", "up")


def read_out(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> ReadOut | None:
    """The language-model head: a table of its own, or that of the tokens; None without one."""
    name = "embed_tokens.weight" if settings["tie_word_embeddings"] else "lm_head.weight"
    if not weights.has(name):
        return None
    return ReadOut(weights.table(name, config.embedding.vocab_size, config.d_model))


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """Normal(0, initializer_range); unit gains, zero biases, a zero row for padding."""
    if name.endswith(".bias"):
        return Draw(value=0.0)
    if "norm" in name:
        return Draw(value=1.0)
    zero_row = settings["pad_token_id"] if name == "embed_tokens.weight" else None
    return Draw(std=settings["initializer_range"], zero_row=zero_row)


LLAMA = Family("llama", DEFAULTS, ANCHORS, config, params, draw, read_out=read_out, kinds=KINDS)
MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    defaults=DEFAULTS
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "use_sliding_window": True,
    },
)
QWEN2 = dataclasses.replace(
    LLAMA,
    model_type="qwen2",
    defaults=DEFAULTS
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    params=_qwen2_params,
)
