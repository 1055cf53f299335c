"""Attention scores at random queries and keys: their variance, and rows of weights at finite n.

Tokens of equal length and cosine ρ have scores that are, but for a constant along each row, which
the softmax does not see, independent over keys: s_j ~ N(0, σ²), σ² = b (1 − ρ), of correlation c
between two rows (c = ρ of the queries; 1 for a row with itself).

Axis letters: t nodes, z nodes, k degrees.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

NODES, DEGREE = 64, 40  # of Gauss-Hermite quadrature, and of expansions in Hermite polynomials
_TIMES = 64  # nodes of t
_SMALL = 0.05  # variance below which the ratio to the second order is interpolated to 1
_NEAR = 0.9  # correlation from which on the ratio for distances is that at it


def hermite() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes, weights and normalised Hermite polynomials [k, z] for the standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    table = [np.ones_like(nodes), nodes]
    for k in range(2, DEGREE):
        table.append((nodes * table[-1] - np.sqrt(k - 1) * table[-2]) / np.sqrt(k))
    return nodes, weights / weights.sum(), np.stack(table)


def score_overlap(
    count: Any, variance: Any, correlation: Any
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(E Σ_j P_ij², E Σ_j P_ij P_kj) of two rows of softmax weights over n keys.

        E Σ_j P_ij P_kj = n ∫∫ E[w w' e^{−tw − t'w'}] (E e^{−tw − t'w'})^{n−1} dt dt',

    w = e^s, w' = e^{s'}, since 1/S = ∫ e^{−tS} dt; of one row with itself
    n ∫ t E[w² e^{−tw}] (E e^{−tw})^{n−1} dt. Integrals over ln t by the trapezoidal rule, which
    converges exponentially, over one score by Gauss-Hermite quadrature, over two by Mehler's
    expansion E f(s) g(s') = Σ_k c^k f_k g_k. Relative error against three times as many nodes and
    degrees below 1e-6 for n = 1 to 500, variances up to 8 and c up to .9; in float32 below 5e-6 up
    to n = 64, and 2e-5 at n = 500.

    Args:
        count: n, at least 1; any real number.
        variance: σ², of the score of a key before the softmax.
        correlation: c, of 0 to 1.

    Source: derived here.
    """
    variance = _as_float(variance)
    count, correlation = (jnp.asarray(a, variance.dtype) for a in (count, correlation))
    z, weight, table = (jnp.asarray(a, variance.dtype) for a in hermite())
    spread = jnp.sqrt(variance)
    low, high = -14 - 3 * spread, 4 + 5 * spread
    step = (high - low) / (_TIMES - 1)
    log_t = low + step * jnp.arange(_TIMES) - jnp.log(count)
    log_w = spread * z
    log_tw = log_t[:, None] + log_w[None, :]
    decay = jnp.exp(-jnp.exp(log_tw))  # e^{−tw}
    once = jnp.exp(log_tw) * decay  # t w e^{−tw}
    own = _own(count, log_tw, weight, step)
    none, first = ((a * weight[None, :]) @ table.T for a in (decay, once))  # [t, k]
    power = (correlation ** jnp.arange(DEGREE))[None, :]
    both = jnp.clip((none * power) @ none.T, 0, 1)
    pair = count * step**2 * jnp.sum(((first * power) @ first.T) * both ** (count - 1))
    return own, pair


def participation(score_std: Any, num_tokens: Any) -> Float[Array, ""]:
    """E Σ_j P_j² of one row, the first of `score_overlap`, at any variance and up to any n.

    Nodes of the score are equidistant here: Gauss and Hermite's are too few from a variance of
    about 16 on.

    Args:
        score_std: σ ≥ 0.
        num_tokens: n, at least 1.
    """
    score_std = _as_float(score_std)
    z = jnp.linspace(-9.0, 9.0, 241, dtype=score_std.dtype)
    weight = jnp.exp(-0.5 * z**2)
    log_n = jnp.log(jnp.asarray(num_tokens, score_std.dtype))
    low, high = -log_n - 0.5 * score_std**2 - 9 * (1 + score_std), 9 * score_std + 6
    log_t = jnp.linspace(low, high, 641)
    log_tw = log_t[:, None] + score_std * z[None, :]
    return _own(jnp.exp(log_n), log_tw, weight / jnp.sum(weight), log_t[1] - log_t[0])


