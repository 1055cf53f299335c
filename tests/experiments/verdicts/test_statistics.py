"""Means of seeds with intervals, rows of tables, laws of decay, and Fisher's test."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from experiments.verdicts import statistics
from experiments.verdicts.share_intervals import share_interval
from rank_collapse.report.intervals import Interval

VALUES = np.random.default_rng(0).normal(2.0, 1.0, 5)


def test_a_mean_has_its_interval_where_seeds_tell_it():
    mean, ends = statistics.mean_with_interval(VALUES)
    expected = stats.t.interval(0.95, 4, VALUES.mean(), stats.sem(VALUES))
    assert (mean, *ends) == pytest.approx((VALUES.mean(), *expected), rel=1e-9)
    shares = [1.0, 1.0, 0.4]
    assert statistics.mean_with_interval(shares)[1].high > 1
    assert statistics.mean_with_interval(shares, share=True)[1] == share_interval(shares)
    cases = ([2.0], False), ([2.0, 2.0], False), ([1.0], True), ([1, np.nan], True)
    for values, share in (*cases, ([1.0, np.inf, 2.0], False), ([1.0, -np.inf, 2.0], False)):
        mean, ends = statistics.mean_with_interval(values, share=share)
        assert not ends.is_finite
        np.testing.assert_equal(mean, np.mean(values))  # NaN where a seed has none
    assert statistics.format_interval(statistics.mean_with_interval([2.0])) == "2.000"
    assert statistics.format_interval((0.1, Interval(0.05, 0.2)), 2) == "0.10 (0.05 to 0.20)"


def test_what_is_no_number_is_none_in_json():
    values = [*map(statistics.finite_or_none, np.array([1.5, np.nan, -np.inf], np.float32))]
    assert json.dumps(values, allow_nan=False) == "[1.5, null, null]"


def test_a_row_for_each_seed():
    columns = {"a": np.array([True, False]), "b": np.array([1.5, 2.5], np.float32), "c": [None, 3]}
    assert statistics.seed_rows(columns) == [
        {"seed": 0, "a": True, "b": 1.5, "c": None},
        {"seed": 1, "a": False, "b": 2.5, "c": 3},
    ]


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2)])
def test_columns_of_other_lengths_are_refused(first, second):
    with pytest.raises(ValueError, match=r"is (longer|shorter) than"):
        statistics.seed_rows({"a": np.zeros(first), "b": np.zeros(second)})


@pytest.mark.parametrize(
    "counts",
    [(1, 8, 13, 64), (0, 8, 30, 64), (3, 8, 3, 8), (8, 8, 0, 8), (0, 8, 0, 64), (0, 0, 3, 4)],
)
def test_fisher_exact(counts):
    """The p-value is the share of tables with these sums that are no more likely."""
    k, n, k2, n2 = counts
    hits = k + k2
    ways = {
        i: math.comb(n, i) * math.comb(n2, hits - i)
        for i in range(max(0, hits - n2), min(n, hits) + 1)
    }
    expected = sum(w for w in ways.values() if w <= ways[k]) / sum(ways.values())
    assert statistics.fisher_exact(*counts) == pytest.approx(expected, rel=1e-10)


def test_a_power_of_the_layer_is_told_from_an_exponential():
    """Compared with polynomial fits of both laws, also on a curve of neither law."""
    layers = np.arange(7)
    exponential, power = 0.3**layers, np.maximum(layers, 0.5) ** -2.0
    assert statistics.power_law_wins(exponential) < 0 < statistics.power_law_wins(power)
    curve = np.random.default_rng(2).uniform(0.1, 1, 7)
    logs = np.log(curve[1:])
    squares = [np.polyfit(x, logs, 1, full=True)[1][0] for x in (layers[1:], np.log(layers[1:]))]
    expected = math.log(squares[0] / squares[1])
    assert statistics.power_law_wins(curve) == pytest.approx(expected)
    assert np.isnan(statistics.power_law_wins([[1.0, 0.5, 0.2], [1.0, 0.5, 0.0]])).all()


def test_what_is_below_the_numbers_of_float32_has_the_logarithm_of_their_least():
    least = math.log10(np.finfo(np.float32).tiny)
    logs = statistics.clipped_log10(np.array([0.0, 1e-300, 1e-20, 10.0]))
    assert logs == pytest.approx([least, least, -20, 1])
