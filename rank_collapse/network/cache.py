"""Decoding token by token: the keys and values of the tokens before, and the next one's place.

Axis letters: n tokens of the longest sequence, h heads, k and v per-head widths.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rank_collapse import struct
from rank_collapse.network import attention as attn, projections
from rank_collapse.network.config import TransformerConfig


class Past(struct.Struct):
    """Keys and values of one layer's self-attention before token t."""

    known: projections.KeysValues  # [h, n, k], [h, n, v]; those of tokens 0 .. t − 1 count
    position: Any  # t

    def extended(
        self,
        params: projections.AttentionParams,
        x: Float[Array, "1 d"],
        context: attn.AttentionContext,
        norm_eps: float,
    ) -> projections.KeysValues:
        """The keys and values of tokens 0 .. t, x being token t."""
        new = projections.keys_values(params, x, context, norm_eps)

        def written(old, row):
            return jax.lax.dynamic_update_slice_in_dim(old, row, self.position, axis=1)

        return jax.tree.map(written, self.known, new)


def empty_cache(config: TransformerConfig, num_tokens: int, dtype: Any) -> projections.KeysValues:
    """Keys and values of no tokens yet, by layer [l, h, n, k] and [l, h, n, v]."""
    shape = (config.depth, config.num_heads, num_tokens)
    return projections.KeysValues(
        jnp.zeros((*shape, config.qk_width), dtype), jnp.zeros((*shape, config.v_width), dtype)
    )


def context_of_token(
    context: attn.AttentionContext, position: Int[Array, ""]
) -> attn.AttentionContext:
    """Row t of the masks, biases and positions of all n tokens, as token t alone needs them.

    Args:
        context: Of all tokens, from `inputs.make_context`.
        position: t; may be traced.
    """

    def row(a, axis):
        return None if a is None else jax.lax.dynamic_slice_in_dim(a, position, 1, axis)

    relative = context.relative
    if relative is not None:  # row p is distance n − 1 − p; here row j is to be distance t − j
        n = (relative.shape[0] + 1) // 2
        relative = jax.lax.dynamic_slice_in_dim(relative, n - 1 - position, n, 0)

    def turned(pair):
        return None if pair is None else tuple(row(a, 0) for a in pair)

    return context.replace(
        mask=row(context.mask, -2),
        bias=row(context.bias, -2),
        rotary=turned(context.rotary),
        relative=relative,
        distance=row(context.distance, -2),
        local_rotary=turned(context.local_rotary),
    )
