"""Decoders with rotary positions, gated MLPs and grouped heads: Llama and after it.

Llama (Touvron et al. 2023), Mistral; Qwen2 (Yang et al. 2024) with biases, Qwen3 (Yang et al.
2025) with QK-norm; Phi-3 (Abdin et al. 2024) with fused maps and LongRoPE; OLMo 2 (OLMo Team 2024)
with norms of what each branch puts out, OLMo 3 with windows too; Granite (IBM 2024) with
multipliers; SmolLM3 (Hugging Face 2025) with layers that have no positions. With LayerNorm:
StableLM (Bellagente et al. 2024), Cohere's Command R and, with windows, R7B, whose branches are
parallel. Gemma is in `gemma`, mixtures of experts in `experts`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rank_collapse.pretrained.family import (
    USUAL_READS,
    Entry,
    Family,
    Initialisation,
    NamedTensor,
    Names,
    Settings,
    count_entry,
    local_theta,
    num_positions,
    rotary_entry,
    rotary_fields,
)

LAYER_TYPES = ("full_attention", "sliding_attention")


def layer_windows(
    settings: Settings, local: Sequence[bool], distance: int | None
) -> tuple[int, ...]:
    """Compute the field `windows`: `distance` in layers that are local, 0 in the others.

    `layer_types` of the settings, if present, says which layers are local.

    Args:
        settings: Settings of the model.
        local: Bool of each layer.
        distance: Distance to which a local layer attends; None for no window.

    Returns:
        One number for each layer; () if no layer has a window.
    """
    kinds = settings.get("layer_types")
    if kinds is not None:
        unknown = [k for k in kinds if k not in LAYER_TYPES]
        if unknown:
            raise ValueError(f"layer_types has {unknown[0]!r}, only {LAYER_TYPES} are supported")
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


def decoder_fields(
    settings: Settings,
    local: Callable[[int], Any] = lambda layer: True,
    entry: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Compute widths of heads, windows and rotary positions.

    Args:
        settings: Settings of the model.
        local: Whether a layer has the window, where `layer_types` does not say.
        entry: Entry on rotary positions, instead of the config's.
    """
    width = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    entry = rotary_entry(settings, "full_attention") | (entry or {})
    limit = settings.get("sliding_window")
    distance = None if limit is None else limit - 1
    is_local = [bool(local(i)) for i in range(settings["num_hidden_layers"])]
    share = settings.get("partial_rotary_factor", 1.0)
    part = entry.get("partial_rotary_factor", 1.0)
    if part != 1 and "partial_rotary_factor" not in settings:
        raise ValueError(
            f"partial_rotary_factor={part!r} of a {settings['model_type']} model is not supported, "
            "only 1.0: transformers rotates all features of a head"
        )
    return rotary_fields(entry, settings, width, share) | {
        "d_qk": width,
        "d_v": width,
        "windows": layer_windows(settings, is_local, distance),
        "embedding": {"num_positions": num_positions(entry, settings)},
    }


def qwen_fields(settings: Settings) -> dict[str, Any]:
    """Compute the fields of a Qwen: the last layers have a window, where the model uses one."""
    limit = (settings["sliding_window"] or 4096) if settings["use_sliding_window"] else None
    settings = settings | {"sliding_window": limit}
    return decoder_fields(settings, lambda i: i >= settings["max_window_layers"])


def _phi3_fields(settings):
    entry = rotary_entry(settings)
    early = entry.get("rope_type", entry.get("type")) in ("su", "yarn")  # what early files call it
    return decoder_fields(settings, entry={"rope_type": "longrope"} if early else {})


def _olmo3_fields(settings):
    """Set the rotary base without scaling in layers with a window."""
    fields = decoder_fields(settings, lambda i: (i + 1) % 4)
    return fields | {"local_theta": local_theta(settings, 5e5)}


def _granite_fields(settings):
    return decoder_fields(settings) | {"temperature": 1 / settings["attention_multiplier"]}


