"""Attention on tokens written as 1x̄ᵀ + e^s R̂: how its residual comes from the state's.

Let ε = e^s. The scores are g + ε² δ, with g the same in all rows. So are the weights up to ε²:

    P = softmax(g + ε² δ) = Q + ε² E,    Q = 1qᵀ,
    P X W = 1(x̄ + ε qᵀR̂)W + ε³ E R̂ W.

Four steps: the scores, the split of the weights, the values they carry, and the digits that
rounding may have cost.
"""

import jax
import jax.numpy as jnp

from rank_collapse import struct
from rank_collapse.annotations import Leaf, Number
from rank_collapse.network.attention_weights import softmax
from rank_collapse.network.positions import relative_scores, rotate
from rank_collapse.theory.log_operations import LogParts, normalise_around


class Scores(struct.Struct):
    """Scores as base + ε² delta, up to a constant along each row."""

    base: Leaf  # [h, 1, m] where all rows share it, else [h, n, m]
    delta: Leaf  # [h, n, m], 0 in the row of the first token that exists
    change: Leaf  # ε² delta, formed so that it does not overflow before it must
    noise: Leaf  # Rounding of delta, [h]


class Weights(struct.Struct):
    """Attention weights P = Q + ε² E without each head's heaviest key, as e^top times mantissas.

    Rows of P − Q sum to 0, so one key's value may be taken from all: the heaviest key's, whose
    weight near 1 is the one that rounding spoils. The others' may be below float range.
    """

    reference: Leaf  # Weights of the first token that exists, whole, [h, m]
    heaviest: Leaf  # Their largest's index, [h]
    top: Leaf  # Natural logarithm of the mantissas' scale, [h]; −inf where all rows see one key
    q: Leaf  # [h, 1 or n, m], Q e^−top
    p: Leaf  # [h, n, m], P e^−top; of use where the change is large
    e: Leaf  # [h, n, m], E e^−top
    large: Leaf  # Bool [h, n, 1], rows whose change is too large for a series in it
    row_sum: Leaf = 1.0  # What rows sum to, [h, 1]; 1 but where they are mixed


class HeadParts(struct.Struct):
    """Residuals of P_h X W_h of every head: parts e^{power·s + top} R."""

    parts: Leaf  # [kinds, h, n, d]
    # 3 for what two differences and a value make, 1 for what rows bring with them; one a kind,
    # static
    powers: tuple[int, ...] = struct.field(pytree_node=False)
    top: Leaf  # [kinds, h]

    def scales(self, log_scale: Number) -> Leaf:
        """Compute the natural logarithm of each part's scale, [kinds, h]."""
        return jnp.stack([p * log_scale + t for p, t in zip(self.powers, self.top, strict=True)])

    def scales_over_cube(self, log_scale: Number) -> Leaf:
        """Compute `scales` less 3 s without forming either of the large numbers."""
        pairs = zip(self.powers, self.top, strict=True)
        return jnp.stack([t if p == 3 else (p - 3) * log_scale + t for p, t in pairs])


def attention_parts(params, state, config, context, gains, keep) -> tuple[LogParts, HeadParts]:
    """Compute the output of attention SA(X) for tokens X = 1x̄ᵀ + ε R̂, before the branch gain.

    With ε = e^s, weights are P = Q + ε² E with equal rows in Q, so the output has a mean token and
    a residual ε³ E R̂ W, whose digits are kept where ε³ itself would underflow.

    For a `Mixing` M = α I + β P + γ C (identity, weights and uniform weights) in the place of P,
    whose rows all sum to α + β + γ, Q and E are multiplied by β. The differences of I and C to one
    of their rows are further parts of the residual.

    Args:
        params: `AttentionParams` of the layer.
        state: `LogState` that the attention reads: x̄, R̂ [n, d] and s.
        config, context, gains: Configuration; masks and positions; gains of the layer, as in
            `walk.Layer`.
        keep: Bool [n], the tokens that exist.

    Returns:
        (the mean and the parts of the residual, all heads together; the parts of each head).
    """
    temperature = gains.temperature
    eps = jnp.exp(state.log_scale)
    mask = three_axes(context.mask)
    scores = compute_scores(params, state, eps, config, context, temperature, keep)
    weights = split_weights(scores, mask, eps, keep)
    mixed_rows = []
    if gains.mixing is not None:
        weights, mixed_rows = mix_weights(weights, gains.mixing, mask, keep)
    mean, values = compute_values(params, state, eps, weights)
    # (attention rows [h, n, m], power of ε, logarithm of the rows' scale [h])
    parts = [(weights.e, 3, weights.top)]
    if weights.q.shape[1] > 1:
        first = jnp.argmax(keep)
        parts.append((weights.q - weights.q[:, first][:, None, :], 1, weights.top))
    parts += [(rows, 1, jnp.zeros_like(weights.top)) for rows in mixed_rows]
    carried = jnp.stack([_carry_values(params, values, rows) for rows, _, _ in parts])
    heads = HeadParts(
        carried,
        powers=tuple(power for _, power, _ in parts),
        top=jnp.stack([top for _, _, top in parts]),
    )
    noise = rounding_noise(params, values, scores, weights, parts[1:], state.log_scale, keep)
    flat = heads.parts.reshape((-1, *heads.parts.shape[2:]))
    return LogParts(mean, flat, heads.scales(state.log_scale).reshape(-1), noise), heads


