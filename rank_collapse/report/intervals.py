"""Means and shares of seeds: how well a few of them fix one, and whether two counts are of one.

scipy.stats is imported where it is used: it takes a second, which `--help` need not.
"""

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
    from scipy import stats

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


def wilson_interval(count: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Score interval of a share from `count` of `total`.

    (k + z²/2 ± z √(k(n − k)/n + z²/4)) / (n + z²), z the normal quantile of (1 + level)/2.

    Args:
        level: Share of such intervals that hold the true share.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    from scipy import stats

    _check(count, total, least=1)
    found = stats.binomtest(int(count), int(total)).proportion_ci(level, method="wilson")
    return float(found.low), float(found.high)


def fisher_exact(count: int, total: int, other_count: int, other_total: int) -> float:
    """p of two counts if both shares are one: Fisher's exact test, two-sided.

    The probability, given both totals and the sum of the counts, of a table that is no more likely
    than this one.
    """
    from scipy import stats

    samples = (count, total), (other_count, other_total)
    for k, n in samples:
        _check(k, n)
    return float(stats.fisher_exact([[k, n - k] for k, n in samples]).pvalue)


def share_difference(
    count: int, total: int, other_count: int, other_total: int, level: float = 0.95
) -> tuple[float, float]:
    """Interval of count/total − other_count/other_total.

    With p, q the shares and (l, u), (l', u') their score intervals:
    p − q − √((p − l)² + (u' − q)²) to p − q + √((u − p)² + (q − l')²).

    Args:
        level: Share of such intervals that hold the true difference.

    Source: Newcombe 1998, "Interval estimation for the difference between independent
    proportions", method 10; scipy has none.
    """
    (l, u), (l2, u2) = (
        wilson_interval(k, n, level) for k, n in ((count, total), (other_count, other_total))
    )
    p, q = count / total, other_count / other_total
    return p - q - math.hypot(p - l, u2 - q), p - q + math.hypot(u - p, q - l2)


def _check(count, total, least=0):
    if not 0 <= count <= total or total < least:
        raise ValueError(f"count={count} of total={total} is not a share")
