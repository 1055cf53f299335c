"""The variance of attention scores at random queries and keys, of both forms."""

import math
from typing import NamedTuple

import numpy as np

from rank_collapse.network.attention import Score


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
