"""Tests and intervals that hold at any stop: quadrature, brute force, simulated error rates."""

import math

import numpy as np
import pytest
from scipy import integrate

from experiments.verdicts import claims, rows, sequential
from experiments.verdicts.sequential import list_rounds, log_evidence, reject_jointly
from rank_collapse.report.intervals import student_quantile
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

RUNS, DRAWS, SETTINGS = 2000, 200, 6


@pytest.mark.parametrize(
    "count, total", [(5, 7), (8, 8), (17, 17), (47, 64), (33, 64), (700, 1000)]
)
def test_evidence_is_the_mixture_of_likelihood_ratios(count, total):
    def ratio(p):
        return math.exp(
            (total + 1) * math.log(2) + count * math.log(p) + (total - count) * math.log1p(-p)
        )

    expected = integrate.quad(ratio, 0.5, 1, points=[count / total])[0]
    assert_close(math.exp(log_evidence(count, total)), expected, rtol=1e-9)


def test_half_of_the_draws_or_fewer_are_no_evidence_even_where_floating_point_ends():
    assert log_evidence([0, 4, 10, 600], [0, 8, 5000, 5000]).tolist() == [0.0] * 4
    evidence = log_evidence(4000, 5000)
    share = 0.8 * math.log(1.6) + 0.2 * math.log(0.4)  # nats a draw of the best share
    assert 0.99 * 5000 * share < evidence < 5000 * share


def test_unanimous_draws_decide_from_8_on_alone_and_from_11_on_among_six():
    assert [sequential.least_count(n, 0.025) <= n for n in (7, 8)] == [False, True]
    assert [sequential.least_count(n, 0.025 / 6) <= n for n in (10, 11)] == [False, True]


def test_p_values_never_rise_and_their_order_matters():
    draws = np.array([True] * 9 + [False] * 9)
    log_p = sequential.log_p_values(np.stack([draws, draws[::-1]]))
    assert (np.diff(log_p) <= 0).all() and log_p[0, -1] == log_p[0, 8] == -log_evidence(9, 9)
    assert log_p[1, -1] == 0 and sequential.log_p_values(np.zeros((3, 0))).shape == (3, 0)


def test_holm_by_hand():
    p = np.log([0.3, 0.004, 0.012, 0.013])
    for error, total, wanted in ((0.05, None, 3), (0.025, None, 1), (0.05, 12, 1), (0.05, 13, 0)):
        rejected, errors = reject_jointly(p, error, total)
        assert rejected.sum() == wanted and not rejected[0], (error, total)
        assert errors[1] == error / (total or 4)
    many = np.log(np.random.default_rng(0).uniform(size=(50, 5)))
    together = reject_jointly(many, 0.3)[0]
    for row, wanted in zip(many, together, strict=True):
        np.testing.assert_array_equal(reject_jointly(row, 0.3)[0], wanted)


def simulate_wrong(evidence_of, seed=3):
    """Simulates how often a statement is within, or outside, at some draw: (share, share) of runs.

    Args:
        evidence_of: generator → `rows.Evidence` of draws [runs, settings, draws].
        seed: Of the draws.
    """
    within, outside = evidence_of(np.random.default_rng(seed))
    # p never rises, so that what is rejected at the last draw holds what ever was
    log_p = [[sequential.log_p_values(a)[..., -1] for a in side] for side in (within, outside)]
    # as `rows.Evidence` joins them; few runs of it are compared below
    joined = np.max(log_p[0], axis=0), np.min(log_p[1], axis=0) + math.log(len(outside))
    wrong = [reject_jointly(side, claims.ERROR / 2)[0].any(axis=-1) for side in joined]
    for run in range(3):
        for setting in range(SETTINGS):
            evidence = rows.Evidence(*([a[run, setting] for a in s] for s in (within, outside)))
            expected = [joined[0][run, setting], min(0.0, joined[1][run, setting])]
            assert_close(evidence.log_p(), expected)
    return np.mean(wrong[0]), np.mean(wrong[1])


