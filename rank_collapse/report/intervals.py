"""Student's interval of a mean over seeds.

scipy is imported where it is used: it takes a second, which `--help` need not.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from rank_collapse.checks import check_numbers

LEVEL = 0.95  # of every interval that is shown, unless a function is asked for another one


class Interval(NamedTuple):
    """Both ends of an interval; an unknown value has the interval (−∞, ∞)."""

    low: float = -math.inf
    high: float = math.inf

    @property
    def is_finite(self) -> bool:
        """Returns whether both ends are finite."""
        return math.isfinite(self.high - self.low)


def describe_level(level: float = LEVEL) -> str:
    """Writes the level of an interval, "95 %"."""
    return f"{100 * level:g} %"


def describe_interval(ends: Interval) -> str:
    """Writes an interval with the level of those that are shown, "95 % 0.1 to 0.3"; "" for one
    without finite ends."""
    return f"{describe_level()} {ends.low:.3g} to {ends.high:.3g}" if ends.is_finite else ""


def mean_interval(values: Iterable[float], level: float = LEVEL) -> Interval:
    """Compute Student's interval of a mean: x̄ ± t s/√n, t the quantile of n − 1 degrees of freedom.

    For paired differences, one of two treatments of the same seeds is ahead where the interval lies
    on one side of 0. The method presumes draws that are nearly normal: for a statistic that is
    bounded or takes few values, the interval may leave the range.

    Args:
        values: One per seed.
        level: Share of such intervals that contain the mean over all possible seeds.

    Raises:
        ValueError: A level outside (0, 1).

    Returns:
        (−∞, ∞) for fewer than two seeds, for seeds that are all equal (they show nothing about
        their spread), and where a value is not finite.

    Source: Student 1908, "The probable error of a mean".
    """
    values, upper = [float(v) for v in values], upper_tail(level)
    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)) or all_equal(values):
        return Interval()
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = student_quantile(n - 1, upper) * deviation / math.sqrt(n)
    return Interval(mean - half, mean + half)


def all_equal(values: Iterable[float]) -> bool:
    """Check whether numbers differ by no more than the rounding of float64."""
    values = [*values]
    return not values or math.isclose(min(values), max(values), rel_tol=1e-12)


def upper_tail(level: float) -> float:
    """Compute the quantile (1 + level)/2 at which an interval of a level ends."""
    check_numbers("(0, 1)", level=level)
    return (1 + level) / 2


@lru_cache(maxsize=1024)
def student_quantile(freedom: int, share: float) -> float:
    """Compute a quantile of Student's distribution."""
    from scipy import special

    return float(special.stdtrit(freedom, share))
