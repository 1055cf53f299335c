"""Means of seeds: how well a few of them fix one."""

import math
from collections.abc import Iterable


def mean_interval(values: Iterable[float], level: float = 0.95) -> tuple[float, float]:
    """Student's interval of a mean: x̄ ± t s/√n, t the quantile of n − 1 degrees of freedom.

    Of paired differences it tells whether one of two treatments of the same seeds is ahead: where
    the interval lies on one side of 0.

    Args:
        values: One per seed.
        level: Share of such intervals that hold the mean of all seeds there could be.

    Raises:
        ValueError: A level that is no share.

    Returns:
        (low, high): (−∞, ∞) of fewer than two seeds, which say nothing.

    Source: Student 1908, "The probable error of a mean".
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level} is not between 0 and 1")
    values = [float(v) for v in values]
    n = len(values)
    if n < 2:
        return -math.inf, math.inf
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = t_quantile(n - 1, level) * deviation / math.sqrt(n)
    return mean - half, mean + half


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """t with P(|T| ≤ t) = level of Student's distribution, by bisection."""
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if t_probability(middle, freedom) >= level else (middle, high)
    return high


def t_probability(t: float, freedom: int) -> float:
    """P(|T| ≤ t) of Student's distribution: Abramowitz and Stegun 26.7.3 and 26.7.4.

    With θ = arctan(t/√ν): (2/π)(θ + sin θ (cos θ + (2/3) cos³θ + ...)) for odd ν,
    sin θ (1 + (1/2) cos²θ + ...) for even ν, up to the power ν − 2.
    """
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
