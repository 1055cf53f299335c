"""Bounds around the mean token and of the diameter, which hold for all weights.

Two rows of attention weights differ in total variation by at most tanh(range(E_i − E_k)/4), E the
scores; that needs no condition on their size, only that all rows share keys and biases. Like those
of `bounds`, what can leave float range is a logarithm.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rank_collapse import struct
from rank_collapse.annotations import ArrayLike, Leaf, Number, Tree
from rank_collapse.measures.norms import composite_norm, norm_1, norm_inf, scale_to_unit
from rank_collapse.network.attention import AttentionParams, repeat_groups
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import BlockParams
from rank_collapse.network.residual import LayerGains
from rank_collapse.theory.bound_constants import (
    gain_size,
    head_weights,
    score_width,
    sublayer_lipschitz,
)
from rank_collapse.theory.bounds import Sides
from rank_collapse.theory.log_operations import LogState
from rank_collapse.theory.logdomain import LogTrace

LOG_10 = math.log(10)


class DiameterSides(Sides):
    """A bound of the diameter, the largest ℓ2 distance of two tokens, as decimal logarithms.

    `log10_lhs` is the diameter, `log10_rhs` the bound with tanh; `tightness` is never negative.

    Attributes:
        log10_rhs_cubic: The bound with tanh(u) ≤ u: c diam³ for one layer of attention.
        tightness_cubic: log10_rhs_cubic − log10_lhs, never less than `tightness`.
    """

    log10_rhs_cubic: Leaf
    tightness_cubic: Leaf


class MeanConstants(struct.Struct):
    """Constants of a layer that these bounds use; natural logarithms."""

    # Bound of a head over e^{3s}, s the log scale of the input of its attention, [h]
    head: Leaf
    layer: Leaf  # The same of the layer
    scores: Leaf  # log ‖W_QK,h‖₂/(4√k), [h]
    values: Leaf  # log ‖W_h‖₂, [h]
    mlp: Leaf  # log of the ℓ2 Lipschitz constant of the MLP sublayer; 0 without


def mean_constants(
    params: BlockParams,
    state: LogState,
    gains: LayerGains,
    config: TransformerConfig,
    spread: Float[Array, "h n"],
    keep: Bool[Array, "n"],
) -> MeanConstants:
    """Compute the bounds of one layer's heads and branch, and the constants of its diameter bound,
    as logarithms.

    Args:
        params, state, gains, config: See `bound_constants.layer_constants`.
        spread: For each row of scores [h, n], how much its scores differ between keys, see there.
        keep: Bool [n], the tokens that exist.
    """
    _, w = head_weights(params.attention)
    scores, values = attention_norms(params.attention, gains.temperature, config)
    by_columns, by_rows = attention_deviation(spread, keep)
    w_1, w_inf = jax.vmap(norm_1)(w), jax.vmap(norm_inf)(w)
    size = jnp.log(composite_norm(state.residual))
    (mlp,) = sublayer_lipschitz(params, gains, config, spectral_norm)
    head = _safe_log(by_columns) + _safe_log(by_rows) + _safe_log(w_1) + _safe_log(w_inf)
    layer = _safe_log(jnp.sum(by_columns * w_1)) + _safe_log(jnp.sum(by_rows * w_inf))
    return MeanConstants(
        head=head / 2 + size,
        layer=layer / 2 + size,
        scores=scores,
        values=values,
        mlp=_safe_log(mlp),
    )


def attention_norms(
    params: AttentionParams, temperature: Number, config: TransformerConfig
) -> tuple[Float[Array, "h"], Float[Array, "h"]]:
    """Compute (log ‖W_QK,h‖₂/(4√k), log ‖W_h‖₂) of every head.

    Args:
        params: `AttentionParams` of the layer.
        temperature: Divisor of the scores.
        config: Configuration of the network.
    """
    params = repeat_groups(params)
    w_o = jnp.swapaxes(params.w_o, 1, 2)
    score = jnp.abs(4 * math.sqrt(score_width(config)) * temperature)
    scores = _safe_log(jax.vmap(product_norm)(params.w_q, params.w_k)) - jnp.log(score)
    return scores, _safe_log(jax.vmap(product_norm)(params.w_v, w_o))


def attention_deviation(
    spread: Float[Array, "h n"], keep: ArrayLike
) -> tuple[Float[Array, "h"], Float[Array, "h"]]:
    """Bound (‖P − 1p̄ᵀ‖_1, ‖P − 1p̄ᵀ‖_∞) of every head, p̄ the mean row of the n rows of P.

        ‖P − 1p̄ᵀ‖_∞ ≤ ½((1 − 2/n) max D + mean D),   ‖P − 1p̄ᵀ‖_1 ≤ ½(1 − 1/n) ΣD.

    P_i − p̄ = (1/n) Σ_{k≠i} (P_i − P_k), because the row itself drops out, and
    ‖P_i − P_k‖_1 ≤ 2 tanh((D_i + D_k)/4) ≤ (D_i + D_k)/2: the mean over k gives the first. Entries
    of P_i − p̄ add up to 0, so that each is at most half of ‖P_i − p̄‖_1: the sum of these over i
    gives the second.

    Args:
        spread: D [h, n], of `bound_constants.score_spread`.
        keep: Bool [n], the tokens that exist.
    """
    total, largest = jnp.sum(spread, axis=-1), jnp.max(spread, axis=-1)
    n = jnp.sum(keep, dtype=total.dtype)
    return (1 - 1 / n) * total / 2, ((1 - 2 / n) * largest + total / n) / 2


def product_norm(a: Float[Array, "d k"], b: Float[Array, "e k"]) -> Float[Array, ""]:
    """Compute ‖A Bᵀ‖₂ = √ρ(AᵀA BᵀB): no matrix [d, e] is formed."""
    a, size_a = scale_to_unit(a)
    b, size_b = scale_to_unit(b)
    return size_a * size_b * jnp.sqrt(spectral_radius((a.T @ a) @ (b.T @ b)))


def spectral_norm(a: Float[Array, "d k"]) -> Float[Array, ""]:
    """Compute ‖A‖₂ = √ρ(AᵀA), or of AAᵀ where that is smaller."""
    a, size = scale_to_unit(a)
    gram = a.T @ a if a.shape[0] > a.shape[1] else a @ a.T
    return size * jnp.sqrt(spectral_radius(gram))


def spectral_radius(m: Float[Array, "k k"]) -> Float[Array, ""]:
    """Bound ρ(M) from above: ρ ≤ ‖M^{2^p}‖_F^{1/2^p}, by squaring until that is exact to rounding.

    No eigenvalue routine: inside `shard_map` over several CPU devices LAPACK's have been seen to
    wait for ever (jaxlib 0.10.2).
    """
    dtype = jnp.finfo(m.dtype)

    def normalise(m):
        size = jnp.sqrt(jnp.sum(jnp.square(m)))
        return m / jnp.where(size == 0, 1, size), jnp.log(size)

    def is_open(state):
        p, _, _, change = state
        return (p < dtype.nmant + 4) & (jnp.abs(change) > dtype.eps / 2)

    def square(state):
        """Squares the matrix M^(2^p) once more, and adds 2^−p times the logarithm of its size."""
        p, m, log_norm, _ = state
        m, log_size = normalise(m @ m)
        change = log_size * jnp.exp2(-p.astype(m.dtype))
        return p + 1, m, log_norm + change, change

    m, log_norm = normalise(m)
    _, _, log_norm, _ = jax.lax.while_loop(
        is_open, square, (1, m, log_norm, jnp.ones_like(log_norm))
    )
    return jnp.exp(log_norm)


def mean_sides(
    constants: MeanConstants, trace: LogTrace, log_scale: Float[Array, "l"]
) -> tuple[Sides, Sides]:
    """Compute the sides of every head's bound [L, h] and every layer's [L], around the mean token.

        ‖res(P_h X W_h)‖ ≤ √(½(1 − 1/n)ΣD · ½((1 − 2/n) max D + mean D)) ‖R‖ ‖W_h‖,
        ‖res(SA(X))‖ ≤ √(Σ_h ½(1 − 1/n)ΣD_h‖W_h‖_1 · Σ_h ½((1 − 2/n) max D_h + mean D_h)‖W_h‖_∞) ‖R‖

    in ‖.‖_{1,∞}, R the residual of a layer's branch input, n tokens. ‖.‖_{1,∞} has no triangle
    inequality, so that the second does not follow from the first. Both lie 2√2 n/(n − 1) or more
    below those of `bounds.layer_sides`, which therefore hold around the mean token and for all
    weights too. The first is attained by two tokens, to first order in D.

    Args:
        constants: Constants of all layers.
        trace: Trace of the network.
        log_scale: s of the input to each layer's attention, [L].

    Returns:
        (sides of every head's bound, of every layer's bound).
    """
    cube = 3 * log_scale / LOG_10

    def sides(lhs, rhs, cube):
        """Makes the sides of a bound from logarithms that were both divided by the cube of the
        input's norm."""
        return Sides(cube + lhs, cube + rhs, rhs - lhs)

    head = sides(trace.heads, constants.head / LOG_10, cube[:, None])
    return head, sides(trace.branches, constants.layer / LOG_10, cube)


