"""Means of seeds: how well a few of them fix one."""

import math
from collections.abc import Iterable


def mean_interval(values: Iterable[float], level: float = 0.95) -> tuple[float, float]:
    """Student's interval of a mean: x̄ ± t s/√n, t the quantile of n − 1 degrees of freedom.

    Of paired differences, one of two treatments of the same seeds is ahead where the interval lies
    on one side of 0.

    Args:
        values: One per seed.
        level: Share of such intervals that hold the mean of all seeds there could be.

    Raises:
        ValueError: A level that is no share.

    Returns:
        (low, high): (−∞, ∞) of fewer than two seeds, which say nothing.

    Source: Student 1908, "The probable error of a mean".
    """
    from scipy import stats  # takes a second to import, which `--help` need not

    if not 0 < level < 1:
        raise ValueError(f"level={level} is not between 0 and 1")
    values = [float(v) for v in values]
    n = len(values)
    if n < 2:
        return -math.inf, math.inf
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = float(stats.t.ppf((1 + level) / 2, n - 1)) * deviation / math.sqrt(n)
    return mean - half, mean + half
