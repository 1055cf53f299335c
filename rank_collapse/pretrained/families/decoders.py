"""Decoders with RMSNorm, rotary positions, gated MLPs and grouped heads: Llama and after it.

Llama (Touvron et al. 2023), Mistral; Qwen2 (Yang et al. 2024) with biases, Qwen3 (Yang et al.
2025) with QK-norm; Phi-3 (Abdin et al. 2024) with fused maps and LongRoPE; OLMo 2 (OLMo Team 2024)
with norms of what each branch puts out. Gemma is in `gemma`, mixtures of experts in `experts`.
"""

from collections.abc import Sequence
from typing import Any

from rank_collapse.pretrained.drawn import Initialisation
from rank_collapse.pretrained.entries import Entry, Settings, count
from rank_collapse.pretrained.family import USUAL_READS, Family
from rank_collapse.pretrained.mapping import Leaf, Names
from rank_collapse.pretrained.rotary import num_positions, rotary_entry, rotary_fields

LAYER_TYPES = ("full_attention", "sliding_attention")


def windows_of(settings: Settings, local: Sequence[bool], distance: int | None) -> tuple[int, ...]:
    """The field `windows`: `distance` in layers that are local, 0 in the others.

    `layer_types` of the settings, where it is there, says which are local.
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


def head_width(settings: Settings) -> int:
    """Width of a head."""
    return settings["head_dim"] or settings["hidden_size"] // settings["num_attention_heads"]


def decoder_fields(
    settings: Settings, rotary: dict[str, Any] | None = None, windows: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Widths of heads, windows and rotary positions.

    Args:
        rotary, windows: In place of what these entries say in Llama's.
    """
    width, entry = head_width(settings), rotary_entry(settings, "full_attention")
    if rotary is None:
        rotary = rotary_fields(entry, settings, width)
    if windows is None:
        limit = settings["sliding_window"]
        windows = windows_of(settings, [True] * settings["num_hidden_layers"], limit and limit - 1)
    embedding = {"num_positions": num_positions(entry, settings)}
    return {"d_qk": width, "d_v": width, "windows": windows, "embedding": embedding, **rotary}


def qwen_fields(settings: Settings) -> dict[str, Any]:
    """The last layers have a window, where the model uses one."""
    limit = (settings["sliding_window"] or 4096) if settings["use_sliding_window"] else None
    local = [i >= settings["max_window_layers"] for i in range(settings["num_hidden_layers"])]
    return decoder_fields(settings, windows=windows_of(settings, local, limit and limit - 1))


def _phi3_fields(settings):
    entry = dict(rotary_entry(settings))
    if entry.get("rope_type", entry.get("type")) in ("su", "yarn"):  # what early files call it
        entry["rope_type"] = "longrope"
    share = settings["partial_rotary_factor"]
    return decoder_fields(settings, rotary_fields(entry, settings, head_width(settings), share))


NAMES = Names(
    "layers.{}",
    {
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "attention_norm": "input_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.in": "mlp.up_proj",
        "mlp.out": "mlp.down_proj",
        "mlp_norm": "post_attention_layernorm",
    },
    {"embedding.tokens": "embed_tokens.weight", "final_norm": "norm"},
)
# Of each head, and over all heads together.
QK_NORMS = {
    "head": {
        "attention.q_norm": Leaf("self_attn.q_norm.weight", "k"),
        "attention.k_norm": Leaf("self_attn.k_norm.weight", "k"),
    },
    "width": {
        "attention.q_norm": Leaf("self_attn.q_norm.weight", "(h k) -> h k"),
        "attention.k_norm": Leaf("self_attn.k_norm.weight", "(g k) -> g k"),
    },
}
ATTENTION_BIAS = dict.fromkeys("qkvo", "attention_bias")

DECODER = Family(
    "",
    entries={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": count(),
        "head_dim": count(),
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": float,
        "rope_scaling": dict,
        "rope_parameters": dict,
        "sliding_window": int,
        "layer_types": list,
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
LLAMA = DECODER.but(
    "llama",
    entries={"attention_bias": False, "mlp_bias": False},
    biases=ATTENTION_BIAS | dict.fromkeys(("gate", "in", "out"), "mlp_bias"),
)
MISTRAL = LLAMA.but(
    "mistral",
    entries={
        "intermediate_size": 14336,
        "num_key_value_heads": count(8),
        "max_position_embeddings": 131072,
    },
)
QWEN2 = DECODER.but(
    "qwen2",
    entries={
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": count(32),
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    computed=qwen_fields,
    biases=dict.fromkeys("qkv", True),
)
QWEN3 = QWEN2.but(
    "qwen3",
    entries={"head_dim": count(128), "attention_bias": False},
    names=NAMES._replace(layer=NAMES.layer | QK_NORMS["head"]),
    fields={"qk_norm": "head"},
    biases=ATTENTION_BIAS,
)
PHI3 = DECODER.but(
    "phi3",
    entries={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": count(4096),
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 32000,
    },
    names=NAMES._replace(
        layer={
            "attention.qkv_grouped": "self_attn.qkv_proj",
            "attention.o": "self_attn.o_proj",
            "attention_norm": "input_layernorm",
            "mlp.gate_in": "mlp.gate_up_proj",
            "mlp.out": "mlp.down_proj",
            "mlp_norm": "post_attention_layernorm",
        }
    ),
    computed=_phi3_fields,
)
OLMO2 = DECODER.but(
    "olmo2",
    entries={"vocab_size": 50304, "rms_norm_eps": 1e-5, "pad_token_id": 1}
    | {"attention_bias": False},
    names=NAMES._replace(
        layer={
            **{place: name for place, name in NAMES.layer.items() if not place.endswith("norm")},
            "attention_branch_norm": "post_attention_layernorm",
            "mlp_branch_norm": "post_feedforward_layernorm",
            **QK_NORMS["width"],
        }
    ),
    fields={"norm_placement": "branch", "qk_norm": "width"},
    biases=ATTENTION_BIAS,
)
