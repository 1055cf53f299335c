"""Mixtral (Jiang et al. 2024), Qwen2-MoE and Qwen3-MoE: mixtures of experts, shared ones too.

All experts of a layer are one wide MLP whose units a router weighs (`layers.unit_shares`).
"""

import dataclasses
from typing import Any

import numpy as np

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.layers import MLPParams
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.pretrained import decoder, qwen
from rank_collapse.pretrained.weights import Weights

MIXTRAL_DEFAULTS = decoder.DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
QWEN_DEFAULTS = qwen.DEFAULTS | {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_local_experts": None,
}
KINDS = decoder.KINDS | {"mlp_only_layers": (list,), "num_local_experts": (int,)}
# Gate, up and down of one expert: in Mixtral's files and in others.
_MIXTRAL, _OTHERS = ("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    count = settings["num_local_experts"]
    return decoder.decoder_config(
        settings,
        d_ff=count * settings["intermediate_size"],
        num_experts=count,
        experts_per_token=settings["num_experts_per_tok"],
        router="chosen",
    )


def _qwen_config(settings):
    """Qwen's; the network has the same kind of MLP in every layer."""
    decoder.only(settings, "decoder_sparse_step", 1)
    decoder.only(settings, "mlp_only_layers", None, [])
    # Qwen3's entry is called so in files that transformers >= 5 has written.
    count = settings["num_local_experts"] or settings["num_experts"]
    shared = settings.get("shared_expert_intermediate_size", 0)
    qwen2 = settings["model_type"] == "qwen2_moe"
    return decoder.decoder_config(
        settings,
        windows=qwen.windows(settings),
        qk_norm="none" if qwen2 else "head",
        d_ff=count * settings["moe_intermediate_size"] + shared,
        num_experts=count,
        experts_per_token=settings["num_experts_per_tok"],
        router="chosen" if settings["norm_topk_prob"] else "all",
        d_shared=shared,
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors."""

    def attention(name, groups):
        return decoder.attention(weights, name, config, groups)

    return _params(weights, settings, config, attention)


def _qwen_params(weights, settings, config):
    def attention(name, groups):
        return qwen.attention(weights, name, settings, config, groups)

    return _params(weights, settings, config, attention)


def _params(weights, settings, config, attention):
    groups = decoder.groups_of(settings)
    return decoder.pre_norm_params(
        weights,
        config,
        lambda name: attention(f"{name}.self_attn", groups),
        lambda name: experts(weights, name, config),
    )


def experts(weights: Weights, name: str, config: TransformerConfig) -> MLPParams:
    """The experts of a layer, one after another, then the shared one."""
    d, count = config.d_model, config.num_experts
    f = (config.d_ff - config.d_shared) // count
    old = f"{name}.block_sparse_moe"
    stem = old if weights.has(f"{old}.gate.weight") else f"{name}.mlp"
    if weights.has(f"{stem}.experts.gate_up_proj"):  # a model in memory
        joint = weights.take(f"{stem}.experts.gate_up_proj", count, 2 * f, d)
        down = weights.take(f"{stem}.experts.down_proj", count, d, f).transpose(0, 2, 1)
        maps = [joint[:, :f].reshape(-1, d), joint[:, f:].reshape(-1, d), down.reshape(-1, d)]
    else:
        names = _MIXTRAL if stem == old else _OTHERS
        each = [f"{stem}.experts.{e}" for e in range(count)]
        maps = [
            _in_a_row([weights.take(f"{e}.{part}.weight", f, d) for e in each])
            for part in names[:2]
        ]
        maps.append(_in_a_row([weights.take(f"{e}.{names[2]}.weight", d, f).T for e in each]))
    router, shared = weights.take(f"{stem}.gate.weight", count, d).T, None
    if config.d_shared:
        own = decoder.mlp(weights, f"{stem}.shared_expert", d, config.d_shared)
        own = (own.w_gate.T, own.w_in.T, own.w_out)
        maps = [_in_a_row(pair) for pair in zip(maps, own, strict=True)]
        shared = weights.take(f"{stem}.shared_expert_gate.weight", 1, d).T
    w_gate, w_in, w_out = maps
    return MLPParams(w_in=w_in.T, w_out=w_out, w_gate=w_gate.T, w_router=router, w_shared=shared)


def _in_a_row(matrices):
    """The matrices one below another; where only their shapes are asked for, the shape."""
    if any(m.strides != (0, 0) for m in matrices):
        return np.concatenate(matrices)
    return np.broadcast_to(matrices[0][:1, :1], (sum(map(len, matrices)), matrices[0].shape[1]))


MIXTRAL = decoder.family("mixtral", MIXTRAL_DEFAULTS, config, params, kinds=KINDS)
QWEN2_MOE = decoder.family(
    "qwen2_moe",
    QWEN_DEFAULTS
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "qkv_bias": True,
    },
    _qwen_config,
    _qwen_params,
    kinds=KINDS,
)
QWEN3_MOE = dataclasses.replace(
    QWEN2_MOE,
    model_type="qwen3_moe",
    defaults=QWEN_DEFAULTS
    | {
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
)