def _smollm3_fields(settings):
    """Map each 0 of `no_rope_layers` to a layer without positions, with the window if any has."""
    depth, uses_rotary = settings["num_hidden_layers"], settings["no_rope_layers"]
    if uses_rotary is None:
        uses_rotary = [int((i + 1) % settings["no_rope_layer_interval"] != 0) for i in range(depth)]
    if len(uses_rotary) < depth or any(rotated not in (0, 1) for rotated in uses_rotary):
        raise ValueError(f"no_rope_layers={uses_rotary} is not a list of {depth} entries 0 or 1")
    fields = decoder_fields(
        settings, lambda i: settings["use_sliding_window"] and not uses_rotary[i]
    )
    return fields | {"rotary_layers": tuple(bool(rotated) for rotated in uses_rotary[:depth])}


def _cohere2_fields(settings):
    """Remove the positions from layers without a window."""
    fields = decoder_fields(settings, lambda i: (i + 1) % settings["sliding_window_pattern"])
    windows = fields["windows"] or (0,) * settings["num_hidden_layers"]
    return fields | {"rotary_layers": tuple(w > 0 for w in windows)}


ATTENTION = {f"attention.{letter}": f"self_attn.{letter}_proj" for letter in "qkvo"}
MLP = {"mlp.gate": "mlp.gate_proj", "mlp.in": "mlp.up_proj", "mlp.out": "mlp.down_proj"}
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
ONE_NORM = dict.fromkeys(NORMS, "input_layernorm")  # of parallel branches
OUTSIDE = {"embedding.tokens": "embed_tokens.weight", "final_norm": "norm"}
NAMES = Names("layers.{}", ATTENTION | MLP | NORMS, OUTSIDE)
SHARED_NORM = NAMES._replace(layer=ATTENTION | MLP | ONE_NORM)
# Of each head, and over all heads together.
QK_NORMS = {
    "head": {
        "attention.q_norm": NamedTensor("self_attn.q_norm.weight", "k"),
        "attention.k_norm": NamedTensor("self_attn.k_norm.weight", "k"),
    },
    "width": {
        "attention.q_norm": NamedTensor("self_attn.q_norm.weight", "(h k) -> h k"),
        "attention.k_norm": NamedTensor("self_attn.k_norm.weight", "(g k) -> g k"),
    },
}
ATTENTION_BIAS = dict.fromkeys("qkvo", "attention_bias")
WINDOWS = {"sliding_window": int, "layer_types": list}
ROTARY = {"rope_theta": float, "rope_scaling": dict, "rope_parameters": dict}

