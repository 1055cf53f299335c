"""Self-attention on the table of pairwise differences: every pair of outputs to its own digits.

The outputs of queries i and k differ by o_i − o_k = Σ_h Σ_j (P_ij − P_kj)(x_j − x_r) W_V W_O: rows
of P sum to 1, so that one key's value may be taken from all. r is the heaviest key of row k, whose
weight, near 1, is the one that rounding spoils. Per head, with scores s:

    q_j = P_kj, and q̂_j = exp(s_kj − log Σ_{m allowed in k} e^{s_km}) for every key,
    a_j = s_ij − s_kj − s_ir + s_kr, so that a_r = 0,
    P_ij = q̂_j e^{a_j}/Z with Z = Σ_{j allowed in i} q̂_j e^{a_j}.

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

**Rows that see different keys** (masks). Let t_j = q̂_j (e^{a_j} [j allowed in i] − [in k]); then
S = Z − 1 = Σ_j t_j, and for every key

    P_ij − P_kj = (t_j − q_j S)/Z.

log|t_j| is log q̂_j + log|expm1 a_j| where both rows see j, log q̂_j + a_j (entering, +) where only
i does, log q_j (leaving, −) where only k does. Where |S| ≥ 1/2 the two weights are subtracted as
they are: to cancel, e^{a_j} = Z, |log Z| > 0.4, would have to hold for one key, which is chance,
while with a small Z both t_j/Z and q_j S/Z are larger than their difference. Where |S| < 1/2 no
1/Z is large.
Entering and leaving keys may cancel in S: two windows of a local mask that hold equally many tokens
of one cluster. So they are counted against the reference, whose key they resemble:
t_j = ±q_r (1 + expm1(s_kj − s_kr + a_j)), the ±q_r by a whole number and the rest from the table.
Keys that resemble each other but not r still cancel; the replicas see it.

Axis letters: h heads, i, k queries, j keys, r reference keys [h], c per-head query/key width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rank_collapse.network import attention as attn
from rank_collapse.theory import pair_operations as ops
from rank_collapse.theory.pair_operations import PairState, Signed


class Scores(NamedTuple):
    """Differences of scores of one query k against its reference keys.

    Attributes:
        row: s_kj − s_kr, `Signed` [h, j].
        pairs: a_j = s_ij − s_kj − s_ir + s_kr, `Signed` [h, i, j].
    """

    row: Any
    pairs: Any


def attention(params, state: PairState, config, context, temperature, noise) -> PairState:
    """SA(X) and its table; the docstring of the module has the formulas.

    Args:
        params: `AttentionParams` of one layer.
        state: What the layer looks at.
        config: The network.
        context: Mask, bias and positions.
        temperature: Divides the scores.
        noise: See `pair_operations.make_noise`.
    """
    n = state.tokens.shape[0]
    tokens = noise(state.tokens)
    mask, sees_none = _allowed(context.mask, n)
    factor = jnp.ones((), tokens.dtype) / temperature
    if config.score == "dot" and config.scale_scores:
        factor = factor / jnp.sqrt(params.w_q.shape[-1]).astype(tokens.dtype)
    make = _additive_scores if config.score == "additive" else _dot_scores
    scores_of = make(params, tokens, state, context, factor, noise)
    plain = attn.attention_scores(
        params, tokens, tokens, score=config.score, scale=config.scale_scores,
        temperature=temperature, context=context,
    )  # fmt: skip
    first = jnp.argmax(plain if mask is None else jnp.where(mask, plain, -jnp.inf), axis=-1)

    def column(k):
        own = noise.at(k)
        mask_k = None if mask is None else mask[:, k]
        # rounding of large scores may have put a lighter key first
        seen = ops.value(scores_of(k, first[:, k], own).row)
        reference = jnp.argmax(seen if mask is None else jnp.where(mask_k, seen, -jnp.inf), -1)
        scores = scores_of(k, reference, own)
        log_q = own(_log_softmax(ops.value(scores.row), mask_k))
        if mask is None:
            allowed = None
        else:
            allowed = mask, mask_k[:, None, :]
        first_term, second_term = _weight_difference(scores, log_q, allowed, reference, own)
        rest, log_scale = _outputs(params, state, reference, first_term, second_term, own)
        return rest, log_scale, log_q

    rest, log_scale, log_q = jax.lax.map(column, jnp.arange(n))  # [k, i, d], [k, i], [k, h, j]
    weights = jnp.exp(jnp.swapaxes(log_q, 0, 1))
    if mask is not None:
        weights = jnp.where(mask, weights, 0)
    out = attn.mix_values(params, noise(weights), tokens)
    log_scale = log_scale.T
    if sees_none is not None:
        lost = sees_none[:, None] | sees_none[None, :]
        log_scale = jnp.where(lost, jnp.nan, log_scale)
    return PairState(out, *ops.antisymmetric(jnp.swapaxes(rest, 0, 1), log_scale))


def _allowed(mask, n):
    """The mask as [h or 1, n, n], and which rows see no key in some head; (None, None) for none.

    Such rows take uniform weights in the network: not a softmax of their scores. They are given
    all keys here, to stay finite, and must not be read.
    """
    if mask is None:
        return None, None
    mask = mask.reshape((1,) * (3 - mask.ndim) + mask.shape)
    mask = jnp.broadcast_to(mask, (mask.shape[0], n, n))
    sees_none = ~jnp.any(mask, axis=-1)
    return mask | sees_none[..., None], jnp.any(sees_none, axis=0)


def _log_softmax(scores, allowed):
    """s_j − log Σ_allowed e^s, for keys that are not allowed too."""
    inside = scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)
    return scores - jax.nn.logsumexp(inside, axis=-1, keepdims=True)


def _weight_difference(scores, log_q, allowed, reference, noise):
    """P_ij − P_kj as the difference of two non-nearly-equal `Signed` [h, i, j]."""
    log_q = log_q[:, None, :]
    a = Signed(scores.pairs.sign, noise(scores.pairs.log))
    change = ops.value(a)
    log_numerator = noise(log_q + change)
    # log|e^a − 1| = max(a, 0) + log|a| + log((1 − e^{−|a|})/|a|)
    log_t = jnp.maximum(change, 0) + a.log + ops.log_expm1_ratio(jnp.abs(change))
    t = Signed(a.sign, log_q + log_t)
    total = t
    if allowed is not None:
        row_i, row_k = allowed
        enters, leaves = row_i & ~row_k, row_k & ~row_i
        sign = jnp.where(enters, 1.0, -1.0).astype(change.dtype)
        other = Signed(
            jnp.where(enters | leaves, sign, 0),
            jnp.where(enters, log_numerator, jnp.where(leaves, log_q, -jnp.inf)),
        )
        log_numerator = jnp.where(row_i, log_numerator, -jnp.inf)
        t = ops.where(row_i & row_k, t, other)
        total, count = _against_reference(t, scores.row, a, log_q, enters, leaves, reference)
    top = ops.finite(jnp.max(total.log, axis=-1, keepdims=True))
    s = jnp.sum(total.sign * jnp.exp(total.log - top), axis=-1, keepdims=True)
    s = Signed(jnp.sign(s), top + jnp.log(jnp.abs(s)))
    if allowed is not None:
        s = ops.signed_sum(s, count)
    # the weights themselves
    highest = jnp.max(log_numerator, axis=-1, keepdims=True)
    log_p = log_numerator - highest
    log_p = log_p - jnp.log(jnp.sum(jnp.exp(log_p), axis=-1, keepdims=True))
    log_p_k = log_q if allowed is None else jnp.where(allowed[1], log_q, -jnp.inf)
    near = s.log < jnp.log(jnp.asarray(0.5, s.log.dtype))
    log_z = jnp.log1p(jnp.where(near, ops.value(s), 0))
    one = jnp.ones_like(a.sign)
    first = ops.where(near, Signed(t.sign, t.log - log_z), Signed(one, log_p))
    second = ops.where(near, Signed(s.sign * one, s.log + log_p_k - log_z), Signed(one, log_p_k))
    return first, second


def _against_reference(t, row, a, log_q, enters, leaves, reference):
    """The terms of S with entering and leaving keys counted against q_r, and that count times q_r.

    Keys lighter or heavier than r by more than a factor e stay as they are: nothing to gain there,
    and 1 + expm1 would lose their digits.
    """
    row = Signed(row.sign[:, None, :], row.log[:, None, :])
    there = ops.signed_sum(row, a)
    from_reference = ops.where(enters, there, row)
    distance = ops.value(from_reference)
    close = (enters | leaves) & (jnp.abs(distance) <= 1)
    sign = jnp.where(enters, 1.0, -1.0).astype(distance.dtype)
    log_q_r = jnp.take_along_axis(log_q, reference[:, None, None], axis=-1)
    small = jnp.where(close, distance, 0)
    log = from_reference.log + jnp.maximum(small, 0) + ops.log_expm1_ratio(jnp.abs(small))
    total = ops.where(close, Signed(sign * from_reference.sign, log_q_r + log), t)
    count = jnp.sum(jnp.where(close, sign, 0), axis=-1, keepdims=True)
    return total, Signed(jnp.sign(count), log_q_r + jnp.log(jnp.abs(count)))


def _outputs(params, state, reference, first, second, noise):
    """Σ_h Σ_j (first − second)_ij (x_j − x_r) W_V W_O as mantissas [i, d] and logarithms [i]."""
    rest, scales = _from_reference(state, reference, noise)  # [h, j, d], [h, j]
    values = jnp.einsum("hjd,hdv->hjv", rest, params.w_v)
    larger = jnp.maximum(first.log, second.log)
    safe = ops.finite(larger)
    weights = first.sign * jnp.exp(first.log - safe) - second.sign * jnp.exp(second.log - safe)
    sizes = larger + scales[:, None, :]
    top = jnp.max(sizes, axis=-1)
    weights = weights * jnp.exp(sizes - ops.finite(top)[..., None])
    mixed = jnp.einsum("hij,hjv->hiv", weights, values)
    mixed, top = ops.normalise(mixed, top)
    highest = jnp.max(top, axis=0)
    mixed = mixed * jnp.exp(top - ops.finite(highest)[None, :])[..., None]
    return ops.normalise(noise(jnp.einsum("hiv,hvd->id", mixed, params.w_o)), highest)


def _from_reference(state, reference, noise):
    """x_j − x_r for each head's reference: mantissas [h, j, d] and logarithms [h, j]."""
    rest = jnp.swapaxes(state.rest[:, reference], 0, 1)
    return noise(rest), noise(state.log_scale[:, reference].T)


