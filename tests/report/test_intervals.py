"""Intervals and slopes are compared with tables, numpy and scipy."""

import math

import pytest

from rank_collapse.report.intervals import (
    Interval,
    all_equal,
    describe_interval,
    describe_level,
    mean_interval,
)
from tests.support.refusals import is_refused

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


def test_an_interval_is_written_with_its_level_if_its_ends_are_finite():
    assert describe_interval(Interval(-0.12345, 3.0)) == "95 % -0.123 to 3"
    assert [describe_interval(Interval(*e)) for e in ((), (0.0,), (math.nan, 1.0))] == [""] * 3


@pytest.mark.parametrize("freedom, level", QUANTILES)
def test_mean_interval(freedom, level):
    n = freedom + 1
    values = [0.3 + (i - freedom / 2) for i in range(n)]
    deviation = math.sqrt(sum((v - 0.3) ** 2 for v in values) / freedom)
    half = QUANTILES[freedom, level] * deviation / math.sqrt(n)
    assert mean_interval(values, level) == pytest.approx((0.3 - half, 0.3 + half), rel=3e-4)


def test_a_level_is_shown_in_per_cent():
    assert describe_level() == "95 %" and describe_level(0.975) == "97.5 %"
    assert describe_level(1 - 0.05) == "95 %"


def test_edges():
    nothing = (-math.inf, math.inf)
    assert mean_interval([2.0]) == mean_interval([]) == nothing
    # draws that are equal up to rounding do not say how much other draws differ
    assert mean_interval([1.0, 1.0, 1.0]) == mean_interval([0.3, 0.1 + 0.2]) == nothing
    for wrong in (math.nan, math.inf):
        assert mean_interval([1.0, 2.0, wrong]) == nothing
    assert all_equal([]) and all_equal(iter([2.0])) and not all_equal([1.0, 2.0, 1.0])
    low, high = near = mean_interval([1.0, 1 + 1e-9])
    assert near.is_finite and low < 1 < high < 1 + 1e-7
    assert not mean_interval([]).is_finite and not Interval(low=0.0).is_finite
    assert mean_interval(iter([0.0, 1.0, 5.0])) == mean_interval([0.0, 1.0, 5.0], 0.95)
    is_refused(r"level=95.0 is not in \(0, 1\)", mean_interval, [0.0, 1.0], 95.0)
