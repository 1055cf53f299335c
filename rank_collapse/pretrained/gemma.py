"""Gemma 2 (Riviere et al. 2024) and Gemma 3 (Kamath et al. 2025): norms around each branch,
windows in most layers; capped scores in the one, QK-norm and two rotary bases in the other."""

import dataclasses
import math
from typing import Any

import numpy as np

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.layers import NormParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained import decoder
from rank_collapse.pretrained.rotary import rotary_entry, rotary_fields
from rank_collapse.pretrained.weights import Draw, Weights

DEFAULTS = decoder.DEFAULTS | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_bidirectional_attention": None,
    "pad_token_id": 0,
}
DEFAULTS.pop("hidden_act")
# Null for these means that the model does without, not that it is as published.
NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
KINDS = decoder.KINDS | {"query_pre_attn_scalar": (int, float)}
KINDS |= {"use_bidirectional_attention": (bool,)}


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    return _config(settings, every=2)


def _gemma3_config(settings):
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
    every = settings["sliding_window_pattern"]
    return _config(settings, every=every, qk_norm="head", local_theta=theta, **rotary)


def _config(settings, every, **fields):
    decoder.only(settings, "use_bidirectional_attention", None, False)
    limit = settings["sliding_window"]
    local = [(i + 1) % every != 0 for i in range(settings["num_hidden_layers"])]
    plain = decoder.decoder_config(
        settings,
        mlp=decoder.gated(settings, "hidden_activation"),
        norm_placement="sandwich",
        windows=decoder.windows_of(settings, local, limit and limit - 1),
        score_cap=float(settings["attn_logit_softcapping"] or 0.0),
        temperature=math.sqrt(settings["query_pre_attn_scalar"] / settings["head_dim"]),
        **fields,
    )
    scale = math.sqrt(plain.d_model)
    return plain.replace(embedding=dataclasses.replace(plain.embedding, scale=scale))


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters: what is stored of a norm's gain is what it has beyond 1."""
    d, groups, bias = config.d_model, decoder.groups_of(settings), settings["attention_bias"]

    def gain(name, width):
        return 1 + np.asarray(weights.take(f"{name}.weight", width), weights.dtype)

    def norm(name):
        return NormParams(gain=gain(name, d))

    def layer(name):
        return BlockParams(
            attention=decoder.attention(
                weights, f"{name}.self_attn", config, groups, into=bias, out=bias, gain=gain
            ),
            attention_norm=norm(f"{name}.input_layernorm"),
            attention_branch_norm=norm(f"{name}.post_attention_layernorm"),
            mlp=decoder.mlp(weights, f"{name}.mlp", d, config.d_ff),
            mlp_norm=norm(f"{name}.pre_feedforward_layernorm"),
            mlp_branch_norm=norm(f"{name}.post_feedforward_layernorm"),
        )

    return decoder.decoder_params(weights, config, layer, norm)


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """As Llama's, gains being stored as what they are beyond 1."""
    return Draw(value=0.0) if "norm" in name else decoder.draw(name, settings)


GEMMA2 = decoder.family(
    "gemma2", DEFAULTS, config, params, draw=draw, kinds=KINDS, nullable=NULLABLE
)
GEMMA3 = dataclasses.replace(
    GEMMA2,
    model_type="gemma3_text",
    defaults=DEFAULTS
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
    },
    config=_gemma3_config,
    kinds=KINDS | dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (float,)),
)
