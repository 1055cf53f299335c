"""Mixtral (Jiang et al. 2024), Qwen2-MoE and Qwen3-MoE: mixtures of experts, shared ones too.

All experts of a layer are one wide MLP whose units a router weighs (`layers.unit_shares`).
"""

from typing import Any

import numpy as np

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.layers import MLPParams
from rank_collapse.pretrained.families.decoders import (
    ATTENTION,
    ATTENTION_BIAS,
    MISTRAL,
    NAMES,
    NORMS,
    QK_NORMS,
    QWEN2,
    decoder_fields,
    qwen_fields,
)
from rank_collapse.pretrained.family import Settings, Weights, count_entry

# Gate, up and down of one expert: in Mixtral's files and in others.
_MIXTRAL, _OTHERS = ("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")


def _mixtral_fields(settings):
    number = settings["num_local_experts"]
    return decoder_fields(settings) | {
        "d_ff": number * settings["intermediate_size"],
        "num_experts": number,
    }


def qwen_experts(settings: Settings) -> dict[str, Any]:
    """Compute windows as other Qwens have them, and the experts."""
    # Qwen3's entry is called so in files that transformers >= 5 has written.
    number = settings["num_local_experts"] or settings["num_experts"]
    shared = settings.get("shared_expert_intermediate_size", 0)
    return qwen_fields(settings) | {
        "d_ff": number * settings["moe_intermediate_size"] + shared,
        "num_experts": number,
        "router": "chosen" if settings["norm_topk_prob"] else "all",
        "d_shared": shared,
    }


def read_experts(weights: Weights, name: str, config: TransformerConfig) -> MLPParams:
    """Read the experts of a layer, one after another, then the shared one.

    Args:
        weights: The model's tensors.
        name: Prefix of the names of the layer's tensors.
        config: Configuration of the network.
    """
    d, number = config.d_model, config.num_experts
    f = (config.ff_width - config.d_shared) // number
    old = f"{name}block_sparse_moe"
    stem = old if weights.has_tensor(f"{old}.gate.weight") else f"{name}mlp"
    if weights.has_tensor(f"{stem}.experts.gate_up_proj"):  # a model in memory
        joint = weights.take(f"{stem}.experts.gate_up_proj", number, 2 * f, d)
        down = weights.take(f"{stem}.experts.down_proj", number, d, f).transpose(0, 2, 1)
        maps = [joint[:, :f].reshape(-1, d), joint[:, f:].reshape(-1, d), down.reshape(-1, d)]
    else:
        gate, up, down = _MIXTRAL if stem == old else _OTHERS
        stems = [f"{stem}.experts.{e}" for e in range(number)]
        gates = np.concatenate([weights.take(f"{e}.{gate}.weight", f, d) for e in stems])
        ups = np.concatenate([weights.take(f"{e}.{up}.weight", f, d) for e in stems])
        downs = np.concatenate([weights.take(f"{e}.{down}.weight", d, f).T for e in stems])
        maps = [gates, ups, downs]
    router, shared = weights.take(f"{stem}.gate.weight", number, d).T, None
    if config.d_shared:
        expert, wide = f"{stem}.shared_expert", config.d_shared
        gate, up, down = _OTHERS
        shared_maps = [
            weights.take(f"{expert}.{gate}.weight", wide, d),
            weights.take(f"{expert}.{up}.weight", wide, d),
            weights.take(f"{expert}.{down}.weight", d, wide).T,
        ]
        maps = [np.concatenate(pair) for pair in zip(maps, shared_maps, strict=True)]
        shared = weights.take(f"{stem}.shared_expert_gate.weight", 1, d).T
    w_gate, w_in, w_out = maps
    return MLPParams(w_in=w_in.T, w_out=w_out, w_gate=w_gate.T, w_router=router, w_shared=shared)


EXPERTS = ATTENTION | NORMS | {"mlp": read_experts}

MIXTRAL = MISTRAL.derive(
    "mixtral",
    entries={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": count_entry(2),
        "num_local_experts": count_entry(8),
    },
    reads={"experts_per_token": "num_experts_per_tok"},
    names=NAMES._replace(layer=EXPERTS),
    fields={"router": "chosen"},
    computed=_mixtral_fields,
)
QWEN2_MOE = QWEN2.derive(
    "qwen2_moe",
    entries={
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": count_entry(16),
        "moe_intermediate_size": count_entry(1408),
        "shared_expert_intermediate_size": 5632,
        "num_experts": count_entry(60),
        "num_local_experts": count_entry(),
        "num_experts_per_tok": count_entry(4),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list,
        "qkv_bias": True,
    },
    reads={"experts_per_token": "num_experts_per_tok"},
    names=NAMES._replace(layer=EXPERTS),
    computed=qwen_experts,
    biases=dict.fromkeys("qkv", "qkv_bias"),
    allowed={"decoder_sparse_step": (1,), "mlp_only_layers": (None, [])},  # one kind of MLP
)
QWEN3_MOE = QWEN2_MOE.derive(
    "qwen3_moe",
    entries={
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": count_entry(4),
        "attention_bias": False,
        "moe_intermediate_size": count_entry(768),
        "shared_expert_intermediate_size": None,
        "qkv_bias": None,
        "num_experts_per_tok": count_entry(8),
        "num_experts": count_entry(128),
    },
    names=NAMES._replace(layer=EXPERTS | QK_NORMS["head"]),
    fields={"qk_norm": "head"},
    biases=ATTENTION_BIAS,
)
