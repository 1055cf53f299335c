"""Llama (Touvron et al. 2023) and Mistral: causal, pre-RMSNorm, rotary, gated, grouped heads."""

import dataclasses
from typing import Any

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained import decoder
from rank_collapse.pretrained.family import Family
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
    d, groups = config.d_model, decoder.groups_of(settings)
    bias = settings["attention_bias"]

    def norm(name):
        return weights.norm(name, d, bias=False)

    def layer(name):
        attention = f"{name}.self_attn"
        return BlockParams(
            attention=decoder.attention(weights, attention, config, groups, into=bias, out=bias),
            attention_norm=norm(f"{name}.input_layernorm"),
            mlp=decoder.mlp(weights, f"{name}.mlp", d, config.d_ff, settings["mlp_bias"]),
            mlp_norm=norm(f"{name}.post_attention_layernorm"),
        )

    return decoder.decoder_params(weights, config, layer, norm)


LLAMA = Family(
    "llama",
    DEFAULTS,
    decoder.ANCHORS,
    config,
    params,
    decoder.draw,
    decoder.read_out,
    kinds=decoder.KINDS,
)
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
