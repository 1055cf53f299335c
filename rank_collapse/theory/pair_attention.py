"""Self-attention on pairwise differences: every pair of outputs to its own digits.

The outputs of queries i and k differ by o_i − o_k = Σ_h Σ_j (P_ij − P_kj)(x_j − x_r) W_V W_O: rows
of P sum to 1, so that one key's value may be taken from all. r is the heaviest key of row k, whose
weight, near 1, is the one that rounding spoils. Per head, with scores s:

    log P_kj = log softmax_j (s_kj − s_kr), from the table and so right within a cluster of keys,
    a_j = s_ij − s_kj − s_ir + s_kr, so that a_r = 0,
    P_ij = P_kj e^{a_j}/Z with Z = 1 + S, S = Σ_j P_kj (e^{a_j} − 1).

**P_ij − P_kj** is (t_j − P_kj S)/Z with t_j = P_kj (e^{a_j} − 1) where |a_j| ≤ 1 and |S| < 1/2, and
else the difference of the two rows' own weights. That loses digits only where e^{a_j} is near Z by
chance: with |a_j| > 1 and |S| < 1/2 they differ by a factor e^{0.3}; with |S| ≥ 1/2 the reference
itself, a_r = 0, differs by 1.5 or more. Far keys enter S by their weights too, for there
t_j = Z P_ij − P_kj:

    S · Σ_{not far} P_ij = Σ_{|a_j| ≤ 1} P_kj (e^{a_j} − 1) + Σ_far (P_ij − P_kj).

Rounding of a_j, which grows with the scores, is thus never exponentiated where they are large.

**Rows that see different keys** (masks): a key that only row i sees (entering) or only row k sees
(leaving) is far, with the other weight 0. Entering and leaving keys may cancel in S: two windows of
a local mask that hold equally many tokens of one cluster. So those that resemble the reference are
counted against it, ±Z P_ij or ±P_kj = ±P_kr (1 + expm1(s_.j − s_.r)), the ±P_kr by a whole number
and the rest from the table. Keys that resemble each other but not r still cancel; the replicas see
it.

The a_j are in `pair_scores`. Axis letters: h heads, i, k queries, j keys, r reference keys [h].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rank_collapse.network import attention as attn
from rank_collapse.theory import pair_operations as ops
from rank_collapse.theory.pair_operations import Signed
from rank_collapse.theory.pair_scores import scores_of


def attention(params, state, config, context, temperature, noise):
    """SA(X) and its differences, a table's or a tree's; the module's docstring has the formulas.

    Args:
        params: `AttentionParams` of one layer.
        state: What the layer looks at: a `PairState`, or `Columns` of a `spanning_tree`.
        config: The network.
        context: Mask, bias and positions.
        temperature: Divides the scores.
        noise: See `noise.Noise`.
    """
    n = state.tokens.shape[0]
    tokens = noise(state.tokens)
    mask, sees_none = _allowed(context.mask, n)
    scores = scores_of(params, tokens, state, config, context, temperature, noise)
    plain = attn.attention_scores(
        params, tokens, tokens, score=config.score, scale=config.scale_scores,
        temperature=temperature, norm_eps=config.norm_eps, context=context,
    )  # fmt: skip

    def heaviest(scores, k):
        if mask is not None:
            scores = jnp.where(mask[:, k], scores, -jnp.inf)
        return jnp.argmax(scores, axis=-1)

    def row(k):
        own = noise.at(k)
        first = heaviest(plain[:, k], k)  # rounding of large scores may put a lighter key first
        reference = heaviest(ops.value(scores.row(k, first, own)), k)
        return reference, ops.value(scores.row(k, reference, own))

    references, scores_k = jax.lax.map(row, jnp.arange(n))  # [k, h], [k, h, j]
    scores_k = jnp.swapaxes(scores_k, 0, 1)
    if mask is not None:
        scores_k = jnp.where(mask, scores_k, -jnp.inf)
    log_p = noise(jax.nn.log_softmax(scores_k, axis=-1))

    def column(k, own):
        reference = references[k]
        a = scores.pairs(k, reference, own)
        a = a._replace(mantissa=Signed(a.mantissa.sign, own(a.mantissa.log)))
        log_q = log_p[:, k][:, None, :]
        against = None
        if mask is not None:
            row_k = scores.row(k, reference, own)
            against = _counted(row_k, a.number(), log_q, mask, k, reference)
        difference = _weight_difference(a, log_p, log_q, against)
        rest, log_scale = _outputs(params, state, reference, difference, own)
        if sees_none is not None:
            log_scale = jnp.where(sees_none | sees_none[k], jnp.nan, log_scale)
        return rest, log_scale

    out = state.of_columns(column, noise)
    return out.replace(tokens=attn.mix_values(params, noise(jnp.exp(log_p)), tokens))


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


class Difference(NamedTuple):
    """P_ij − P_kj = e^base (first − second) for every head, row and key [h, i, j].

    Base holds what both terms share, which may be a logarithm so large that its ulp exceeds 1.
    """

    base: Any
    first: Signed
    second: Signed


def _weight_difference(a, log_p, log_q, counted):
    """`Difference` of two terms that cancel only by chance.

    Args:
        a: a_j, `Scaled`.
        log_p: log P of all rows [h, i, j].
        log_q: log P of row k [h, 1, j].
        counted: From `_counted`, with a mask.
    """
    change = ops.value(a.number())
    seen_i, seen_k = log_p > -jnp.inf, log_q > -jnp.inf
    both = seen_i & seen_k
    close = (jnp.abs(change) <= 1) & both
    # logarithms below are relative to the term that leads S, where it is of this kind
    by_key = jnp.broadcast_to(a.by_key, change.shape)
    sizes = jnp.where(close, log_q + a.mantissa.log + by_key, -jnp.inf)
    leading = jnp.take_along_axis(by_key, jnp.argmax(sizes, axis=-1, keepdims=True), axis=-1)
    leading = ops.finite(leading)
    shift = ops.finite(a.by_query) + leading
    log_a = a.mantissa.log + (by_key - leading)
    log_a = jnp.where(a.by_query == -jnp.inf, -jnp.inf, log_a)
    own = jnp.where(both, log_p - log_q, 0)
    own = jnp.where((own == 0) & ~close, change, own)  # lost in rounding of large logarithms
    # e^x − 1 with x = a_j or log P_ij − log P_kj: log|e^x − 1| = max(x, 0) + log|1 − e^{−|x|}|
    x = jnp.where(close, change, own)
    log_x = jnp.where(close, log_a, jnp.log(jnp.abs(own)) - shift)
    grown = Signed(
        jnp.where(close, a.mantissa.sign, jnp.sign(own)),
        jnp.maximum(x, 0) + log_x + ops.log_expm1_ratio(jnp.abs(x)),
    )
    terms, beside = Signed(grown.sign, log_q + grown.log), close
    if counted is not None:
        only = Signed(jnp.where(seen_i, 1.0, -1.0), jnp.maximum(log_p, log_q) - shift)
        terms = ops.where(both, terms, only)
        terms = ops.where(counted.chosen, ops.over(counted.terms, shift), terms)
        beside = close | counted.chosen
    s = ops.signed_total(terms)
    if counted is not None:
        s = ops.signed_sum(s, ops.over(counted.number, shift))
    s = ops.over(s, _log_sum(jnp.where(beside, log_p, -jnp.inf)))
    near = s.log + shift < jnp.log(jnp.asarray(0.5, s.log.dtype))
    log_z = jnp.log1p(jnp.where(near, s.sign * jnp.exp(s.log + shift), 0))
    by_table = near & close
    # else the two weights themselves, over the larger one
    one = jnp.ones_like(own)
    higher = jnp.maximum(log_p, log_q)
    of_p = Signed(one, jnp.where(both, jnp.minimum(own, 0), jnp.where(seen_i, 0, -jnp.inf)))
    of_q = Signed(one, jnp.where(both, jnp.minimum(-own, 0), jnp.where(seen_k, 0, -jnp.inf)))
    first = ops.where(by_table, grown, of_p)
    second = ops.where(by_table, s, of_q)
    base = jnp.where(by_table, log_q + (shift - log_z), higher)
    return Difference(base, first, second)


def _log_sum(log):
    sizes, top = ops.shares(log)
    return top + jnp.log(jnp.sum(sizes, axis=-1, keepdims=True))


class Counted(NamedTuple):
    """Entering and leaving keys that S counts against the reference.

    Attributes:
        chosen: Which keys, Bool [h, i, j].
        terms: What each adds to ±P_kr, `Signed` [h, i, j].
        number: (entering − leaving) P_kr, `Signed` [h, i, 1].
    """

    chosen: Any
    terms: Any
    number: Any


def _counted(row, a, log_q, mask, k, reference) -> Counted:
    """Keys that one row alone sees, within a factor e of the reference.

    Others are left as they are: nothing to gain there, and 1 + expm1 would lose their digits.
    """
    row_k = mask[:, k][:, None, :]
    enters, leaves = mask & ~row_k, row_k & ~mask
    row = Signed(row.sign[:, None, :], row.log[:, None, :])
    from_reference = ops.where(enters, ops.signed_sum(row, a), row)
    distance = ops.value(from_reference)
    chosen = (enters | leaves) & (jnp.abs(distance) <= 1)
    sign = jnp.where(enters, 1.0, -1.0).astype(distance.dtype)
    log_q_r = jnp.take_along_axis(log_q, reference[:, None, None], axis=-1)
    small = jnp.where(chosen, distance, 0)
    log = from_reference.log + jnp.maximum(small, 0) + ops.log_expm1_ratio(jnp.abs(small))
    number = ops.signed(jnp.sum(jnp.where(chosen, sign, 0), axis=-1, keepdims=True))
    terms = Signed(sign * from_reference.sign, log_q_r + log)
    return Counted(chosen, terms, Signed(number.sign, number.log + log_q_r))


def _outputs(params, state, reference, difference, noise):
    """Σ_h Σ_j (P_ij − P_kj)(x_j − x_r) W_V W_O as mantissas [i, d] and logarithms [i]."""
    rest, scales = state.columns(reference, noise)  # [h, j, d], [h, j]
    values = jnp.einsum("hjd,hdv->hjv", rest, params.w_v)
    base, first, second = difference
    (of_first, of_second), larger = ops.two_shares(first.log, second.log)
    nothing = (base == -jnp.inf) | ((first.log == -jnp.inf) & (second.log == -jnp.inf))
    sizes, top = ops.shares(jnp.where(nothing, -jnp.inf, larger + base) + scales[:, None, :])
    weights = sizes * (first.sign * of_first - second.sign * of_second)
    # equal to the last digit: not chance, but logarithms so large that they hold no such digit
    lost = (top != 0) & (jnp.max(jnp.abs(weights), axis=-1, keepdims=True) == 0)
    mixed = jnp.einsum("hij,hjv->hiv", jnp.where(lost, jnp.nan, weights), values)
    mixed, top = ops.normalise(mixed, top[..., 0])
    by_head, highest = ops.shares(top, axis=0)
    mixed = mixed * by_head[..., None]
    return ops.normalise(noise(jnp.einsum("hiv,hvd->id", mixed, params.w_o)), highest[0])