def diameter_layer_sides(
    constants: MeanConstants, trace: LogTrace, log_scale: Float[Array, "l"]
) -> DiameterSides:
    """Compute the sides of the diameter's bound of every layer's SA(X), [L] each.

    With Δ the diameter of the input of its attention,
    diam(SA(X)) ≤ Σ_h tanh(‖W_QK,h‖₂ Δ²/(4√k)) ‖W_h‖₂ Δ ≤ c Δ³,  c = Σ_h ‖W_QK,h‖₂‖W_h‖₂/(4√k).

    Args:
        constants, trace, log_scale: See `mean_sides`.
    """
    # ln of Δ [L], of ‖W_QK,h‖₂ Δ²/(4√k), and of the terms of the two sums over heads [L, h]. The
    # trace divides the input of each layer by its scale, and Δ³ by the scale's cube.
    log_diameter = trace.input_diameters * LOG_10
    log_scores = constants.scores + 2 * log_diameter[:, None]
    log_cubic = log_scores + constants.values
    log_saturated = log_cubic + _log_tanh_over(log_scores + 2 * log_scale[:, None])
    # log10 of both sides, without and with the cube of the scale.
    lhs, cube = trace.branch_diameters, 3 * log_scale / LOG_10
    rhs = (jax.nn.logsumexp(log_saturated, axis=-1) + log_diameter) / LOG_10
    rhs_cubic = (jax.nn.logsumexp(log_cubic, axis=-1) + log_diameter) / LOG_10
    return DiameterSides(
        log10_lhs=cube + lhs,
        log10_rhs=cube + rhs,
        tightness=rhs - lhs,
        log10_rhs_cubic=cube + rhs_cubic,
        tightness_cubic=rhs_cubic - lhs,
    )