def _own(count, log_tw, weight, step):
    """n ∫ t E[w² e^{−tw}] (E e^{−tw})^{n−1} dt over equidistant ln t."""
    tw = jnp.exp(jnp.clip(log_tw, -80, 6.5))  # e^{−tw} is 0 beyond
    rest = jnp.minimum(-jnp.expm1(-tw) @ weight, 1 - 1e-7)
    inside = (tw**2 * jnp.exp(-tw)) @ weight
    return count * step * jnp.sum(inside * jnp.exp((count - 1) * jnp.log1p(-rest)))


def overlap_ratios(
    count: Any, variance: Any, correlation: Any
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """What the scores' part of a row's overlap, and of its distance to another, is of the second
    order's: (o_1 − 1/n)/(σ²(1 − 1/n)/n), (o_1 − o_c)/((1 − c) σ²(1 − 1/n)/n).

    Both tend to 1 with σ²: below .05 they are interpolated, so that no digits cancel. From c = .9
    on the second is that at .9, of which it is a smooth function.

    Args:
        count, variance, correlation: As of `score_overlap`.
    """
    variance = _as_float(variance)
    count = jnp.asarray(count, variance.dtype)
    used = jnp.maximum(variance, _SMALL)
    c = jnp.clip(correlation, 0, _NEAR)
    own, pair = score_overlap(count, used, c)
    unit = used * (1 - 1 / count) / count
    unit = jnp.where(unit == 0, 1, unit)
    ratios = (own - 1 / count) / unit, (own - pair) / ((1 - c) * unit)
    part = jnp.minimum(variance / _SMALL, 1)
    return tuple(jnp.where(count <= 1, 1, 1 + part * (r - 1)) for r in ratios)


def _as_float(x):
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class ScoreVariance(NamedTuple):
    """Variance of a score, and the part of it within a row, which alone the softmax sees."""

    total: float
    within_rows: float


# The variance of tanh takes more nodes than the expansions: 80 for 3e-7 of it.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()  # of the standard normal distribution


def score_variance(
    d_k: int, score: str = "dot", *, scale: bool = True, temperature: float = 1.0
) -> ScoreVariance:
    """Var s(q, k) at independent q, k ~ N(0, I) of width d_k.

    Dot product: d_k, divided by d_k where it is scaled; all of it within rows, E[q·k | q] = 0.
    Additive, Σ_a v_a tanh(q_a + k_a) with v_a of variance 1/d_k: E tanh²(√2 z), z ~ N(0, 1), for
    any d_k, and within rows that less E_q (E_k tanh(q + k))². A temperature divides scores.

    Args:
        d_k: Width of queries and keys.
        score, scale, temperature: As of `attention_scores`.

    Raises:
        ValueError: An unknown score, or a width below 1.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.1, footnote 4 (dot
    products); additive scores follow in the same way.
    """
    if d_k < 1:
        raise ValueError(f"d_k={d_k} is not a positive integer")
    if score == "dot":
        variance = (1.0 if scale else float(d_k)) / temperature**2
        return ScoreVariance(variance, variance)
    if score != "additive":
        raise ValueError(f"score={score!r} is neither 'dot' nor 'additive'")
    total = np.sum(_WEIGHTS * np.tanh(math.sqrt(2) * _NODES) ** 2)
    given_query = np.tanh(_NODES[:, None] + _NODES[None, :]) @ _WEIGHTS
    within = total - np.sum(_WEIGHTS * given_query**2)
    return ScoreVariance(float(total) / temperature**2, float(within) / temperature**2)
