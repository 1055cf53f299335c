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
from jax.scipy.special import ndtri
from jaxtyping import Array, Float

from rank_collapse.network.attention import Score

NODES, DEGREE = 64, 40  # of Gauss-Hermite quadrature, and of expansions in Hermite polynomials
# Nodes of ln t, nodes of a score, and degrees, of rows of weights.
FINE, COARSE = (160, 256, 128), (64, 96, 64)
_LARGEST = 9.0  # node of a score, in standard deviations
_SMALLEST = 1e-4  # variance: below it ratios to the second order are those at it, 1 but for 1e-4
_BELOW_ONE = 1 - 1e-7


def polynomials(nodes: np.ndarray, count: int) -> np.ndarray:
    """The normalised Hermite polynomials of degrees 0 .. count − 1, [k, z]."""
    table = [np.ones_like(nodes), nodes]
    for k in range(2, count):
        table.append((nodes * table[-1] - np.sqrt(k - 1) * table[-2]) / np.sqrt(k))
    return np.stack(table)


def hermite() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes, weights and normalised Hermite polynomials [k, z] for the standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return nodes, weights / weights.sum(), polynomials(nodes, DEGREE)


def powers(x: Any, count: int) -> Array:
    """x^k for k = 0 .. count − 1, [k, ...], of any sign."""
    steps = jnp.broadcast_to(x[None], (count - 1, *x.shape))
    return jnp.concatenate([jnp.ones_like(x)[None], jnp.cumprod(steps, axis=0)])


def score_overlap(
    count: Any, variance: Any, correlation: Any
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(E Σ_j P_ij², E Σ_j P_ij P_kj) of two rows of softmax weights over n keys.

        E Σ_j P_ij P_kj = n ∫∫ E[w w' e^{−tw − t'w'}] (E e^{−tw − t'w'})^{n−1} dt dt',

    w = e^s, w' = e^{s'}, since 1/S = ∫ e^{−tS} dt; of one row with itself
    n ∫ t E[w² e^{−tw}] (E e^{−tw})^{n−1} dt. Integrals over ln t and over one score by the
    trapezoidal rule, which converges exponentially, over two by Mehler's expansion
    E f(s) g(s') = Σ_k c^k f_k g_k. Relative error against twice as many nodes and degrees below
    5e-6 in float32 for n up to 1e4, variances up to 100 and c up to .95; 2e-5 for variances up to
    36 and c up to 1.

    Args:
        count: n, at least 1; any real number.
        variance: σ², of the score of a key before the softmax.
        correlation: c, of 0 to 1; below 0 the error is absolute.

    Source: derived here.
    """
    rows = _Rows(count, variance, FINE)
    return rows.own(), rows.pair(correlation)


def overlap_ratios(
    count: Any, variance: Any, correlation: Any
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """What the scores' part of a row's overlap, and of its distance to another, is of the second
    order's: (o_1 − 1/n)/(σ²(1 − 1/n)/n), (o_1 − o_c)/((1 − c) σ²(1 − 1/n)/n).

    Both tend to 1 with σ². Relative error below 5e-4 up to a variance of 16, 1 % at 36 and 20 % at
    100: fewer nodes than those of `score_overlap`.

    Args:
        count, variance, correlation: As of `score_overlap`.
    """
    variance = jnp.maximum(_as_float(variance), _SMALLEST)
    rows = _Rows(count, variance, COARSE)
    unit = variance * (1 - 1 / rows.count) / rows.count
    alone = rows.count < 1.001  # as good as one key, of weight 1
    unit = jnp.where(alone, 1, unit)
    # o_0 = 1/n, for E P_ij = 1/n
    return tuple(jnp.where(alone, 1, rows.lost(c) / unit) for c in (0.0, correlation))


class _Rows:
    """The integrals of `score_overlap` for rows of n keys, from one score's Hermite coefficients.

    In t ∫ the sum S of n weights counts: from the largest score that is at most, and least, to be
    expected, and n e^{σ²/2}.
    """

    def __init__(self, count: Any, variance: Any, rule: tuple[int, int, int]):
        variance = _as_float(variance)
        dtype = variance.dtype
        times, nodes, self.degree = rule
        z = np.linspace(-_LARGEST, _LARGEST, nodes)
        weight = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
        table = jnp.asarray(weight * polynomials(z, self.degree), dtype).T
        spread, self.count = jnp.sqrt(variance), jnp.asarray(count, dtype)
        least, most = (-ndtri(jnp.minimum(a / self.count, 1 - 1e-6)) for a in (16.0, 1e-7))
        low = -jnp.log(self.count) - jnp.minimum(0.5 * variance, spread * most) - 16
        self.step = (4 - spread * least - low) / (times - 1)
        log_t = low + self.step * jnp.arange(times)
        log_tw = log_t[:, None] + spread * jnp.asarray(z, dtype)[None, :]
        self.tw = jnp.exp(jnp.minimum(log_tw, 6.5))  # e^{−tw} is 0 beyond
        self.once, self.weight = self.tw * jnp.exp(-self.tw), table[:, 0]  # t w e^{−tw}
        self.first, self.rest = self.once @ table, -jnp.expm1(-self.tw) @ table  # [t, k]

    def own(self) -> Array:
        """E Σ_j P_ij²."""
        inside, rest = (self.tw * self.once) @ self.weight, self.rest[:, 0]
        return self.count * self.step * jnp.sum(inside * self._others(rest))

    def pair(self, correlation: Any) -> Array:
        """E Σ_j P_ij P_kj."""
        first, rest = self._mehler(self._powers(correlation))
        return self.count * self.step**2 * jnp.sum(first * self._others(self._either(rest)))

    def lost(self, correlation: Any) -> Array:
        """(E Σ_j P_ij² − E Σ_j P_ij P_kj)/(1 − c), of terms 1 − c^k = (1 − c) Σ_{j<k} c^j."""
        power = self._powers(correlation)
        part = jnp.concatenate([jnp.zeros_like(power[:1]), jnp.cumsum(power)[:-1]])
        apart = jnp.maximum(1 - jnp.asarray(correlation, power.dtype), 1e-5)
        (first, _), (_, rest) = self._mehler(power), self._mehler(jnp.ones_like(power))
        (lost, fewer), either = self._mehler(part), self._either(rest)
        share = jnp.clip(apart * fewer / (1 - either), 0, _BELOW_ONE)
        inside = lost - first * jnp.expm1((self.count - 1) * jnp.log1p(-share)) / apart
        return self.count * self.step**2 * jnp.sum(self._others(either) * inside)

    def _powers(self, correlation):
        return powers(jnp.asarray(correlation, self.weight.dtype), self.degree)

    def _mehler(self, power):
        """E[t w e^{−tw} t' w' e^{−t'w'}] and E[(1 − e^{−tw})(1 − e^{−t'w'})], [t, t]."""
        return tuple((a * power[None, :]) @ a.T for a in (self.first, self.rest))

    def _either(self, both):
        """1 − E e^{−tw − t'w'}, without cancellation."""
        alone = self.rest[:, 0]
        return jnp.clip(alone[:, None] + alone[None, :] - both, 0, _BELOW_ONE)

    def _others(self, rest):
        """(1 − rest)^{n−1}."""
        return jnp.exp((self.count - 1) * jnp.log1p(-jnp.minimum(rest, _BELOW_ONE)))


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
    d_k: int, score: Score = "dot", *, scale: bool = True, temperature: float = 1.0
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
