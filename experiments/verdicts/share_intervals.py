"""Intervals of shares, slopes and means of logarithms over seeds."""

import math
from collections.abc import Iterable
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from rank_collapse.checks import refuse_if
from rank_collapse.report.intervals import (
    LEVEL,
    Interval,
    mean_interval,
    upper_tail,
)

ROUNDING = 1e-5  # above what float32 loses in a share


def share_interval(values: Iterable[float | int], level: float = LEVEL) -> Interval:
    """Compute the interval of the mean of numbers in [0, 1], which does not leave [0, 1].

    Uses Wilson's interval, with the sum as the count, for draws that are all 0 or 1, or all equal,
    up to float32's rounding; no draws in [0, 1] vary more than 0s and 1s. For others it uses
    Student's interval, cut to [0, 1].

    Args:
        values: One per seed: accuracies, shares, 1 or 0.
        level: See `mean_interval`.

    Raises:
        ValueError: A number outside [0, 1] by more than float32's rounding.

    Returns:
        (0, 1) of no seeds.
    """
    numbers = [float(v) for v in values]
    values = [min(max(v, 0.0), 1.0) for v in numbers]
    for number, share in zip(numbers, values, strict=True):
        refuse_if(
            not abs(number - share) < ROUNDING, f"{number:g} is not a share, a number from 0 to 1"
        )
    if not values:
        return Interval(0.0, 1.0)
    is_whole = all(abs(v - round(v)) < ROUNDING for v in values)
    if is_whole or max(values) - min(values) < ROUNDING:
        total = math.fsum(values)
        count = round(total) if is_whole else total
        return wilson_interval(count, len(values), level)
    low, high = mean_interval(values, level)
    return Interval(max(low, 0.0), min(high, 1.0))


def wilson_interval(count: float | int, total: int, level: float = LEVEL) -> Interval:
    """Compute the score interval of a share from `count` of `total`.

    (k + z²/2 ± z √(k(n − k)/n + z²/4)) / (n + z²), z the normal quantile of (1 + level)/2.

    Args:
        count, total: k and n.
        level: Share of such intervals that contain the true share, as a mean over true shares. At
            a true share near 0 or 1 fewer may contain it: at 95 % at least 79 % for one draw, 83 %
            for 8 draws and 84 % for 100.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    refuse_if(
        not 0 <= count <= total or total < 1, f"count={count} of total={total} is not a share"
    )
    z = NormalDist().inv_cdf(upper_tail(level))
    middle = count + z**2 / 2
    half = z * math.sqrt(count * (total - count) / total + z**2 / 4)
    low, high = (middle - half) / (total + z**2), (middle + half) / (total + z**2)
    return Interval(0.0 if count == 0 else low, 1.0 if count == total else high)


def slope(x: ArrayLike, y: ArrayLike) -> np.ndarray:
    """Compute the least-squares slope of each row of y [..., k] over x [k].

    Σ (x − x̄) y / Σ (x − x̄)².

    NaN where x has one point only, or a value of y is not finite.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    away = x - x.mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(y @ away / (away @ away))


def geometric_mean(values: ArrayLike) -> np.ndarray | np.floating:
    """Compute exp of the mean over seeds of ln values [s, ...]; NaN for a seed without one above
    0.
    """
    values = np.asarray(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp(np.log(np.where(values > 0, values, np.nan)).mean(axis=0))
