"""Gemma 2 (Riviere et al. 2024) and Gemma 3 (Kamath et al. 2025): norms around each branch,
windows in most layers; capped scores in the one, QK-norm and two rotary bases in the other."""

import math
from typing import Any

from rank_collapse.pretrained.drawn import Initialisation
from rank_collapse.pretrained.entries import Entry, Settings, count
from rank_collapse.pretrained.families.decoders import (
    ATTENTION_BIAS,
    DECODER,
    NAMES,
    QK_NORMS,
    decoder_fields,
    windows_of,
)
from rank_collapse.pretrained.rotary import rotary_entry, rotary_fields


def _fields(settings: Settings, every: int = 2, **rotary: Any) -> dict[str, Any]:
    limit = settings["sliding_window"]
    local = [(i + 1) % every != 0 for i in range(settings["num_hidden_layers"])]
    windows = windows_of(settings, local, limit and limit - 1)
    fields = decoder_fields(settings, rotary or None, windows)
    fields["embedding"]["scale"] = math.sqrt(settings["hidden_size"])
    return fields | {
        "score_cap": float(settings["attn_logit_softcapping"] or 0.0),
        "temperature": math.sqrt(settings["query_pre_attn_scalar"] / settings["head_dim"]),
    }


def _gemma3_fields(settings):
    """Layers with a window have a rotary base of their own, and no scaling."""
    width = settings["head_dim"]
    entry = {"rope_theta": settings["rope_theta"] or 1e6} | rotary_entry(settings, "full_attention")
    local = {"rope_theta": settings["rope_local_base_freq"]}
    if "sliding_attention" in (settings["rope_parameters"] or {}):
        local |= rotary_entry(settings | {"rope_scaling": None}, "sliding_attention")
    if (kind := local.get("rope_type", "default")) != "default":
        raise ValueError(
            f"rope_parameters.sliding_attention.rope_type={kind!r} of a gemma3_text model is not "
            "supported, only 'default'"
        )
    theta = rotary_fields(local, settings, width)["rotary_theta"]
    rotary = rotary_fields(entry, settings, width)
    return _fields(settings, settings["sliding_window_pattern"], local_theta=theta, **rotary)


_LAYER = NAMES.layer | {
    "attention_branch_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_branch_norm": "post_feedforward_layernorm",
}
# Null for these means that the model does without, not that it is as published.
GEMMA2 = DECODER.but(
    "gemma2",
    entries={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": count(4),
        "head_dim": count(256),
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": Entry(256, (int, float)),
        "sliding_window": Entry(4096, (int,), nullable=True),
        "attn_logit_softcapping": Entry(50.0, (float,), nullable=True),
        "final_logit_softcapping": Entry(30.0, (float,), nullable=True),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_bidirectional_attention": bool,
        "pad_token_id": Entry(0, (int,), least=-1),
    },
    reads={"mlp": "hidden_activation"},
    names=NAMES._replace(layer=_LAYER),
    fields={"norm_placement": "sandwich"},
    computed=_fields,
    allowed={"use_bidirectional_attention": (None, False)},
    biases=ATTENTION_BIAS,
    gain_offset=1.0,  # what is stored of a norm's gain is what it has beyond 1
    init=Initialisation(gain=0.0, padded=("embed_tokens.weight",)),
)
GEMMA3 = GEMMA2.but(
    "gemma3_text",
    entries={
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": float,
        "final_logit_softcapping": float,
        "sliding_window_pattern": count(6),
        "rope_local_base_freq": 10000.0,
    },
    names=NAMES._replace(layer=_LAYER | QK_NORMS["head"]),
    fields={"qk_norm": "head"},
    computed=_gemma3_fields,
)