def _minus(a, reference):
    """a_j − a_r along the last axis, for ordinary numbers [h, ..., j]."""
    index = reference.reshape((-1,) + (1,) * (a.ndim - 1))
    return a - jnp.take_along_axis(a, index, axis=-1)


def _dot_scores(params, tokens, state, context, factor, noise):
    """`Scores` of dot products, with rotary or relative positions and biases."""
    content = noise(factor * jnp.einsum("nd,hdc->hnc", tokens, params.w_q))
    query = content + factor * params.b_q[:, None, :]
    key = None
    if context.rotary is not None:
        key = noise(attn.project(tokens, params.w_k, params.b_k))
    constant = None if context.bias is None else context.bias.astype(tokens.dtype)
    vectors = None
    if params.relative is not None and context.relative is not None:
        vectors, own = _relative_vectors(params.relative, tokens.shape[0], context, factor)
        constant = own if constant is None else constant + own
        # the position terms take x W_q without its bias
    rotated = query if key is None else attn.rotate(query, context.rotary)

    def scores_of(k, reference, noise):
        rest, key_scale = _from_reference(state, reference, noise)
        keys = jnp.einsum("hjd,hdc->hjc", rest, params.w_k)
        from_k = factor * jnp.einsum("id,hdc->hic", noise(state.rest[:, k]), params.w_q)
        query_scale = jnp.broadcast_to(noise(state.log_scale[:, k])[None, :], from_k.shape[:2])
        queries = from_k
        if key is not None:
            queries, query_scale = _rotated(queries, query_scale, query[:, k], k, context.rotary)
            at = jnp.take_along_axis(key, reference[:, None, None], axis=1)[:, 0]
            keys, key_scale = _rotated(keys, key_scale, at, reference, context.rotary)
        row = ops.signed(jnp.einsum("hc,hjc->hj", rotated[:, k], keys))
        row = Signed(row.sign, row.log + key_scale)
        pairs = ops.signed(jnp.einsum("hic,hjc->hij", queries, keys))
        pairs = Signed(pairs.sign, pairs.log + query_scale[..., None] + key_scale[:, None, :])
        if vectors is not None:
            row_vectors = vectors[:, k]  # [h, j, c]
            by_key = jnp.einsum("hc,hjc->hj", content[:, k], row_vectors)
            row = ops.signed_sum(row, ops.signed(_minus(by_key, reference)))
            change = vectors - row_vectors[:, None]
            index = reference[:, None, None, None]
            change = change - jnp.take_along_axis(change, index, axis=2)
            own = ops.signed(jnp.einsum("hc,hijc->hij", content[:, k], change))
            change = vectors - jnp.take_along_axis(vectors, index, axis=2)
            first = ops.signed(jnp.einsum("hic,hijc->hij", from_k, change))
            first = Signed(first.sign, first.log + query_scale[..., None])
            pairs = ops.signed_sum(pairs, ops.signed_sum(first, own))
        return _with_constant(Scores(row, pairs), constant, k, reference)

    return scores_of