def compute_scores(params, state, eps, config, context, temperature, keep) -> Scores:
    """Compute the scores of every head, with the bias and without the mask.

    Args:
        eps: ε = e^s of the state; for the others see `attention_parts`.
    """
    factor = jnp.ones((), eps.dtype) / temperature
    if config.scale_scores:
        factor = factor / jnp.sqrt(params.w_q.shape[-1]).astype(eps.dtype)
    base, delta, change = _dot_scores(params, state, eps, context, factor, config.norm_eps)
    if context.bias is not None:
        base = base + context.bias.astype(base.dtype)
    mask = three_axes(context.mask)
    if mask is not None and mask.shape[1] > 1:
        base = jnp.broadcast_to(base, jnp.broadcast_shapes(base.shape, mask.shape))
    noise = jnp.finfo(delta.dtype).eps * jnp.max(jnp.abs(delta), axis=(1, 2))
    first = jnp.argmax(keep)
    # The first token's change is moved into the base. Its row of E is then 0, and rows whose
    # weights all sit on one key are compared with each other rather than with q.
    base = base + change[:, first][:, None, :]
    delta = delta - delta[:, first][:, None, :]
    change = change - change[:, first][:, None, :]
    return Scores(base, delta, change, noise)


def split_weights(scores: Scores, mask, eps, keep) -> Weights:
    """Split P = softmax(base + ε² δ) into Q + ε² E, E_ij = q_j (M_ij − m_i)/(1 + ε² m_i).

    M = expm1(ε² δ)/ε², m_i = Σ_j q_j M_ij; where ε² δ is large P is formed and Q subtracted.

    Args:
        scores: Result of `compute_scores`.
        mask: Bool [#h, #n, m] or None.
        eps, keep: See `compute_scores`.
    """
    base, delta, change = scores.base, scores.delta, scores.change
    log_q = _log_softmax(base, mask)  # [h, 1 or n, m]
    q = jnp.exp(log_q)
    # a shift of a row's scores cancels; this one keeps Σ_j q_j exp(ε²δ_ij) ≥ 1
    delta = delta - jnp.sum(q * delta, axis=-1, keepdims=True)
    change = change - jnp.sum(q * change, axis=-1, keepdims=True)
    if mask is not None:
        delta, change = jnp.where(mask, delta, 0), jnp.where(mask, change, 0)
    large = jnp.max(jnp.abs(change), axis=-1, keepdims=True) > 30
    moderate = jnp.clip(change, -30, 30)
    tiny = jnp.abs(moderate) < 1e-6
    m = delta * jnp.where(tiny, 1, jnp.expm1(moderate) / jnp.where(tiny, 1, moderate))
    mean_m = jnp.sum(q * m, axis=-1, keepdims=True)
    ratio = (m - mean_m) / (1 + eps * (eps * mean_m))  # E_ij / q_j
    log_p = _log_softmax(base + jnp.where(large, change, 0), mask)

    reference = q[:, 0] if q.shape[1] == 1 else q[:, jnp.argmax(keep)]
    heaviest = jnp.argmax(reference, axis=-1)
    other = (jnp.arange(reference.shape[1])[None, :] != heaviest[:, None])[:, None, :]
    rows = keep[None, :, None] if q.shape[1] > 1 else jnp.ones((1, 1, 1), bool)
    top = jnp.max(jnp.where(other & rows, log_q, -jnp.inf), axis=(1, 2))
    top_p = jnp.where(other & large & keep[None, :, None], log_p, -jnp.inf)
    top = jnp.maximum(top, jnp.max(top_p, axis=(1, 2)))
    reachable = top > jnp.finfo(top.dtype).min / 2  # else every row sees one and the same key
    safe_top = jnp.where(reachable, top, 0)[:, None, None]
    scaled_q = jnp.where(other, jnp.exp(jnp.minimum(log_q - safe_top, 0)), 0)
    scaled_p = jnp.where(other, jnp.exp(jnp.minimum(log_p - safe_top, 0)), 0)
    safe_eps = jnp.where(eps == 0, 1, eps)
    e = jnp.where(large, (scaled_p - scaled_q) / safe_eps / safe_eps, scaled_q * ratio)
    top = jnp.where(reachable, top, -jnp.inf)
    return Weights(reference, heaviest, top, scaled_q, scaled_p, e, large)