DECODER = Family(
    "",
    entries=ROTARY
    | {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": count_entry(),
        "head_dim": count_entry(),
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "pad_token_id": Entry(None, (int,), least=-1),
        "tie_word_embeddings": False,
    },
    reads=USUAL_READS | {"norm_eps": "rms_norm_eps", "vocab_size": "vocab_size"},
    names=NAMES,
    anchors=("embed_tokens.weight",),
    fields={"norm_placement": "pre", "norm": "rms", "final_norm": True, "mask": "causal"},
    embedding={"norm": False},
    computed=decoder_fields,
    gated=True,
    biases={"": False},
    init=Initialisation(padded=("embed_tokens.weight",)),
    head="lm_head.weight",
)
LLAMA = DECODER.derive(
    "llama",
    entries={"attention_bias": False, "mlp_bias": False},
    biases=ATTENTION_BIAS | dict.fromkeys(("gate", "in", "out"), "mlp_bias"),
)
MISTRAL = DECODER.derive(
    "mistral",
    entries={
        "sliding_window": int,
        "intermediate_size": 14336,
        "num_key_value_heads": count_entry(8),
        "max_position_embeddings": 131072,
    },
)
QWEN2 = DECODER.derive(
    "qwen2",
    entries=WINDOWS
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": count_entry(32),
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    computed=qwen_fields,
    biases=dict.fromkeys("qkv", True),
)
QWEN3 = QWEN2.derive(
    "qwen3",
    entries={"head_dim": count_entry(128), "attention_bias": False},
    names=NAMES._replace(layer=NAMES.layer | QK_NORMS["head"]),
    fields={"qk_norm": "head"},
    biases=ATTENTION_BIAS,
)
PHI3 = DECODER.derive(
    "phi3",
    entries={
        "sliding_window": int,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": count_entry(4096),
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 32000,
    },
    names=NAMES._replace(
        layer=NORMS
        | {
            "attention.qkv_grouped": "self_attn.qkv_proj",
            "attention.o": "self_attn.o_proj",
            "mlp.gate_in": "mlp.gate_up_proj",
            "mlp.out": "mlp.down_proj",
        }
    ),
    computed=_phi3_fields,
)
OLMO2 = DECODER.derive(
    "olmo2",
    entries={"vocab_size": 50304, "rms_norm_eps": 1e-5, "pad_token_id": 1}
    | {"attention_bias": False},
    names=NAMES._replace(
        layer=ATTENTION
        | MLP
        | QK_NORMS["width"]
        | {
            "attention_branch_norm": "post_attention_layernorm",
            "mlp_branch_norm": "post_feedforward_layernorm",
        }
    ),
    fields={"norm_placement": "branch", "qk_norm": "width"},
    biases=ATTENTION_BIAS,
)
OLMO3 = OLMO2.derive(
    "olmo3",
    entries={"sliding_window": 4096, "layer_types": list, "rope_theta": 5e5},
    computed=_olmo3_fields,
)
GRANITE = LLAMA.derive(
    "granite",
    entries={
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": Entry(1.0, (float,), least=1e-30),
        "logits_scaling": Entry(1.0, (float,), least=1e-30),
    },
    reads={"scale": "embedding_multiplier", "branch_gain": "residual_multiplier"},
    fields={"scale_scores": False},
    computed=_granite_fields,
)
SMOLLM3 = LLAMA.derive(
    "smollm3",
    entries=WINDOWS
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": count_entry(4),
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "use_sliding_window": False,
        "no_rope_layers": list,
        "no_rope_layer_interval": count_entry(4),
        "pad_token_id": 128004,
        "tie_word_embeddings": True,
    },
    computed=_smollm3_fields,
)
LAYER_NORM = DECODER.derive(
    "",
    entries={"rms_norm_eps": None, "layer_norm_eps": 1e-5, "head_dim": None},
    reads={"norm_eps": "layer_norm_eps"},
    fields={"norm": "layer"},
)
STABLELM = LAYER_NORM.derive(
    "stablelm",
    entries={
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_key_value_heads": count_entry(32),
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "use_parallel_residual": False,
        "qk_layernorm": False,
    },
    reads={"parallel": "use_parallel_residual"},
    names=lambda weights, settings: SHARED_NORM if settings["use_parallel_residual"] else NAMES,
    biases=dict.fromkeys("qkv", "use_qkv_bias"),
    allowed={"qk_layernorm": (False,)},  # a LayerNorm of each head with a gain of its own
)
COHERE = LAYER_NORM.derive(
    "cohere",
    entries={
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 5e5,
        "logit_scale": 0.0625,
        "attention_bias": False,
        "use_qk_norm": False,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    names=SHARED_NORM,
    fields={"parallel": True},
    interleaved=True,
    biases=ATTENTION_BIAS | {"norm": False},
    allowed={"use_qk_norm": (False,)},  # as StableLM's
)
COHERE2 = COHERE.derive(
    "cohere2",
    entries={
        "rope_theta": float,
        "sliding_window": 4096,
        "layer_types": list,
        "sliding_window_pattern": count_entry(4),
        "use_qk_norm": None,
    },
    computed=_cohere2_fields,
    allowed={"use_qk_norm": None},
)
