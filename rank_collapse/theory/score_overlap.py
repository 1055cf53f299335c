"""Rows of attention weights of random queries and keys at finite n.

Tokens of equal length and cosine ρ have scores that are, but for a constant along each row, which
the softmax does not see, independent over keys: s_j ~ N(0, σ²), σ² = b (1 − ρ), of correlation c
between two rows (c = ρ of the queries; 1 for a row with itself).

Axis letters: t nodes, z nodes, k degrees.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array, Float

from rank_collapse.annotations import ArrayLike, Leaf, Number

NODES, DEGREE = 64, 40  # of Gauss-Hermite quadrature, and of expansions in Hermite polynomials
TIMES, SCORES, DEGREES = 64, 96, 64  # nodes of ln t, nodes of a score, and degrees, of rows
_LARGEST = 9.0  # node of a score, in standard deviations
_SMALLEST = 1e-4  # variance: below it ratios to the second order are those at it, 1 but for 1e-4
_BELOW_ONE = 1 - 1e-7


def hermite_polynomials(nodes: np.ndarray, count: int) -> np.ndarray:
    """Compute the normalised Hermite polynomials of degrees 0 .. count − 1, [k, z]."""
    table = [np.ones_like(nodes), nodes]
    for k in range(2, count):
        table.append((nodes * table[-1] - np.sqrt(k - 1) * table[-2]) / np.sqrt(k))
    return np.stack(table)


def hermite_table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns nodes, weights and normalised Hermite polynomials [k, z] for the standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return nodes, weights / weights.sum(), hermite_polynomials(nodes, DEGREE)


def compute_powers(x: ArrayLike, count: int) -> Leaf:
    """Compute x^k for k = 0 .. count − 1, [k, ...], of any sign."""
    steps = jnp.broadcast_to(x[None], (count - 1, *x.shape))
    return jnp.concatenate([jnp.ones_like(x)[None], jnp.cumprod(steps, axis=0)])


def overlap_ratios(
    count: Number, variance: Number, correlation: Number
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compute the overlap of a row, and its distance to another, over their second order in σ.

    (o_1 − 1/n)/(σ²(1 − 1/n)/n) and (o_1 − o_c)/((1 − c) σ²(1 − 1/n)/n) with

        o_c = E Σ_j P_ij P_kj = n ∫∫ E[w w' e^{−tw − t'w'}] (E e^{−tw − t'w'})^{n−1} dt dt'

    of two rows of softmax weights over n keys, w = e^s, w' = e^{s'}, since 1/S = ∫ e^{−tS} dt.
    Integrals over ln t and over one score by the trapezoidal rule, which converges exponentially,
    over two by Mehler's expansion E f(s) g(s') = Σ_k c^k f_k g_k.

    Both tend to 1 with σ². Relative error below 5e-4 up to a variance of 16, 1 % at 36 and 20 % at
    100.

    Args:
        count: n, at least 1; any real number.
        variance: σ², of the score of a key before the softmax.
        correlation: c, of 0 to 1; below 0 the error is absolute.

    Source: derived here.
    """
    variance = jnp.maximum(_as_float(variance), _SMALLEST)
    count = jnp.asarray(count, variance.dtype)
    rows = _hermite_coefficients(count, variance)
    unit = variance * (1 - 1 / count) / count
    is_single = count < 1.001  # as good as one key, of weight 1
    unit = jnp.where(is_single, 1, unit)
    # o_0 = 1/n, for E P_ij = 1/n
    return tuple(
        jnp.where(is_single, 1, _overlap_loss(count, rows, c) / unit) for c in (0.0, correlation)
    )


class _Rows(NamedTuple):
    """Hermite coefficients [t, k] of one score at each node of ln t, and the nodes' distance."""

    first: Array  # Of t w e^{−tw}
    missing: Array  # Of 1 − e^{−tw}
    step: Array


def _hermite_coefficients(count, variance):
    """Expand functions of one weight w = e^s in Hermite polynomials of its normal score s, at nodes
    of ln t.

    The overlap of rows is an integral over t, because 1/S = ∫ e^{−tS} dt for the sum S of a row's
    weights. Integrands vary where t is near 1/S. S is at least the weight of the lowest maximum of
    n scores that is to be expected. It is at most n times that of the highest maximum, or about n
    e^{σ²/2}, n times the mean weight.

    Args:
        count: n, number of keys in a row.
        variance: σ² of the scores.

    Returns:
        The coefficients [nodes of t, degrees], and the distance of the nodes.
    """
    z = np.linspace(-_LARGEST, _LARGEST, SCORES)
    weight = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    table = jnp.asarray(weight * hermite_polynomials(z, DEGREES), variance.dtype).T
    spread = jnp.sqrt(variance)
    lowest_maximum = -ndtri(jnp.minimum(16.0 / count, 1 - 1e-6))
    highest_maximum = -ndtri(jnp.minimum(1e-7 / count, 1 - 1e-6))
    low = -jnp.log(count) - jnp.minimum(0.5 * variance, spread * highest_maximum) - 16
    step = (4 - spread * lowest_maximum - low) / (TIMES - 1)
    log_t = low + step * jnp.arange(TIMES, dtype=low.dtype)
    log_tw = log_t[:, None] + spread * jnp.asarray(z, variance.dtype)[None, :]
    tw = jnp.exp(jnp.minimum(log_tw, 6.5))  # e^{−tw} is 0 beyond
    return _Rows((tw * jnp.exp(-tw)) @ table, -jnp.expm1(-tw) @ table, step)


def _overlap_loss(count, rows, correlation):
    """Compute (E Σ_j P_ij² − E Σ_j P_ij P_kj)/(1 − c) of two rows i and k of attention weights.

    The expansion has terms 1 − c^k = (1 − c) Σ_{j<k} c^j, so the division by 1 − c loses no digits.

    Args:
        count: n, number of keys in a row.
        rows: Coefficients from `_hermite_coefficients`.
        correlation: c, of the scores of both rows for one key.
    """
    power = compute_powers(jnp.asarray(correlation, count.dtype), DEGREES)
    loss = jnp.concatenate([jnp.zeros_like(power[:1]), jnp.cumsum(power)[:-1]])  # Σ_{j<k} c^j
    apart = jnp.maximum(1 - jnp.asarray(correlation, power.dtype), 1e-5)
    first, first_loss = _mehler_sums(rows.first, power), _mehler_sums(rows.first, loss)
    both_missing = _mehler_sums(rows.missing, jnp.ones_like(power))
    missing_loss = _mehler_sums(rows.missing, loss)
    # 1 − E e^{−tw − t'w'}, without cancellation
    missing = rows.missing[:, 0]
    either = jnp.clip(missing[:, None] + missing[None, :] - both_missing, 0, _BELOW_ONE)
    share = jnp.clip(apart * missing_loss / (1 - either), 0, _BELOW_ONE)
    inside = first_loss - first * jnp.expm1((count - 1) * jnp.log1p(-share)) / apart
    other_keys = jnp.exp((count - 1) * jnp.log1p(-jnp.minimum(either, _BELOW_ONE)))
    return count * rows.step**2 * jnp.sum(other_keys * inside)


def _mehler_sums(coefficients, weights):
    """Compute Σ_k w_k f_k f'_k for every pair of nodes, [t, t]: E f(s) f'(s') where w_k = c^k."""
    return (coefficients * weights[None, :]) @ coefficients.T


def _as_float(x):
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
