"""Gemma (Mesnard et al. 2024), a Llama with scaled embeddings; Gemma 2 (Riviere et al. 2024) and
Gemma 3 (Kamath et al. 2025): norms around each branch, windows in most layers; capped scores in
the one, QK-norm and two rotary bases in the other."""

import math
from typing import Any

from rank_collapse.pretrained.families.decoders import (
    ATTENTION_BIAS,
    DECODER,
    NAMES,
    QK_NORMS,
    decoder_fields,
)
from rank_collapse.pretrained.family import (
    Entry,
    Initialisation,
    Settings,
    count_entry,
    local_theta,
    rotary_entry,
)


def _gemma_fields(settings, *arguments):
    """Compute the fields of `TransformerConfig` of a decoder, with embeddings multiplied by √d.

    Args:
        settings: Settings of the model.
        *arguments: Further arguments of `decoder_fields`.
    """
    fields = decoder_fields(settings, *arguments)
    fields["embedding"]["scale"] = math.sqrt(settings["hidden_size"])
    return fields


def _gemma2_fields(settings: Settings, interval: int = 2, entry: object = None) -> dict[str, Any]:
    """Compute the fields of `TransformerConfig`: those of Gemma, with the cap and the scale of
    scores.

    Args:
        settings: Settings of the model.
        interval: All layers but each `interval`-th attend within a window alone.
        entry: Entry for rotary positions, see `decoder_fields`.
    """
    return _gemma_fields(settings, lambda i: (i + 1) % interval, entry) | {
        "score_cap": float(settings["attn_logit_softcapping"] or 0.0),
        "temperature": math.sqrt(settings["query_pre_attn_scalar"] / settings["head_dim"]),
    }


def _gemma3_fields(settings):
    """Compute the fields of `TransformerConfig`: those of Gemma 2, with a rotary base of their own
    for layers with a window, which has no scaling."""
    base = 1e6 if settings["rope_theta"] is None else settings["rope_theta"]
    entry = {"rope_theta": base} | rotary_entry(settings, "full_attention")
    theta = local_theta(settings, settings["rope_local_base_freq"])
    interval = settings["sliding_window_pattern"]
    return _gemma2_fields(settings, interval, entry) | {"local_theta": theta}


_LAYER = NAMES.layer | {
    "attention_branch_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_branch_norm": "post_feedforward_layernorm",
}
GEMMA = DECODER.derive(
    "gemma",
    entries={
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": count_entry(16),
        "head_dim": count_entry(256),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": str,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_bidirectional_attention": bool,
        "pad_token_id": Entry(0, (int,), least=-1),
    },
    # The first models' "gelu" is the tanh approximation, whatever their files call it.
    computed=lambda settings: _gemma_fields(settings) | {"mlp": "geglu_tanh"},
    allowed={
        "hidden_act": ("gelu", "gelu_pytorch_tanh"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "use_bidirectional_attention": (None, False),
    },
    biases=ATTENTION_BIAS,
    gain_offset=1.0,  # what is stored of a norm's gain is what it has beyond 1
    init=Initialisation(gain=0.0, padded=("embed_tokens.weight",)),
)
# Null for these means that the model does without, not that it is as published.
GEMMA2 = GEMMA.derive(
    "gemma2",
    entries={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": count_entry(4),
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": Entry(256, (int, float)),
        "sliding_window": Entry(4096, (int,), nullable=True),
        "layer_types": list,
        "attn_logit_softcapping": Entry(50.0, (float,), nullable=True),
        "final_logit_softcapping": Entry(30.0, (float,), nullable=True),
    },
    reads={"mlp": "hidden_activation"},
    names=NAMES._replace(layer=_LAYER),
    fields={"norm_placement": "sandwich"},
    computed=_gemma2_fields,
    allowed={"hidden_act": None, "hidden_activation": None},
)
GEMMA3 = GEMMA2.derive(
    "gemma3_text",
    entries={
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": float,
        "final_logit_softcapping": float,
        "sliding_window_pattern": count_entry(6),
        "rope_local_base_freq": 10000.0,
    },
    names=NAMES._replace(layer=_LAYER | QK_NORMS["head"]),
    fields={"qk_norm": "head"},
    computed=_gemma3_fields,
)
