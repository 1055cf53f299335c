"""The test whether a published curve may be one more draw of an ensemble of curves."""

import math

import numpy as np
from numpy.typing import ArrayLike

from experiments.verdicts.claims import ERROR
from experiments.verdicts.rows import Row
from rank_collapse.report.intervals import Interval

SHIFTS = (1, 2, 3)  # deviations by which a whole curve is moved, to learn the power of the test


def curve_row(
    key: str, setting: str, curve: ArrayLike, draws: ArrayLike, resolution: float = 0.0
) -> Row:
    """Makes the row of a curve that may be one more draw of an ensemble of curves.

    The test may reject the claim, but a curve that is not rejected is not shown to be one of them.
    The note has the power: the share of the draws that the test would reject if each were moved by
    so many deviations.

    Args:
        key, setting: See `rows.mean_row`.
        curve: The curve [l].
        draws: The ensemble [s, l].
        resolution: Largest error with which the curve's values may have been read off.
    """
    draws, curve = np.asarray(draws, float), np.asarray(curve, float)
    n = len(draws)
    p = curve_p_value(curve, draws, resolution)
    note = f"p = {p:.2g} with {n} draws"
    if n > 2:
        powers = [(100 * measure_power(draws, shift, ERROR), shift) for shift in SHIFTS]
        shares = ", ".join(f"{power:.0f} % of those moved by {shift}" for power, shift in powers)
        note += f"; at {100 * ERROR:g} % it would reject {shares} deviations"
    return make_curve_row(key, setting, p, n, note)


def make_curve_row(key: str, setting: str, p: float, n: int, note: str = "") -> Row:
    """Makes the row of a curve whose p-value is known.

    Args:
        key, setting: See `rows.mean_row`.
        p: p-value from `curve_p_value`.
        n: Number of draws.
        note: Beside the row.
    """
    return Row(key, setting, n, p if n else None, lambda level: Interval(), note, p=p, num_made=n)


def measure_power(draws: np.ndarray, shift: float, error: float) -> float:
    """Measures the share of draws that the test rejects among the others after they are moved.

    Args:
        draws: The ensemble [s, l].
        shift: Deviations by which all points of a draw are moved.
        error: At which the test rejects.
    """
    spread = draws.std(axis=0, ddof=1)
    other_draws = (np.delete(draws, i, axis=0) for i in range(len(draws)))
    p = [curve_p_value(d + shift * spread, o) for d, o in zip(draws, other_draws, strict=True)]
    return float(np.mean(np.array(p) <= error))


def curve_p_value(curve: np.ndarray, draws: np.ndarray, resolution: float = 0.0) -> float:
    """Computes the p-value of a curve [l] among draws [s, l], for all of its points together.

    1. The curve was read off a figure, to `resolution`. Of the values that it may have had, those
       nearest to the mean of the n draws are taken.
    2. The distance d of a curve is that from the mean of all n + 1, at its farthest point, in
       standard deviations there.
    3. Were the curve one more draw, the rank of its d (1 is the farthest) would be each of
       1 .. n + 1 with equal probability, whatever the law of the draws.
    4. A rank alone decides nothing: the curve must be far out in the tail too. Let u be the
       (k + 1)-th farthest distance of the draws, k = n/10, and S the sum of ln(d_i/u) of the k
       farther ones. If the tail is a power law, which is heavier than those of most laws, one more
       draw is as far as the curve with the probability on the right:

        p = max(rank/(n + 1), (k + 1)/(n + 1) · (1 + ln(d/u)/S)^−k).

    Args:
        curve, draws, resolution: See `curve_row`.

    Source: the studentised envelope test of Myllymäki et al. 2017, "Global envelope tests for
    spatial processes"; the tail as in Knijnenburg et al. 2009, "Fewer permutations, more accurate
    P-values", with that of Hill 1975, "A simple general approach to inference about the tail".
    """
    n, k = len(draws), max(1, len(draws) // 10)
    if n <= k:
        return 1.0
    nearest = np.clip(draws.mean(axis=0), curve - resolution, curve + resolution)
    curves = np.concatenate([nearest[None], draws])
    spread = curves.std(axis=0, ddof=1)
    deviations = np.abs(curves - curves.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    distance, *draw_distances = deviations.max(axis=1)
    threshold, *tail = np.sort(draw_distances)[-k - 1 :]
    tail_probability = 1.0
    if distance > threshold:
        total = np.log(np.array(tail) / threshold).sum()
        tail_probability = (total / (total + math.log(distance / threshold))) ** k
    rank = 1 + sum(draw_distances >= distance)
    return float(max(rank, (k + 1) * tail_probability) / (n + 1))