def draw_statistic(law):
    """Draws a statistic whose median is 0, [runs, settings, draws]."""
    shape = (RUNS, SETTINGS, DRAWS)
    laws = {
        "coins": lambda rng: np.where(rng.random(shape) < 0.5, 1.0, -1.0),
        "normal": lambda rng: rng.normal(size=shape),
        "lognormal": lambda rng: np.exp(rng.normal(size=shape)) - 1,
        "minus lognormal": lambda rng: 1 - np.exp(rng.normal(size=shape)),
        "heavy tails": lambda rng: rng.standard_cauchy(size=shape),
        "settings that go together": lambda rng: np.broadcast_to(
            rng.normal(size=(RUNS, 1, DRAWS)), shape
        ),
    }
    return laws[law]


@pytest.mark.full
@pytest.mark.parametrize(
    "law",
    [
        "lognormal",
        *(
            pytest.param(law, marks=pytest.mark.full)
            for law in (
                "coins",
                "normal",
                "minus lognormal",
                "heavy tails",
                "settings that go together",
            )
        ),
    ],
)
def test_at_the_border_a_run_that_may_stop_at_any_draw_is_wrong_in_2_5_percent_a_side(law):
    """A median, or a share of one half, of six settings, evaluated after each of 200 draws."""

    def evidence(rng):
        values = draw_statistic(law)(rng)
        return [values > 0], [values <= 0]

    wrong = simulate_wrong(evidence)
    assert max(wrong) <= 0.025 and min(wrong) > 0, wrong


@pytest.mark.full
@pytest.mark.parametrize("kind", ["median", "share"])
def test_claims_of_equality_at_an_end_of_their_range(kind):
    """The median lies on the upper end of ± 1; or half of the draws lie in the range."""
    half = 0.6744897501960817  # a normal draw is within ± half in half of the runs

    def evidence(rng):
        values = rng.normal(size=(RUNS, SETTINGS, DRAWS))
        if kind == "share":
            return [np.abs(values) < half], [np.abs(values) >= half]
        values += 1
        return [values > -1, values < 1], [values <= -1, values >= 1]

    wrong = simulate_wrong(evidence)
    assert max(wrong) <= 0.025, wrong


def test_intervals_at_holms_levels_hold_by_themselves_but_not_together():
    """At the true median 0, of six settings that are all decided; Bonferroni's hold together."""
    values = np.random.default_rng(7).normal(size=(400, SETTINGS, DRAWS))
    sides = (sequential.log_p_values(side)[..., -1] for side in (values > 0, values < 0))
    log_p = np.minimum(*sides)
    is_missed = log_p <= np.log(claims.ERROR / 2 / (SETTINGS - np.arange(SETTINGS)))
    assert is_missed.mean(axis=0).max() < claims.ERROR < is_missed.any(axis=1).mean()
    is_missed = log_p <= np.log(claims.ERROR / 2 / SETTINGS)
    assert is_missed.any(axis=1).mean() < claims.ERROR


@pytest.mark.parametrize("mean, low, high", [(0.3, 0.9, 0.94), (2.0, 0.94, 0.96)])
def test_students_intervals_hold_fewer_means_where_a_run_stops_when_decided(mean, low, high):
    rounds = np.array(list_rounds((8, 16, 32, 64), 128))
    draws = np.random.default_rng(8).normal(mean, 1, size=(2500, 128))
    above = np.cumsum(draws > 0, axis=1)[:, rounds - 1]
    evidence = np.maximum(log_evidence(above, rounds), log_evidence(rounds - above, rounds))
    is_decided = (evidence >= math.log(2 / claims.ERROR)) | (rounds == 128)
    is_held = []
    for place, n in enumerate(rounds):
        stops = is_decided[:, place] & ~is_decided[:, :place].any(axis=1)
        for row in draws[stops, :n]:
            error = abs(row.mean() - mean) * math.sqrt(n) / row.std(ddof=1)
            is_held.append(error <= student_quantile(int(n) - 1, 0.975))
    assert len(is_held) == len(draws) and low < np.mean(is_held) < high


