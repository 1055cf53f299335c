"""Llama (Touvron et al. 2023) and Mistral: causal, pre-RMSNorm, rotary, gated, grouped heads."""

import dataclasses
from typing import Any

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.pretrained import decoder
from rank_collapse.pretrained.weights import Weights

DEFAULTS = decoder.DEFAULTS | {"attention_bias": False, "mlp_bias": False}


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    return decoder.decoder_config(settings)


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors."""
    groups, bias = decoder.groups_of(settings), settings["attention_bias"]

    def attention(name):
        return decoder.attention(weights, f"{name}.self_attn", config, groups, into=bias, out=bias)

    def mlp(name):
        d, f = config.d_model, config.d_ff
        return decoder.mlp(weights, f"{name}.mlp", d, f, settings["mlp_bias"])

    return decoder.pre_norm_params(weights, config, attention, mlp)


LLAMA = decoder.family("llama", DEFAULTS, config, params)
MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    defaults=DEFAULTS
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
)
