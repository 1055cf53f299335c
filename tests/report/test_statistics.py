"""Means, intervals, slopes and tests: beside tables, numpy and scipy."""

import json
import math

import numpy as np
import pytest
from refusals import is_refused, refused
from scipy import stats

from rank_collapse.report import statistics
from rank_collapse.report.intervals import (
    Interval,
    fisher_exact,
    mean_interval,
    share_interval,
    wilson_interval,
)

VALUES = np.random.default_rng(0).normal(2.0, 1.0, 5)


def test_a_mean_has_its_interval_where_seeds_tell_it():
    mean, ends = statistics.mean_of(VALUES)
    wanted = stats.t.interval(0.95, 4, VALUES.mean(), stats.sem(VALUES))
    assert (mean, *ends) == pytest.approx((VALUES.mean(), *wanted), rel=1e-9)
    shares = [1.0, 1.0, 0.4]
    assert statistics.mean_of(shares)[1].high > 1
    assert statistics.mean_of(shares, share=True)[1] == share_interval(shares)
    for values, share in (([2.0], False), ([2.0, 2.0], False), ([1.0], True), ([1, np.nan], True)):
        assert not statistics.mean_of(values, share=share)[1].known
    assert statistics.between(statistics.mean_of([2.0])) == "2.000"
    assert statistics.between((0.1, Interval(0.05, 0.2)), 2) == "0.10 (0.05 to 0.20)"


def test_slopes_are_least_squares():
    x = np.array([0.0, 1.0, 3.0, 7.0])
    y = np.random.default_rng(1).normal(size=(2, 4)) + 5
    expected = [stats.linregress(x, row).slope for row in y]
    np.testing.assert_allclose(statistics.slope(x, y), expected)
    assert np.isnan(statistics.slope([1.0], [[2.0]])).all()


def test_a_geometric_mean_needs_values_above_zero():
    found = statistics.geometric_mean([[1.0, 2.0], [4.0, 0.0]])
    assert found[0] == pytest.approx(stats.gmean([1.0, 4.0])) and np.isnan(found[1])


def test_what_is_no_number_is_none_in_json():
    found = [*map(statistics.number, np.array([1.5, np.nan, -np.inf], np.float32))]
    assert json.dumps(found, allow_nan=False) == "[1.5, null, null]"


def test_a_row_for_each_seed():
    columns = {"a": np.array([True, False]), "b": np.array([1.5, 2.5], np.float32), "c": [None, 3]}
    assert statistics.by_seed(columns) == [
        {"seed": 0, "a": True, "b": 1.5, "c": None},
        {"seed": 1, "a": False, "b": 2.5, "c": 3},
    ]


# Fisher and Yates 1963, table III: t with P(|T| > t) = 1 − level
QUANTILES = {
    (1, 0.95): 12.706,
    (2, 0.95): 4.303,
    (4, 0.9): 2.132,
    (4, 0.95): 2.776,
    (7, 0.95): 2.365,
    (7, 0.999): 5.408,
    (30, 0.95): 2.042,
}


@pytest.mark.parametrize("freedom, level", QUANTILES)
def test_mean_interval(freedom, level):
    n = freedom + 1
    values = [0.3 + (i - freedom / 2) for i in range(n)]
    deviation = math.sqrt(sum((v - 0.3) ** 2 for v in values) / freedom)
    half = QUANTILES[freedom, level] * deviation / math.sqrt(n)
    assert mean_interval(values, level) == pytest.approx((0.3 - half, 0.3 + half), rel=3e-4)


def test_edges():
    nothing = (-math.inf, math.inf)
    assert mean_interval([2.0]) == mean_interval([]) == nothing
    # draws that are equal, but for rounding, do not say how much others differ
    assert mean_interval([1.0, 1.0, 1.0]) == mean_interval([0.3, 0.1 + 0.2]) == nothing
    is_refused(r"level=95.0 is not between", mean_interval, [0.0, 1.0], 95.0)


@pytest.mark.parametrize("count, total", [(0, 8), (1, 8), (8, 8), (13, 64), (1, 1)])
@pytest.mark.parametrize("level", [0.95, 0.99])
def test_wilson_interval(count, total, level):
    wanted = stats.binomtest(count, total).proportion_ci(level, method="wilson")
    assert wilson_interval(count, total, level) == pytest.approx(tuple(wanted), abs=1e-12)


def test_intervals_of_shares_stay_between_0_and_1():
    high = [1.0, 0.99, 0.7, 1.0]
    assert mean_interval(high)[1] > 1
    assert share_interval(high) == (pytest.approx(mean_interval(high)[0]), 1.0)
    low = [1 - v for v in high]
    assert share_interval(low) == (0.0, pytest.approx(mean_interval(low)[1]))
    inside = [0.4, 0.5, 0.6]
    assert share_interval(inside, 0.9) == mean_interval(inside, 0.9)
    # of seeds that do or do not, and of equal ones, the share itself
    assert share_interval([1, 0, 1, 1]) == wilson_interval(3, 4)
    assert share_interval([1.0, 1.0, 1.0]) == (pytest.approx(0.4385, abs=1e-4), 1.0)
    low, high = share_interval([0.5, 0.5, 0.5, 0.5])
    assert 0 < low < 0.5 < high < 1
    assert share_interval([]) == (0.0, 1.0)
    rounded = 1 + 1e-7  # in float32
    assert share_interval([rounded, 1.0]) == share_interval([1.0, 1.0])
    is_refused(r"1\.2 is not in", share_interval, [0.5, 1.2])


@pytest.mark.parametrize(
    "counts",
    [(1, 8, 13, 64), (0, 8, 30, 64), (3, 8, 3, 8), (8, 8, 0, 8), (0, 8, 0, 64), (0, 0, 3, 4)],
)
def test_fisher_exact(counts):
    """Of all tables with these sums, the share of those that are no more likely."""
    k, n, k2, n2 = counts
    hits = k + k2
    ways = {
        i: math.comb(n, i) * math.comb(n2, hits - i)
        for i in range(max(0, hits - n2), min(n, hits) + 1)
    }
    wanted = sum(w for w in ways.values() if w <= ways[k]) / sum(ways.values())
    assert fisher_exact(*counts) == pytest.approx(wanted, rel=1e-10)


test_counts_that_are_no_shares = refused(
    [
        (lambda: wilson_interval(3, 2), "count=3 of total=2"),
        (lambda: wilson_interval(0, 0), "total=0"),
        (lambda: fisher_exact(1, 4, -1, 4), "count=-1 of total=4"),
    ]
)