def test_intervals_of_shares_hold_at_all_draws_together_and_agree_with_the_test():
    low, high = sequential.share_interval_at_any_stop(17, 64, 0.95)
    mixture = integrate.quad(lambda p: p**17 * (1 - p) ** 47, 0, 1)[0]
    for end in (low, high):
        assert mixture / (end**17 * (1 - end) ** 47) == pytest.approx(20, rel=1e-6)
    assert low < 17 / 64 < high
    assert sequential.share_interval_at_any_stop(0, 0) == (0, 1)
    none, all_of_it = (sequential.share_interval_at_any_stop(k, 30) for k in (0, 30))
    assert none.low == 0 and all_of_it.high == 1
    assert none.high == pytest.approx(1 - all_of_it.low)
    wider = sequential.share_interval_at_any_stop(17, 60, 0.95, unknown=4)
    assert wider == (low, sequential.share_interval_at_any_stop(21, 64).high)
    # what the test decides excludes one half
    for n in (8, 20, 60):
        for k in range(n + 1):
            decided = log_evidence(k, n) >= math.log(40)
            assert not decided or sequential.share_interval_at_any_stop(k, n).low > 0.5
    # in 95 % of runs they hold the share after every draw
    counts = np.cumsum(np.random.default_rng(5).random((400, 60)) < 0.3, axis=1)
    lows, highs = np.array(
        [
            [sequential.share_interval_at_any_stop(k, n) for k in range(n + 1)]
            + [(0, 1)] * (60 - n)
            for n in range(1, 61)
        ]
    ).transpose(2, 0, 1)
    places = np.arange(60), counts
    held = (lows[places] <= 0.3) & (highs[places] >= 0.3)
    assert held.all(axis=1).mean() >= 0.95
    is_refused("level=1", sequential.share_interval_at_any_stop, 1, 2, 1.0)


def test_intervals_of_medians_are_order_statistics_that_the_test_cannot_refuse():
    values = np.random.default_rng(6).lognormal(size=40)
    low, high = sequential.median_interval_at_any_stop(values)
    for m in np.sort(values):
        above, below = (log_evidence((side > 0).sum(), 40) for side in (values - m, m - values))
        is_held = max(above, below) < math.log(40)
        assert is_held == (low <= m <= high), m
    assert not sequential.median_interval_at_any_stop(values[:7]).is_finite
    assert sequential.median_interval_at_any_stop([2.0] * 8) == (2, 2)
    assert not sequential.median_interval_at_any_stop([]).is_finite
    assert sequential.median_interval_at_any_stop(values, 0.8).low > low


@pytest.mark.parametrize("present", [40, 14, 3])
def test_intervals_of_medians_hold_wherever_draws_without_a_number_lie(present):
    """A NaN counts as a draw, above every m or below it: the ends are those of both cases."""
    values = np.random.default_rng(present).lognormal(size=present)
    for unknown in (1, 5):
        numbers = np.insert(values, 2, [math.nan] * unknown)
        ends = [
            sequential.median_interval_at_any_stop([*values, *[side] * unknown])
            for side in (-math.inf, math.inf)
        ]
        interval = sequential.median_interval_at_any_stop(numbers)
        assert interval == (ends[0].low, ends[1].high)
        assert interval.is_finite == (present > 11 + unknown)


def test_rounds_double_up_to_the_budget():
    sizes = (8, 16, 32, 64, 128)
    assert list_rounds(sizes, 64) == [8, 16, 32, 64]
    assert list_rounds(sizes, 100) == [8, 16, 32, 64, 100]
    assert list_rounds(sizes, 600) == [*sizes, 256, 512, 600]
    assert list_rounds(sizes, 512) == [*sizes, 256, 512] and list_rounds((8, 20), 40) == [8, 20, 40]
    assert list_rounds(sizes, 4) == [4] and list_rounds(sizes, 8) == [8]


def test_so_many_draws_of_a_share_decide():
    for share in (1.0, 0.9, 0.6):
        count = sequential.draws_to_decide(share, 0.025)
        assert log_evidence(share * count, count) >= math.log(40)
        assert log_evidence(share * count * 0.95 - 1, count * 0.95 - 1) < math.log(40)
    assert sequential.draws_to_decide(0.5, 0.025) is None
    assert sequential.draws_to_decide(1.0, 0.025) == 8  # of the numbers that are tried


def test_fewer_hypotheses_than_there_are_are_not_believed():
    log_p = np.log([0.01, 0.02, 0.03])
    for rejected, expected in zip(
        sequential.reject_jointly(log_p, 0.05, 1),
        sequential.reject_jointly(log_p, 0.05),
        strict=True,
    ):
        np.testing.assert_array_equal(rejected, expected)


def test_rounds_double_behind_the_registered_ones_alone():
    assert sequential.list_rounds((8, 64), 60) == [8, 60]
    assert sequential.list_rounds((8, 64), 300) == [8, 64, 128, 256, 300]
    assert sequential.list_rounds((8, 64), 8) == [8]