def diameter_sides(
    constants: MeanConstants,
    diameters: Float[Array, "l"],
    gains: ArrayLike,
    config: TransformerConfig,
) -> DiameterSides:
    """Iterate the layers' bounds from the diameter of X^0: the sides of X^0 .. X^L, [L + 1] each.

    A branch gain multiplies a branch, a skip adds its gain times the diameter before it, an MLP
    multiplies by its ℓ2 Lipschitz constant. Attention alone gives c^{(3^L − 1)/2} Δ^{3^L}. Norms
    are not covered.

    Args:
        constants, gains: Constants and gains of all layers.
        diameters: log10 of the diameters of X^0 .. X^L.
        config: Configuration of the network.
    """
    skip = gain_size(gains.skip.attention) * float(config.attention_skip)
    steps = (constants, _safe_log(gain_size(gains.branch.attention)), _safe_log(skip))

    def carry_diameter(log_diameter, step):
        """Bounds the diameter after one layer, as natural logarithms [2]: with tanh, and cubic.

        Returns:
            The bound twice: as the carry of the scan, and as its output.
        """
        layer, log_branch_gain, log_skip_gain = step
        scores = layer.scores[:, None] + 2 * log_diameter[None, :]  # [h, 2]
        with_tanh, cubic = scores[:, 0], scores[:, 1]
        saturation = jnp.stack([_log_tanh_over(with_tanh), jnp.zeros_like(cubic)], axis=1)
        heads = jax.nn.logsumexp(scores + saturation + layer.values[:, None], axis=0)  # [2]
        branch = log_branch_gain + heads + log_diameter
        skip = log_skip_gain + log_diameter
        log_diameter = jnp.logaddexp(branch, skip) + layer.mlp
        return log_diameter, log_diameter

    _, log_diameters = jax.lax.scan(carry_diameter, jnp.full(2, diameters[0] * LOG_10), steps)
    rhs, rhs_cubic = jnp.concatenate([jnp.full((1, 2), diameters[0]), log_diameters / LOG_10]).T
    return DiameterSides(diameters, rhs, rhs - diameters, rhs_cubic, rhs_cubic - diameters)


def refuse_sides(sides: Tree) -> Tree:
    """Replace the sides of a bound that does not cover the network by NaN; the residual is kept."""
    return jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), sides).replace(
        log10_lhs=sides.log10_lhs
    )


def _safe_log(x):
    """Compute the natural logarithm, −inf at 0."""
    return jnp.log(jnp.maximum(x, 0))


def _log_tanh_over(log_u):
    """Compute log(tanh(u)/u): 0 where u underflows, −log u where tanh is 1."""
    u = jnp.exp(jnp.minimum(log_u, 3.0))  # e³ = 20: 1 − tanh is 3e-18
    ratio = jnp.where(u < 1e-8, 1, jnp.tanh(u) / jnp.where(u < 1e-8, 1, u))
    return jnp.where(log_u > 3.0, -log_u, jnp.log(ratio))
