"""Parameters of attention, and the queries, keys, values and relative terms computed from them.

Axis letters: n queries, m keys, d model width, h heads, g groups of heads with keys and values of
their own, k per-head query/key width, v per-head value width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct


class RelativeParams(struct.Struct):
    """Relative-position and segment terms of a score (Transformer-XL, XLNet).

    The position term is (x_i W_q + b_r)·(r_{i-j} W_r), the segment term
    (x_i W_q + b_s)·segment[different segments].
    """

    w_r: Any  # [h, d, k]
    b_r: Any  # [h, k]
    b_s: Any  # [h, k]
    segment: Any  # [2, h, k]: same segment, different segment


class AttentionParams(struct.Struct):
    """Parameters of multi-head attention, one head per leading index.

    P_h = softmax((x W_q + b_q)(y W_k + b_k)ᵀ / √k),  SA(x) = Σ_h P_h (y W_v + b_v) W_o + b_o.
    A stack of layers carries one more leading axis. Biases may be None. Keys and values may be
    grouped: g of them, where g divides h; head i reads group i // (h / g).
    """

    w_q: Any  # [h, d, k]
    b_q: Any = struct.field(default=None, kw_only=True)  # [h, k]
    w_k: Any  # [h or g, d, k]
    b_k: Any = struct.field(default=None, kw_only=True)  # [h or g, k]
    w_v: Any  # [h or g, d, v]
    b_v: Any = struct.field(default=None, kw_only=True)  # [h or g, v]
    w_o: Any  # [h, v, d]
    b_o: Any = struct.field(default=None, kw_only=True)  # [d]
    v_score: Any = None  # [h, k], additive attention only
    relative: Any = None  # RelativeParams, relative positions only
    q_norm: Any = None  # gain of the queries' RMSNorm: [k], of each head; [h, k], of all at once
    k_norm: Any = None  # the same of the keys: [k] or [h or g, k]


def keys_of(
    params: AttentionParams, y: Any, context: Any, norm_eps: float
) -> Float[Array, "h m k"]:
    """y W_k + b_k, normalised and rotated for the scores."""
    k = head_norm(params.k_norm, project(y, params.w_k, params.b_k), norm_eps)
    return k if context is None or context.rotary is None else rotate(k, context.rotary)


def values_of(params: AttentionParams, y: Any) -> Float[Array, "h m v"]:
    """y W_v + b_v."""
    return project(y, params.w_v, params.b_v)


def repeat_groups(params: AttentionParams) -> AttentionParams:
    """Grouped keys and values (Ainslie et al. 2023) copied for every head; others as they are."""
    num_heads = params.w_q.shape[-3]

    def repeated(a, axis):
        if a is None or a.shape[axis] == num_heads:
            return a
        return jnp.repeat(a, num_heads // a.shape[axis], axis=axis, total_repeat_length=num_heads)

    own_gain = params.k_norm is None or params.k_norm.ndim < params.w_k.ndim - 1  # of each head
    k_norm = params.k_norm if own_gain else repeated(params.k_norm, -2)
    return params.replace(
        w_k=repeated(params.w_k, -3),
        b_k=repeated(params.b_k, -2),
        w_v=repeated(params.w_v, -3),
        b_v=repeated(params.b_v, -2),
        k_norm=k_norm,
    )


def project(
    x: Float[Array, "n d"], w: Float[Array, "h d k"], b: Float[Array, "h k"] | None
) -> Float[Array, "h n k"]:
    """x W_h + 1 b_hᵀ for every head; without bias where it is None."""
    y = jnp.einsum("nd,hdk->hnk", x, w)
    return y if b is None else y + b[:, None, :]


def head_norm(
    gain: Float[Array, "k"] | Float[Array, "h k"] | None, x: Float[Array, "h n k"], eps: Any
) -> Float[Array, "h n k"]:
    """RMSNorm of queries or keys: of each head (gain [k]) or over all heads ([h, k]); None: x.

    Source: Henry et al. 2020 (QK-norm), with RMSNorm as in Qwen3, Gemma 3 and OLMo 2.
    """
    if gain is None:
        return x
    axes = (-1,) if gain.ndim == 1 else (0, -1)
    square = jnp.mean(jnp.square(x), axis=axes, keepdims=True)
    return (
        x * jax.lax.rsqrt(square + jnp.asarray(eps, x.dtype)) * gain.reshape(-1, 1, gain.shape[-1])
    )


def rotate(x: Float[Array, "h n k"], rotary: tuple[Array, Array]) -> Float[Array, "h n k"]:
    """Rotary positions in the half-split layout (Su et al. 2021; as in Llama).

    Angles for fewer than k features leave those after them as they are (GPT-NeoX).
    """
    cos, sin = (t[None].astype(x.dtype) for t in rotary)
    if (width := cos.shape[-1]) < x.shape[-1]:
        turned = rotate(x[..., :width], rotary)
        return jnp.concatenate([turned, x[..., width:]], axis=-1)
    a, b = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-b, a], axis=-1) * sin


def relative_scores(
    params: RelativeParams, query_part: Float[Array, "h n k"], num_keys: int, context: Any
) -> Float[Array, "h n m"]:
    """Position and segment terms of the score of XLNet (Yang et al. 2019, section 2.3)."""
    n = query_part.shape[1]
    keys = jnp.einsum("pd,hdk->hpk", context.relative.astype(query_part.dtype), params.w_r)
    by_distance = jnp.einsum("hnk,hpk->hnp", query_part + params.b_r[:, None, :], keys)
    i, j = jnp.arange(n)[:, None], jnp.arange(num_keys)[None, :]
    index = jnp.broadcast_to((n - 1 - (i - j))[None], (by_distance.shape[0], n, num_keys))
    scores = jnp.take_along_axis(by_distance, index, axis=2)
    if context.segments is not None:
        per_kind = jnp.einsum("hnk,shk->shn", query_part + params.b_s[:, None, :], params.segment)
        differ = context.segments[:, None] != context.segments[None, :]
        scores = scores + jnp.where(differ[None], per_kind[1][:, :, None], per_kind[0][:, :, None])
    return scores


@jax.custom_jvp
def product(a: Float[Array, "h n k"], b: Float[Array, "h k m"]) -> Float[Array, "h n m"]:
    """a b, with a gradient that XLA's CPU backend computes fast.

    The gradient of b is aᵀ g. Many small products with a transposed left factor take there four
    times as long as with the transposed factor copied first, which the barrier forces.
    """
    return a @ b


@product.defjvp
def product_jvp(primals, tangents):
    (a, b), (da, db) = primals, tangents
    of_b = _transposed(jax.lax.optimization_barrier(_transposed(db) @ _transposed(a)))
    return a @ b, da @ b + of_b


def _transposed(x):
    return jnp.swapaxes(x, -1, -2)