def _with_constant(scores, constant, k, reference):
    """Scores of which B [h, i, j] is a part: B_kj − B_kr, and B_ij − B_kj − B_ir + B_kr."""
    if constant is None:
        return scores
    row = ops.signed(_minus(constant[:, k], reference))
    pairs = ops.signed(_minus(constant - constant[:, k][:, None, :], reference))
    return Scores(ops.signed_sum(scores.row, row), ops.signed_sum(scores.pairs, pairs))


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
    constant = None if context.bias is None else context.bias.astype(tokens.dtype)
    v = ops.signed(factor * params.v_score)

    def total(features, v):
        top = ops.finite(jnp.max(features.log + v.log, axis=-1))
        terms = features.sign * v.sign * jnp.exp(features.log + v.log - top[..., None])
        out = ops.signed(jnp.sum(terms, axis=-1))
        return Signed(out.sign, out.log + top)

    def scores_of(k, reference, noise):
        rest, scales = _from_reference(state, reference, noise)
        gamma = ops.signed(jnp.einsum("hjd,hdc->hjc", rest, params.w_k))
        gamma = Signed(gamma.sign, gamma.log + scales[..., None])  # c_j − c_r
        delta = ops.signed(jnp.einsum("id,hdc->hic", noise(state.rest[:, k]), params.w_q))
        delta = Signed(delta.sign, delta.log + noise(state.log_scale[:, k])[None, :, None])
        at_k, at_r = query[:, k], jnp.take_along_axis(key, reference[:, None, None], axis=1)[:, 0]
        w = at_k + at_r  # [h, c]
        with_key = at_k[:, None, :] + key  # w + γ
        with_query = query + at_r[:, None, :]  # w + δ
        both = query[:, :, None, :] + key[:, None, :, :]
        rise = ops.log_sinh(gamma)
        log = rise.log - ops.log_cosh(with_key) - ops.log_cosh(w)[:, None, :]
        row = total(Signed(rise.sign, log), Signed(v.sign[:, None], v.log[:, None]))
        other = ops.log_sinh(delta)
        turn = ops.log_sinh(ops.signed(both + w[:, None, None, :]))
        sign = -rise.sign[:, None] * other.sign[:, :, None] * turn.sign
        log = log[:, None] + turn.log + other.log[:, :, None]
        log = log - ops.log_cosh(both) - ops.log_cosh(with_query)[:, :, None]
        pairs = total(Signed(sign, log), Signed(v.sign[:, None, None], v.log[:, None, None]))
        return _with_constant(Scores(row, pairs), constant, k, reference)

    return scores_of
