"""Shares of seeds: how well a count fixes one, and whether two counts can come from one."""

import math


def wilson_interval(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a share from `count` of `total`, 95 % at z = 1.96.

    (k + z²/2 ± z √(k(n − k)/n + z²/4)) / (n + z²).

    Args:
        count, total: k and n.
        z: Quantile of the normal distribution.

    Raises:
        ValueError: Not 0 ≤ k ≤ n, or n = 0.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if not 0 <= count <= total or total == 0:
        raise ValueError(f"count={count} of total={total} is no share")
    half = z * math.sqrt(count * (total - count) / total + z**2 / 4)
    low, high = ((count + z**2 / 2 + s * half) / (total + z**2) for s in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def fisher_exact(count: int, total: int, other_count: int, other_total: int) -> float:
    """p of two counts if both shares are one: Fisher's exact test, two-sided.

    The probability, given both totals and the sum of the counts, of a table that is no more likely
    than this one.

    Args:
        count, total: One sample.
        other_count, other_total: The other.

    Raises:
        ValueError: Not 0 ≤ count ≤ total in one of them.
    """
    for k, n in ((count, total), (other_count, other_total)):
        if not 0 <= k <= n:
            raise ValueError(f"count={k} of total={n} is no share")
    hits = count + other_count

    def ways(k):
        return math.comb(total, k) * math.comb(other_total, hits - k)

    tables = [ways(k) for k in range(max(0, hits - other_total), min(total, hits) + 1)]
    return sum(w for w in tables if w <= ways(count)) / sum(tables)


def share_difference(
    count: int, total: int, other_count: int, other_total: int, z: float = 1.96
) -> tuple[float, float]:
    """Interval of count/total − other_count/other_total, 95 % at z = 1.96.

    With p, q the shares and (l, u), (l', u') their score intervals:
    p − q − √((p − l)² + (u' − q)²) to p − q + √((u − p)² + (q − l')²).

    Args:
        count, total: One sample.
        other_count, other_total: The other.
        z: Quantile of the normal distribution.

    Raises:
        ValueError: One of them is no share.

    Source: Newcombe 1998, "Interval estimation for the difference between independent
    proportions", method 10.
    """
    (l, u), (l2, u2) = (
        wilson_interval(k, n, z) for k, n in ((count, total), (other_count, other_total))
    )
    p, q = count / total, other_count / other_total
    return p - q - math.hypot(p - l, u2 - q), p - q + math.hypot(u - p, q - l2)
