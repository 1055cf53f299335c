"""Qwen3-Next (Qwen Team 2025) where its layers are attention, which is gated (Qiu et al. 2025)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float

from rank_collapse.network.attention import AttentionContext
from rank_collapse.network.projections import head_norm, rotate
from rank_collapse.network.variant_heads import gated
from rank_collapse.pretrained.families.decoders import ATTENTION_BIAS, NAMES
from rank_collapse.pretrained.families.experts import EXPERTS, QWEN2_MOE, qwen_experts
from rank_collapse.pretrained.family import Initialisation, by_layer, count, take, unscaled


def _fields(settings):
    """Of the features of a query the last half is its gate; keys have as many, of zeros."""
    kinds, every = settings["layer_types"], settings["full_attention_interval"]
    if kinds is None and every > 1:
        kinds = ["linear_attention"]
    wrong = [kind for kind in kinds or () if kind != "full_attention"]
    if wrong:
        raise ValueError(
            f"layer_types has {wrong[0]!r} of a qwen3_next model, which is not supported"
        )
    fields, groups = qwen_experts(settings), settings["num_key_value_heads"]
    unscaled(fields, settings)
    return fields | {"position": "none", "d_qk": 2 * fields["d_qk"], "num_kv_heads": groups}


def normed_and_gated(
    gains: Any,
    frequencies: Any,
    eps: Any,
    q: Float[Array, "h n k"],
    k: Float[Array, "h n k"],
    v: Float[Array, "h n v"],
    context: AttentionContext,
) -> tuple[Float[Array, "h n n"], Float[Array, "h n v"]]:
    """`gated` after a norm and rotary positions of queries and keys, which leave gates alone.

    Args:
        gains: Of the norms of queries and keys, [L, 2, v].
        frequencies: Of the rotation by the positions 0 .. n − 1.
    """
    # In float32 whatever the queries are: bfloat16 has 8 bits for the angle of position 1000.
    angles = jnp.arange(q.shape[1])[:, None] * frequencies[None, :]
    angles = jnp.concatenate([angles, angles], axis=-1)
    rotary = jnp.cos(angles), jnp.sin(angles)

    def placed(a, gain):
        own, gate = jnp.split(a, [v.shape[-1]], axis=-1)
        return jnp.concatenate([rotate(head_norm(gain, own, eps), rotary), gate], axis=-1)

    layer = 0 if context.layer is None else context.layer
    of_q, of_k = jnp.asarray(gains)[layer].astype(q.dtype)
    return gated(placed(q, of_q), placed(k, of_k), v, context)


def _held(weights, settings, config):
    frequencies = unscaled(qwen_experts(settings), settings)
    # Without weights no memory is taken, however wide and deep a config is.
    gains = np.broadcast_to(np.float32(1), (config.depth, 2, config.v_width))
    if weights is not None:
        names = [f"layers.{{}}.self_attn.{letter}_norm.weight" for letter in "qk"]
        stored = [by_layer(weights, config.depth, name, config.v_width) for name in names]
        gains = 1 + jnp.stack(stored, axis=1)
    own = gains, jnp.asarray(frequencies), settings["rms_norm_eps"]
    return {"mix": Partial(normed_and_gated, *own)}


def _names(weights, settings):
    """Those of Qwen's experts; zeros are put after the features of keys."""

    def key(part, axes):
        def padded(weights, stem, config):
            sizes = {"g": config.num_kv_heads, "k": config.v_width, "d": config.d_model}
            array = take(weights, f"{stem}self_attn.k_proj.{part}", axes, sizes)
            return np.concatenate([array, np.zeros_like(array)], axis=-1)

        return padded

    layer = {name: given for name, given in EXPERTS.items() if name != "attention.k"}
    layer["attention.w_k"] = key("weight", "(g k) d -> g d k")
    if settings["attention_bias"]:
        layer["attention.b_k"] = key("bias", "(g k) -> g k")
    return NAMES._replace(layer=layer)


QWEN3_NEXT = QWEN2_MOE.but(
    "qwen3_next",
    entries={
        "num_hidden_layers": 48,
        "num_key_value_heads": count(2),
        "head_dim": count(256),
        "partial_rotary_factor": 0.25,
        "moe_intermediate_size": count(512),
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": count(10),
        "num_experts": count(512),
        "norm_topk_prob": True,
        "full_attention_interval": count(4),
        "attention_bias": False,
        "qkv_bias": None,
        "sliding_window": None,
        "use_sliding_window": None,
        "max_window_layers": None,
    },
    names=_names,
    computed=_fields,
    held=_held,
    biases=ATTENTION_BIAS,
    gain_offset=1.0,
    init=Initialisation(gain=0.0, padded=("embed_tokens.weight",)),
)