def mix_weights(weights: Weights, mixing, mask, keep):
    """Apply `Mixing` to weights.

    Args:
        weights: Result of `split_weights`.
        mixing: α, β and γ, [h] each.
        mask, keep: See `split_weights`.

    Returns:
        The weights times β; and a list of α I and γ C, each less one of its rows, so that rows sum
        to 0 as those of P − Q do. They are not added: a small α would be lost in a sum with γ.
    """
    n, first = weights.e.shape[1], jnp.argmax(keep)
    dtype, factor = weights.e.dtype, mixing.weights[:, None]
    parts = [(mixing.identity, jnp.eye(n, dtype=dtype)[None])]
    parts.append((mixing.uniform, softmax(jnp.zeros((1, n, n), dtype), mask)))
    reference = factor * weights.reference
    for share, rows in parts:
        reference = reference + share[:, None] * rows[:, first]
    if mask is None or mask.shape[1] == 1:  # rows of C are one and the same
        parts.pop()
    mixed_weights = weights.replace(
        reference=reference,
        q=factor[:, None] * weights.q,
        p=factor[:, None] * weights.p,
        e=factor[:, None] * weights.e,
        row_sum=(mixing.identity + mixing.weights + mixing.uniform)[:, None],
    )
    differences = [share[:, None, None] * (rows - rows[:, first][:, None]) for share, rows in parts]
    return mixed_weights, differences


def compute_values(params, state, eps, weights: Weights):
    """Compute the mean token of SA(X) [d], and R̂ W_V less the heaviest key's row [h, m, v].

    Args:
        params, state, eps: See `compute_scores`.
        weights: Result of `split_weights`.
    """
    total = weights.row_sum
    residual_part = eps * jnp.einsum("hm,md->hd", weights.reference, state.residual)
    mixed_mean = total * state.mean[None, :] + residual_part  # [h, d]
    mean_values = jnp.einsum("hd,hdv->hv", mixed_mean, params.w_v) + total * params.b_v
    mean = jnp.einsum("hv,hvd->d", mean_values, params.w_o) + params.b_o
    values = jnp.einsum("md,hdv->hmv", state.residual, params.w_v)
    heaviest = jnp.take_along_axis(values, weights.heaviest[:, None, None], axis=1)  # [h, 1, v]
    return mean, values - heaviest


def rounding_noise(params, values, scores: Scores, weights: Weights, other_parts, log_scale, keep):
    """Compute the logarithm of the largest error that rounding may add to the attention branch.

    The error is bounded by the largest entries of the values and of W_O, times the machine epsilon
    and the largest row sum of the weights.

    The weights are mantissas times the powers of `weights.top` and of the state's scale: E, which
    has power 3, and the other parts.

    Args:
        values: R̂ W_V [h, m, v], of `compute_values`.
        other_parts: (mantissas [h, n, m], power of the scale, natural log of a factor) of the parts
            besides E, where rows differ by themselves.
        log_scale: s of the state; for the others see `split_weights`.

    Returns:
        Natural logarithm, a number.
    """
    size = jnp.max(jnp.abs(values), axis=(1, 2)) * jnp.max(jnp.abs(params.w_o), axis=(1, 2))
    size = size * jnp.finfo(values.dtype).eps

    def rounding(attention_rows):
        """Bounds the logarithm of the rounding error that these rows of weights pass on."""
        attention_rows = jnp.where(keep[None, :, None], attention_rows, 0)
        heaviest_row = jnp.max(jnp.sum(jnp.abs(attention_rows), axis=-1), axis=-1)
        return jnp.log(size) + jnp.log(heaviest_row)

    # e itself holds rounding of the scores' differences, even where these came out as 0
    uncertain = jnp.abs(weights.q) + jnp.where(weights.large, jnp.abs(weights.p), 0)
    unsure = jnp.abs(weights.e) + scores.noise[:, None, None] * uncertain
    parts = [(unsure, 3, weights.top), *other_parts]
    noise = [rounding(rows) + power * log_scale + log_factor for rows, power, log_factor in parts]
    return jnp.max(jnp.stack(noise))


