"""Differences of attention scores on pairwise differences, for `pair_attention`.

For dot products a_j = (x_i − x_k)W_Q · (x_j − x_r)W_K/√k, a product of two differences of the
table: its logarithm is known far below float range. Additive scores have tanh's second difference,

    tanh(w+δ+γ) − tanh(w+γ) − tanh(w+δ) + tanh w = −sinh δ sinh γ sinh(2w+δ+γ) /
        (cosh(w+δ+γ) cosh(w+γ) cosh(w+δ) cosh w),   w = z_k + c_r, δ = z_i − z_k, γ = c_j − c_r.

**What rows see different positions of** adds to a_j a part that does not vanish with the distance:
position biases B give B_ij − B_kj − B_ir + B_kr. Rotary positions replace the differences of
queries and keys by R_i q_i − R_k q_k = R_i(q_i − q_k) + (R_i − R_k) q_k, and so for keys. Relative
vectors F_ij, with q_i·F_ij in the score, give
(q_i − q_k)·(F_ij − F_ir) + q_k·(F_ij − F_kj − F_ir + F_kr).
All are formed from the positions' own differences, which are exactly 0 where positions agree.

**Normalised queries and keys** (QK-norm) have differences of their own: `pair_queries`.

Axis letters: h heads, i, k queries, j keys, r reference keys [h], c per-head query/key width.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from rank_collapse.network import attention as attn
from rank_collapse.theory import pair_operations as ops
from rank_collapse.theory.pair_operations import Signed
from rank_collapse.theory.pair_queries import normalised_projection


class Scores(NamedTuple):
    """Differences of scores of a query k against reference keys, as functions (k, r [h], noise).

    Attributes:
        row: s_kj − s_kr, `Signed` [h, j].
        pairs: a_j = s_ij − s_kj − s_ir + s_kr, `Scaled` [h, i, j].
    """

    row: Any
    pairs: Any


class Scaled(NamedTuple):
    """mantissa · e^{by_query + by_key}: two logarithms may be so large that their ulp exceeds 1."""

    mantissa: Signed  # [h, i, j]
    by_query: Any  # [h, i, 1]
    by_key: Any  # [h, 1, j]

    def number(self) -> Signed:
        """As one sign and logarithm."""
        return ops.over(self.mantissa, -(self.by_query + self.by_key))


def scores_of(params, tokens, state, config, context, temperature, noise) -> Scores:
    """The scores of one layer.

    Args:
        params: `AttentionParams` of the layer.
        tokens: What the layer looks at [n, d], with noise.
        state: Its differences, see `pair_attention.attention`.
        config: The network.
        context: Mask, bias and positions.
        temperature: Divides the scores.
        noise: See `noise.Noise`.
    """
    factor = jnp.ones((), tokens.dtype) / temperature
    if config.score == "additive":
        return _additive_scores(params, tokens, state, context, factor, noise)
    if config.scale_scores:
        factor = factor / jnp.sqrt(params.w_q.shape[-1]).astype(tokens.dtype)
    return _dot_scores(params, tokens, state, config, context, factor, noise)


def _minus(a, reference):
    """a_j − a_r along the last axis, for ordinary numbers [h, ..., j]."""
    index = reference.reshape((-1,) + (1,) * (a.ndim - 1))
    return a - jnp.take_along_axis(a, index, axis=-1)


def _dot_scores(params, tokens, state, config, context, factor, noise):
    """`Scores` of dot products, with rotary or relative positions and biases."""
    content = noise(factor * jnp.einsum("nd,hdc->hnc", tokens, params.w_q))
    query = content + factor * params.b_q[:, None, :]
    key = of_queries = of_keys = None
    if params.q_norm is not None:
        of_queries, of_keys = (
            normalised_projection(gain, w, b, tokens, state, config.norm_eps, noise)
            for gain, w, b in (
                (params.q_norm, params.w_q, params.b_q),
                (params.k_norm, params.w_k, params.b_k),
            )
        )
        query = factor * of_queries.values
    if context.rotary is not None and of_keys is not None:
        key = of_keys.values
    elif context.rotary is not None:
        key = noise(attn.project(tokens, params.w_k, params.b_k))
    constant = _bias(context, tokens.dtype)
    vectors = None
    if params.relative is not None and context.relative is not None:
        vectors, own = _relative_vectors(params.relative, tokens.shape[0], context, factor)
        constant = own if constant is None else constant + own
    rotated = query if key is None else attn.rotate(query, context.rotary)

    def keys_of(reference, noise):
        if of_keys is None:
            rest, log_scale = state.columns(reference, noise)
            keys = jnp.einsum("hjd,hdc->hjc", rest, params.w_k)
        else:
            keys, log_scale = of_keys.differences(reference, noise)
        if key is None:
            return keys, log_scale
        center = jnp.take_along_axis(key, reference[:, None, None], axis=1)[:, 0]
        return _rotated(keys, log_scale, center, reference, context.rotary)

    def row(k, reference, noise):
        keys, log_scale = keys_of(reference, noise)
        out = ops.signed(jnp.einsum("hc,hjc->hj", rotated[:, k], keys))
        out = Signed(out.sign, out.log + log_scale)
        if vectors is not None:  # x W_q alone, without its bias, meets the positions
            by_key = jnp.einsum("hc,hjc->hj", content[:, k], vectors[:, k])
            out = ops.signed_sum(out, ops.signed(_minus(by_key, reference)))
        if constant is not None:
            out = ops.signed_sum(out, ops.signed(_minus(constant[:, k], reference)))
        return out

    def pairs(k, reference, noise):
        keys, key_scale = keys_of(reference, noise)
        rest, log_scale = state.column(k, noise)
        from_k = factor * jnp.einsum("id,hdc->hic", rest, params.w_q)
        log_scale = jnp.broadcast_to(log_scale[None, :], from_k.shape[:2])
        queries, query_scale = from_k, log_scale
        if of_queries is not None:
            queries, query_scale = of_queries.differences(k, noise)
            queries = factor * queries
        if key is not None:
            queries, query_scale = _rotated(queries, query_scale, query[:, k], k, context.rotary)
        out = ops.signed(jnp.einsum("hic,hjc->hij", queries, keys))
        out = Scaled(out, query_scale[..., None], key_scale[:, None, :])
        if vectors is None and constant is None:
            return out
        out = out.number()
        if vectors is not None:
            index = reference[:, None, None, None]
            change = vectors - jnp.take_along_axis(vectors, index, axis=2)
            first = ops.signed(jnp.einsum("hic,hijc->hij", from_k, change))
            first = Signed(first.sign, first.log + log_scale[..., None])
            change = vectors - vectors[:, k][:, None]
            change = change - jnp.take_along_axis(change, index, axis=2)
            second = ops.signed(jnp.einsum("hc,hijc->hij", content[:, k], change))
            out = ops.signed_sum(out, ops.signed_sum(first, second))
        return _unscaled(_with_constant(out, constant, k, reference))

    return Scores(row, pairs)


def _unscaled(a):
    return Scaled(a, jnp.zeros_like(a.log[..., :1]), jnp.zeros_like(a.log[:, :1]))


def _bias(context, dtype):
    return None if context.bias is None else jnp.asarray(context.bias, dtype)


def _with_constant(pairs, constant, k, reference):
    """a_j of scores with a part B [h, i, j] of the positions: B_ij − B_kj − B_ir + B_kr more."""
    if constant is None:
        return pairs
    own = _minus(constant - constant[:, k][:, None, :], reference)
    return ops.signed_sum(pairs, ops.signed(own))


def _rotated(rest, log_scale, center, base, rotary):
    """R_i(x_i − x_b) + (R_i − R_b) x_b as mantissas [h, i, c] and logarithms [h, i].

    Args:
        rest, log_scale: x_i − x_b.
        center: x_b [h, c].
        base: b, an index or one per head [h].
        rotary: (cos, sin), each [n, c].
    """
    turned = attn.rotate(rest, rotary)
    at_base = [jnp.broadcast_to(t[base], center.shape) for t in rotary]
    turn = [t[None].astype(rest.dtype) - b[:, None, :].astype(rest.dtype)
            for t, b in zip(rotary, at_base, strict=True)]  # fmt: skip
    low, high = jnp.split(center, 2, axis=-1)
    across = jnp.concatenate([-high, low], axis=-1)
    moved = center[:, None, :] * turn[0] + across[:, None, :] * turn[1]
    return ops.add_scaled(turned, log_scale, moved, jnp.zeros_like(log_scale))


def _relative_vectors(relative, n, context, factor):
    """F [h, i, j, c] with scores (x_i W_q)·F_ij, and their constant part [h, i, j]."""
    keys = jnp.einsum("pd,hdc->hpc", context.relative.astype(relative.w_r.dtype), relative.w_r)
    i, j = jnp.arange(n)[:, None], jnp.arange(n)[None, :]
    vectors = keys[:, n - 1 - (i - j)]
    constant = factor * jnp.einsum("hijc,hc->hij", vectors, relative.b_r)
    if context.segments is not None:
        differ = (context.segments[:, None] != context.segments[None, :]).astype(jnp.int32)
        kinds = jnp.moveaxis(relative.segment[differ], 2, 0)
        constant = constant + factor * jnp.einsum("hijc,hc->hij", kinds, relative.b_s)
        vectors = vectors + kinds
    return vectors, constant


def _additive_scores(params, tokens, state, context, factor, noise):
    """`Scores` of v·tanh(x_i W_q + x_j W_k + b): sums over features in logarithms."""
    biases = (params.b_q + params.b_k)[:, None, :]
    query = noise(jnp.einsum("nd,hdc->hnc", tokens, params.w_q) + biases)
    key = noise(jnp.einsum("nd,hdc->hnc", tokens, params.w_k))
    constant = _bias(context, tokens.dtype)
    v = ops.signed(factor * params.v_score)

    def total(features, v):
        return _squeezed(ops.signed_total(ops.product(features, v)))

    def parts(k, reference, noise):
        """c_j − c_r as sinh γ, and z_k + c_r, z_k + c_j."""
        rest, log_scale = state.columns(reference, noise)
        gamma = ops.signed(jnp.einsum("hjd,hdc->hjc", rest, params.w_k))
        rise = ops.log_sinh(Signed(gamma.sign, gamma.log + log_scale[..., None]))
        at_r = jnp.take_along_axis(key, reference[:, None, None], axis=1)[:, 0]
        w = query[:, k] + at_r
        log = rise.log - ops.log_cosh(query[:, k][:, None, :] + key) - ops.log_cosh(w)[:, None, :]
        return Signed(rise.sign, log), at_r, w

    def row(k, reference, noise):
        features, _, _ = parts(k, reference, noise)
        out = total(features, Signed(v.sign[:, None], v.log[:, None]))
        if constant is not None:
            out = ops.signed_sum(out, ops.signed(_minus(constant[:, k], reference)))
        return out

    def pairs(k, reference, noise):
        features, at_r, w = parts(k, reference, noise)
        rest, log_scale = state.column(k, noise)
        delta = ops.signed(jnp.einsum("id,hdc->hic", rest, params.w_q))
        rise = ops.log_sinh(Signed(delta.sign, delta.log + log_scale[None, :, None]))
        both = query[:, :, None, :] + key[:, None, :, :]  # w + δ + γ
        turn = ops.log_sinh(ops.signed(both + w[:, None, None, :]))
        sign = -features.sign[:, None] * rise.sign[:, :, None] * turn.sign
        by_query = rise.log - ops.log_cosh(query + at_r[:, None, :])
        log = features.log[:, None] + by_query[:, :, None] + turn.log - ops.log_cosh(both)
        out = total(Signed(sign, log), Signed(v.sign[:, None, None], v.log[:, None, None]))
        return _unscaled(_with_constant(out, constant, k, reference))

    return Scores(row, pairs)


def _squeezed(a):
    return Signed(a.sign[..., 0], a.log[..., 0])
