"""Means over seeds: how well a few seeds fix one (Student's interval)."""

import math
from collections.abc import Sequence


def student_quantile(df: int, level: float = 0.95) -> float:
    """t with P(|T| ≤ t) = level for Student's T of `df` degrees of freedom.

    From the finite sums of P(|T| ≤ t) in θ = arctan(t/√df), by bisection.

    Args:
        df: Degrees of freedom, a positive integer.
        level: Between 0 and 1.

    Raises:
        ValueError: df or level out of range.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    if df < 1 or not 0 < level < 1:
        raise ValueError(f"df={df} and level={level}: a positive integer, and between 0 and 1")
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, df) < level else (low, middle)
    return math.sqrt(df) * math.tan((low + high) / 2)


def _inside(theta, df):
    """P(|T| ≤ √df tan θ)."""
    odd = df % 2
    power, total = (math.cos(theta), 0.0) if odd else (1.0, 0.0)
    for j in range(odd, df - 1, 2):
        total += power
        power *= math.cos(theta) ** 2 * (j + 1) / (j + 2)
    total *= math.sin(theta)
    return 2 / math.pi * (theta + total) if odd else total


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """mean ± t s/√n: where the mean over all seeds lies, from n of them that are alike.

    Args:
        values: One number a seed, at least two.
        level: Of the interval.

    Raises:
        ValueError: Fewer than two values, or one that is not finite.
    """
    values = [float(v) for v in values]
    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)):
        raise ValueError(f"an interval needs two finite values or more, not {values}")
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = student_quantile(n - 1, level) * deviation / math.sqrt(n)
    return mean - half, mean + half
