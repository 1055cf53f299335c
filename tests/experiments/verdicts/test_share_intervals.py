"""Slopes, geometric means and intervals of shares: closed forms and limits."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.verdicts.share_intervals import (
    geometric_mean,
    share_interval,
    slope,
    wilson_interval,
)
from rank_collapse.report.intervals import mean_interval
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals


def test_slopes_are_least_squares():
    x = np.array([0.0, 1.0, 3.0, 7.0])
    y = np.random.default_rng(1).normal(size=(2, 4)) + 5
    expected = [stats.linregress(x, row).slope for row in y]
    assert_close(slope(x, y), expected)
    assert np.isnan(slope([1.0], [[2.0]])).all()


def test_a_geometric_mean_needs_values_above_zero():
    means = geometric_mean([[1.0, 2.0], [4.0, 0.0]])
    assert means[0] == pytest.approx(stats.gmean([1.0, 4.0])) and np.isnan(means[1])


@pytest.mark.parametrize("count, total", [(0, 8), (1, 8), (8, 8), (13, 64), (1, 1)])
@pytest.mark.parametrize("level", [0.95, 0.99])
def test_wilson_interval(count, total, level):
    expected = stats.binomtest(count, total).proportion_ci(level, method="wilson")
    interval = wilson_interval(count, total, level)
    assert interval == pytest.approx(tuple(expected), abs=1e-12)
    assert (interval.low == 0.0) is (count == 0) and (interval.high == 1.0) is (count == total)


@pytest.mark.parametrize("total, least", [(1, 0.79), (8, 0.83), (100, 0.84)])
def test_wilson_intervals_hold_95_percent_of_shares_on_average_and_fewer_near_0(total, least):
    shares = np.linspace(1e-4, 1 - 1e-4, 5000)
    ends = np.array([wilson_interval(k, total) for k in range(total + 1)])[..., None]
    is_held = (ends[:, 0] <= shares) & (shares <= ends[:, 1])
    counts = np.arange(total + 1)[:, None]
    coverage = (stats.binom.pmf(counts, total, shares) * is_held).sum(axis=0)
    assert 0.95 <= coverage.mean() < 0.96 and least <= coverage.min() < least + 0.01


def test_intervals_of_shares_stay_between_0_and_1():
    high = [1.0, 0.99, 0.7, 1.0]
    assert mean_interval(high)[1] > 1
    assert share_interval(high) == (pytest.approx(mean_interval(high)[0]), 1.0)
    low = [1 - v for v in high]
    assert share_interval(low) == (0.0, pytest.approx(mean_interval(low)[1]))
    inside = [0.4, 0.5, 0.6]
    assert share_interval(inside, 0.9) == mean_interval(inside, 0.9)
    # values of 0 and 1, or all equal: the interval is Wilson's
    assert share_interval([1, 0, 1, 1]) == wilson_interval(3, 4)
    assert share_interval([1.0, 1.0, 1.0]) == (pytest.approx(0.4385, abs=1e-4), 1.0)
    low, high = share_interval([0.5, 0.5, 0.5, 0.5])
    assert 0 < low < 0.5 < high < 1
    assert share_interval([]) == (0.0, 1.0)
    rounded = 1 + 1e-7  # in float32
    below = float(np.nextafter(np.float32(1), np.float32(0)))
    assert share_interval([rounded, 1.0]) == share_interval([1.0, 1.0])
    assert share_interval([below, 1.0, 1.0]) == share_interval([1.0] * 3)
    assert share_interval([1e-7, 0.0, 1.0]) == wilson_interval(1, 3)
    nearly_equal = share_interval([0.9, 0.9 * below, 0.9])
    assert nearly_equal == pytest.approx(share_interval([0.9] * 3), abs=1e-6)
    assert share_interval([1, 0, 1, 1], 0.8) == wilson_interval(3, 4, 0.8) != wilson_interval(3, 4)
    assert share_interval([0.3] * 4) == wilson_interval(1.2, 4)  # all equal: as so many 0s and 1s
    for number in (1.2, 1.0005, -0.0005, math.nan):
        is_refused(rf"{number:g} is not a share", share_interval, [0.5, number])


@parametrize_refusals(
    [
        (lambda: wilson_interval(3, 2), "count=3 of total=2"),
        (lambda: wilson_interval(0, 0), "total=0"),
    ]
)
def test_counts_that_are_no_shares(arguments, message):
    is_refused(message, *arguments)
