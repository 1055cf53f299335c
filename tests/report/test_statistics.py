"""Means, intervals and slopes over seeds, beside numpy's and scipy's."""

import json

import numpy as np
import pytest
from scipy import stats

from rank_collapse.report import statistics

VALUES = np.random.default_rng(0).normal(2.0, 1.0, (5, 3))


def test_moments_are_those_of_the_seeds():
    found = statistics.moments(VALUES)
    np.testing.assert_allclose(found["mean"], VALUES.mean(axis=0))
    np.testing.assert_allclose(found["std"], VALUES.std(axis=0))
    ends = stats.t.interval(0.95, 4, VALUES.mean(axis=0), stats.sem(VALUES, axis=0))
    np.testing.assert_allclose(found["interval"], ends, rtol=1e-9)
    mean, low, high = statistics.mean_and_ends(VALUES[:, 0])
    assert (mean, low, high) == pytest.approx((VALUES[:, 0].mean(), ends[0][0], ends[1][0]))
    assert statistics.moments(VALUES[:, 0])["mean"] == pytest.approx(mean)


def test_one_seed_has_no_interval():
    assert "interval" not in statistics.moments(VALUES[:1])
    assert "interval" not in statistics.moments(VALUES, interval=False)
    assert "interval" not in statistics.moments([1.0, np.nan])
    assert statistics.mean_and_ends([2.0]) == [2.0, None, None]


def test_intervals_of_shares_and_of_equal_seeds():
    shares = np.array([[1.0, 1.0], [1.0, 0.6], [0.4, 1.0]])
    low, high = np.array(statistics.moments(shares, share=True)["interval"])
    assert (low >= 0).all() and (high == 1).all() and (low < shares.mean(axis=0)).all()
    assert np.max(statistics.moments(shares)["interval"]) > 1
    assert statistics.mean_and_ends(shares[:, 0], share=True)[1:] == [low[0], high[0]]
    assert statistics.mean_and_ends([2.0, 2.0]) == [2.0, None, None]
    assert statistics.moments([[2.0, 1.0], [2.0, 3.0]])["interval"][0][0] is None
    assert statistics.mean_and_ends([1.0], share=True) == [1.0, None, None]
    assert statistics.mean_and_ends([1.0, np.nan], share=True)[1:] == [None, None]


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
    found = statistics.numbers(np.array([1.5, np.nan, -np.inf], np.float32))
    assert json.dumps(found, allow_nan=False) == "[1.5, null, null]"


def test_a_row_for_each_seed():
    columns = {"a": np.array([True, False]), "b": np.array([1.5, 2.5], np.float32), "c": [None, 3]}
    assert statistics.by_seed(columns) == [
        {"seed": 0, "a": True, "b": 1.5, "c": None},
        {"seed": 1, "a": False, "b": 2.5, "c": 3},
    ]