def three_axes(mask):
    """Returns a mask [m], [n, m] or [h, n, m] with three axes; None stays None."""
    return None if mask is None else mask.reshape((1,) * (3 - mask.ndim) + mask.shape)


def _carry_values(params, values, weights):
    """Compute what each head adds to the output, weights · values · W_O, [h, n, d].

    Args:
        params: Parameters of the attention.
        values: [h, m, v].
        weights: [h, n, m].
    """
    mixed = jnp.einsum("hnm,hmv->hnv", weights, values)
    return jnp.einsum("hnv,hvd->hnd", mixed, params.w_o)


def _log_softmax(scores, mask):
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jax.nn.log_softmax(scores, axis=-1)


def _normalise_heads(gain, mean, residual, eps, norm_eps):
    """Normalise mean + ε residual as `attention.head_norm`.

    Args:
        gain: Gain [k] of each head, or [h, k] for a norm over all heads together.
        mean: [h, k].
        residual: [h, n, k].
        eps: ε.
        norm_eps: The constant in the norm's root.

    Returns:
        (mean [h, k], residual [h, n, k]) after the norm.
    """
    heads, n, width = residual.shape
    if gain.ndim == 2:  # over all heads together
        mean = mean.reshape(1, -1)
        residual = residual.swapaxes(0, 1).reshape(1, n, -1)
    mean, residual = jax.vmap(lambda u, r: normalise_around(u, r, eps, norm_eps))(mean, residual)
    if gain.ndim == 2:
        mean = mean.reshape(heads, width)
        residual = residual.reshape(n, heads, width).swapaxes(0, 1)
    return mean * gain.reshape(-1, width), residual * gain.reshape(-1, 1, width)


def _dot_scores(params, state, eps, context, factor, norm_eps):
    """Compute scores as base + ε² delta, without the constant along each row.

    Every factor is applied before the products. A compiler may fuse a later factor into the
    softmax, once with the rounding of a multiply-add and once without: scores of 1e12 then differ
    from their maximum.

    Args:
        params, context, norm_eps: See `attention.attention_scores`.
        state: Mean and residual of the tokens.
        eps: ε, the size of the residual.
        factor: Factor of the scores.

    Returns:
        (base, delta [h, n, m], ε² delta). base is [h, 1, m] where all rows share it, else [h, n,
        m].
    """
    n = state.residual.shape[0]
    query = factor * jnp.einsum("nd,hdk->hnk", state.residual, params.w_q)
    key = jnp.einsum("nd,hdk->hnk", state.residual, params.w_k)
    mean_part = factor * jnp.einsum("d,hdk->hk", state.mean, params.w_q)[:, None, :]
    mean_query = mean_part + factor * params.b_q[:, None, :]
    mean_key = jnp.einsum("d,hdk->hk", state.mean, params.w_k) + params.b_k
    query_part = mean_part + eps * query  # X W_Q, without bias and norm
    if params.q_norm is not None:
        center, query = _normalise_heads(
            params.q_norm, mean_query[:, 0] / factor, query / factor, eps, norm_eps
        )
        mean_query, query = factor * center[:, None, :], factor * query
        mean_key, key = _normalise_heads(params.k_norm, mean_key, key, eps, norm_eps)
    relative = None
    if params.relative is not None and context.relative is not None:
        terms = params.relative.replace(
            b_r=factor * params.relative.b_r, b_s=factor * params.relative.b_s
        )
        relative = relative_scores(terms, query_part, n, context)
    if context.rotary is None:
        base = jnp.einsum("hnk,hmk->hnm", mean_query, eps * key)
    else:
        query, key = (rotate(query, context.rotary), rotate(key, context.rotary))
        shape = (params.w_q.shape[0], n, params.w_q.shape[2])
        mean_query = rotate(jnp.broadcast_to(mean_query, shape), context.rotary)
        mean_key = rotate(jnp.broadcast_to(mean_key[:, None, :], shape), context.rotary)
        base = jnp.einsum("hnk,hmk->hnm", mean_query + eps * query, mean_key)
        base = base + jnp.einsum("hnk,hmk->hnm", mean_query, eps * key)
    base = base if relative is None else base + relative
    delta = jnp.einsum("hnk,hmk->hnm", query, key)
    return base, delta, jnp.einsum("hnk,hmk->hnm", eps * query, eps * key)
