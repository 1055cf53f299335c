"""Normalised queries and keys (QK-norm) with their pairwise differences, for `pair_scores`.

RMSNorm of x W + b, of each head or of all heads together. The differences are made from those of
the tokens as a norm's are (`pair_operations.normalised_difference`): for a table all at once, for
columns when they are asked for.

Axis letters: h heads, n tokens, g what is normalised apart (the heads, or 1 for all together),
m features of these (c, or h c), c per-head query/key width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rank_collapse.network import attention as attn
from rank_collapse.theory import pair_operations as ops


class Normalised(NamedTuple):
    """Normalised queries or keys, and their differences as a function.

    Attributes:
        values: [h, n, c].
        differences: (base, noise) → the values less that at base, an index or one per head [h]:
            mantissas [h, n, c] and natural logarithms [h, n].
    """

    values: Any
    differences: Any


def normalised_projection(gain, w, b, tokens, state, norm_eps, noise) -> Normalised:
    """RMSNorm of x W + b, of each head (gain [c]) or over all heads ([h, c]).

    Args:
        gain, w, b: Of the queries or of the keys.
        tokens: What the layer looks at [n, d], with noise.
        state: Its differences, a `PairState` or columns.
        norm_eps: ε under the root.
        noise: See `noise.Noise`.
    """
    values = noise(attn.project(tokens, w, b))
    of = _of_table if isinstance(state, ops.PairState) else _of_columns
    return of(gain, w, values, state, norm_eps, noise)


def _of_table(gain, w, values, state, norm_eps, noise):
    rest = jnp.einsum("ikd,hdc->hikc", noise(state.rest), w)
    heads, n, _, width = rest.shape
    if gain.ndim == 2:
        values = _together(values)
        rest = jnp.moveaxis(rest, 0, 2).reshape(1, n, n, heads * width)

    def single(head, values, rest):
        return ops.normalised(values, rest, norm_eps, noise.at(head))

    values, rest = jax.vmap(single)(jnp.arange(len(values)), values, rest)
    if gain.ndim == 2:
        values = _apart(values, heads)
        rest = jnp.moveaxis(rest.reshape(n, n, heads, width), 2, 0)
    log_scale = jnp.broadcast_to(state.log_scale, rest.shape[:3])
    rest, log_scale = ops.normalise(rest * gain.reshape(-1, 1, 1, width), log_scale)
    every = jnp.arange(heads)

    def differences(base, noise):
        return noise(rest[every, :, base]), noise(log_scale[every, :, base])

    return Normalised(noise(values * gain.reshape(-1, 1, width)), differences)


def _of_columns(gain, w, values, state, norm_eps, noise):
    heads, _, width = values.shape
    joint = gain.ndim == 2
    center = _together(values) if joint else values  # [g, n, m]
    sigma = ops.deviation(center, norm_eps, noise)  # [g, n]
    scales = jnp.broadcast_to(gain.reshape(-1, 1, width), (heads, 1, width))

    def single(head, base, noise):
        own = noise.at(head)
        rest, log_scale = state.column(base, own)
        rest = jnp.einsum("nd,hdc->hnc", rest, w if joint else w[head][None])
        group = 0 if joint else head
        rest = _together(rest)[0] if joint else rest[0]
        at_k = sigma[group, base][None], center[group, base][None, :]
        at_i = sigma[group], center[group]
        rest = ops.normalised_difference(rest, at_i, at_k, own)
        if joint:
            rest = _apart(rest[None], heads)[head]
        return ops.normalise(own(rest * scales[head]), log_scale)

    def differences(base, noise):
        bases = jnp.broadcast_to(base, (heads,))
        return jax.vmap(lambda head, b: single(head, b, noise))(jnp.arange(heads), bases)

    values = center / sigma[..., None]
    values = _apart(values, heads) if joint else values
    return Normalised(noise(values * scales), differences)


def _together(a):
    """[h, n, c] as [1, n, h c]."""
    heads, n, width = a.shape
    return jnp.moveaxis(a, 0, 1).reshape(1, n, heads * width)


def _apart(a, heads):
    """[1, n, h c] as [h, n, c]."""
    n = a.shape[1]
    return jnp.moveaxis(a.reshape(n, heads, -1), 1, 0)
