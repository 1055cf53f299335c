"""Verdicts that could be another: intervals against scipy's, ranges, few seeds, curves."""

import math

import numpy as np
import pytest
from scipy import stats

from rank_collapse.report import claims

ABOUT = {"statement": "it is so", "section": "Section 1", "statistic": "x", "null": "0"}


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.0, 1.2, 0.9], "supported"),
        ([-1.0, -1.2, -0.9], "contradicted"),
        ([1.0, -1.2, 0.9], "undecided"),
        ([0.0, 0.0, 0.0], "contradicted"),  # exactly nothing is not above nothing
        ([5.0, 5.1], "undecided"),  # too few
        ([], "undecided"),
    ],
)
def test_a_mean_above_zero(values, verdict):
    found = claims.test_mean(values, **ABOUT)
    assert found.verdict == verdict and found.seeds == len(values)
    assert ("fewer than 3" in found.why) == (len(values) < 3)


def test_a_mean_in_a_range_and_seeds_without_a_number():
    near = [2.99, 3.0, 3.02]
    assert claims.test_mean(near, (2.5, 3.5), **ABOUT).verdict == "supported"
    assert claims.test_mean(near, (3.5, 4.5), **ABOUT).verdict == "contradicted"
    found = claims.test_mean([*near, None, math.nan], (2.5, 3.5), **ABOUT)
    assert found.seeds == 3 and "2 of 5 seeds have no number" in found.why


def test_an_interval_that_is_known_already():
    for interval, verdict in (((0.1, 0.2), "supported"), ((-0.2, 0.0), "contradicted")):
        assert claims.of_interval(0.1, interval, 4, **ABOUT).verdict == verdict
    for interval, seeds in (((0.1, 0.2), 2), (None, 9), ((-0.1, 0.2), 9)):
        assert claims.of_interval(0.1, interval, seeds, **ABOUT).verdict == "undecided"


def test_shares():
    assert claims.of_share(60, 64, (0.5, math.inf), **ABOUT).verdict == "supported"
    assert claims.of_share(16, 64, (0.5, math.inf), **ABOUT).verdict == "contradicted"
    assert claims.of_share(30, 64, (0.5, math.inf), **ABOUT).verdict == "undecided"
    assert claims.of_share(2, 2, (0.5, math.inf), **ABOUT).verdict == "undecided"
    fewer = claims.of_shares(2, 64, 20, 64, claims.BELOW_ZERO, **ABOUT)
    assert fewer.verdict == "supported" and "2 of 64 against 20 of 64, p = " in fewer.why
    assert claims.of_shares(20, 64, 2, 64, claims.BELOW_ZERO, **ABOUT).verdict == "contradicted"
    assert claims.of_shares(18, 64, 16, 64, claims.BELOW_ZERO, **ABOUT).verdict == "undecided"
    # Newcombe 1998, table II, 56/70 - 48/80: 0.0524 to 0.3339
    found = claims.of_shares(56, 70, 48, 80, claims.ABOVE_ZERO, **ABOUT)
    assert found.interval == pytest.approx((0.0524, 0.3339), abs=1e-4)


def test_one_case_against_it_contradicts_a_theorem():
    about = {k: v for k, v in ABOUT.items() if k != "null"}
    assert claims.test_never(0, 1000, 8, **about).verdict == "supported"
    assert claims.test_never(1, 1000, 8, **about).verdict == "contradicted"
    assert claims.test_never(0, 1000, 2, **about).verdict == "undecided"
    nowhere = claims.test_never(0, 0, 8, **about)
    assert nowhere.verdict == "undecided" and "no case" in nowhere.why


def test_a_curve_among_draws():
    rng = np.random.default_rng(1)
    draws = rng.normal(size=(20, 5)).cumsum(axis=1)
    assert claims.of_curve(rng.normal(size=5).cumsum(), draws, **ABOUT).verdict == "supported"
    apart = draws.mean(axis=0) + np.array([0, 0, 0, 30, 0])
    found = claims.of_curve(apart, draws, **ABOUT)
    assert found.verdict == "contradicted" and "at 3" in found.why and "p = 0.048" in found.why
    beside = draws.mean(axis=0)
    beside[3] = draws[:, 3].max() + 0.01  # outside, but nearer than other draws are elsewhere
    found = claims.of_curve(beside, draws, **ABOUT)
    assert found.verdict == "undecided" and "outside the draws' range at 3" in found.why
    few = claims.of_curve(apart, draws[:19], **ABOUT)
    assert few.verdict == "undecided" and "19 draws" in few.why
    assert claims.of_curve(apart, draws[:0], **ABOUT).verdict == "undecided"
    # what is read off a figure is known to a resolution only
    flat = np.zeros((20, 5))
    assert claims.of_curve(np.full(5, 1e-4), flat, 1e-3, **ABOUT).interval[1] < 1
    assert "outside" not in claims.of_curve(np.full(5, 1e-4), flat, 1e-3, **ABOUT).why


def test_a_curve_of_the_same_law_is_refused_as_often_as_it_says():
    rng = np.random.default_rng(2)
    refused = 0
    for _ in range(400):
        curves = rng.normal(size=(21, 4)).cumsum(axis=1)
        refused += claims.of_curve(curves[0], curves[1:], **ABOUT).verdict == "contradicted"
    assert stats.binomtest(refused, 400, 1 / 21).pvalue > 1e-3


def test_counts():
    found = [claims.test_mean(v, **ABOUT) for v in ([1, 1, 1.1], [-1, -1, -1.1], [], [])]
    assert claims.counted(found) == {"supported": 1, "contradicted": 1, "undecided": 2}
