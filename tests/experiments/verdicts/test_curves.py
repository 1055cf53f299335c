"""A curve among draws: its test, its power and its error rate."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.verdicts import claims, curves
from experiments.verdicts.claims import FAILS, SOME_FAIL
from tests.oracles.verdict_rows import compute_answer, make_statement

CURVES_AGREE = make_statement((0.05, math.inf), tests_claim=True)


def judge_curves(curve_rows):
    return [j.verdict for j in claims.judge_rows(curve_rows, CURVES_AGREE)]


def test_a_curve_among_draws():
    rng = np.random.default_rng(1)
    draws = rng.normal(size=(20, 5)).cumsum(axis=1)

    def make_curve_row(*arguments):
        return curves.curve_row("key", "here", *arguments)

    def compute_verdict(row):
        return judge_curves([row])[0]

    assert compute_verdict(make_curve_row(rng.normal(size=5).cumsum(), draws)) == "not rejected"
    apart = draws.mean(axis=0) + np.array([0, 0, 0, 30, 0])
    row = make_curve_row(apart, draws)
    assert compute_verdict(row) == "outside" and "p = 0.048 with 20 draws" in row.note
    assert row.estimate == row.p == pytest.approx(1 / 21) and not row.interval(0.95).is_finite
    # the smallest p of 20 draws decides nothing among 12 curves; that of 240 draws does
    assert {*judge_curves([row] * 12)} == {"undecided"}
    (alone,) = claims.judge_rows([row], CURVES_AGREE, num_rows=12)  # the others are elsewhere
    assert alone.verdict == "undecided"
    many = rng.normal(size=(240, 5)).cumsum(axis=1)
    assert {*judge_curves([make_curve_row(apart, many)] * 12)} == {"outside"}
    assert compute_verdict(make_curve_row(apart, draws[:18])) == "undecided"
    assert compute_verdict(make_curve_row(apart, draws[:0])) == "not measured"
    # values read off a figure have a resolution; a curve within it is not apart
    flat = np.zeros((20, 5))
    assert compute_verdict(make_curve_row(np.full(5, 1e-4), flat)) == "outside"
    assert compute_verdict(make_curve_row(np.zeros(5), flat, 1e-3)) == "not rejected"
    assert compute_verdict(make_curve_row(np.full(5, 1e-4), flat, 1e-3)) == "not rejected"
    assert compute_verdict(make_curve_row(np.full(5, -1e-4), flat, 1e-3)) == "not rejected"
    # 19 draws are the fewest that decide at 5 %
    assert compute_verdict(make_curve_row(apart, draws[:19])) == "outside"
    assert compute_verdict(make_curve_row(draws[3], draws[:19])) == "not rejected"
    # of two draws each has one other, beside which nothing can be rejected: no power is shown
    assert make_curve_row(apart, draws[:2]).note == "p = 0.33 with 2 draws"
    assert "it would reject" in make_curve_row(apart, draws[:3]).note
    # draws that are as far as the curve count as farther
    tied = make_curve_row(np.ones(1), np.repeat([-1.0, 1.0], [10, 9])[:, None])
    assert tied.note.startswith("p = 1 with 19 draws")


def p_value_of(curve, draws):
    """Computes the p-value by its definition: the rank of the distance, and Hill's tail."""
    curves_of = np.vstack([curve, draws])
    mean = curves_of.sum(axis=0) / len(curves_of)
    spread = np.sqrt(((curves_of - mean) ** 2).sum(axis=0) / (len(curves_of) - 1))
    distance, *others = (np.abs(curves_of - mean) / spread).max(axis=1)
    n, k = len(draws), max(1, len(draws) // 10)
    p = (1 + sum(other >= distance for other in others)) / (n + 1)
    farthest = sorted(others, reverse=True)
    if distance > farthest[k]:
        total = sum(math.log(d / farthest[k]) for d in farthest[:k])
        p = max(p, (k + 1) / (n + 1) * (1 + math.log(distance / farthest[k]) / total) ** -k)
    return p


@pytest.mark.parametrize("count", [3, 12, 25, 47])
def test_the_p_value_and_the_power_are_those_of_their_definitions(count):
    rng = np.random.default_rng(count)
    draws = rng.normal(size=(count, 4)) * [1.0, 2.0, 0.5, 1.0]
    for times in (0.5, 2.0, 4.0, 9.0):
        curve = draws.mean(axis=0) + times * rng.normal(size=4)
        assert curves.curve_p_value(curve, draws) == pytest.approx(p_value_of(curve, draws))
    deviations = np.sqrt(((draws - draws.mean(axis=0)) ** 2).sum(axis=0) / (count - 1))
    for shift in (1, 3):
        rejected = [
            p_value_of(draws[i] + shift * deviations, np.delete(draws, i, axis=0)) <= 0.05
            for i in range(count)
        ]
        assert curves.measure_power(draws, shift, 0.05) == pytest.approx(np.mean(rejected))


@pytest.mark.parametrize("count", [31, 54])
def test_the_p_value_has_the_tail_of_a_tenth_of_the_draws(count):
    """Where neither the rank of the distance nor the limit of 1 decides."""
    draws = np.random.default_rng(count).normal(size=(count, 4))
    for times in np.arange(2.0, 4.0, 0.1):
        curve = draws.mean(axis=0) + times * draws.std(axis=0) * [1, 0, 0, 0]
        assert curves.curve_p_value(curve, draws) == pytest.approx(p_value_of(curve, draws))


def test_curves_that_agree_are_not_rejected_and_do_not_hold():
    rng = np.random.default_rng(7)
    draws = rng.normal(size=(60, 4)).cumsum(axis=1)
    agreeing = curves.curve_row("key", "a", draws[0], draws[1:])
    fields = {"claimed": (0.05, math.inf), "tests_claim": True}
    answer = compute_answer(agreeing, **fields)
    assert answer.answer == "not rejected" and claims.count_answers([answer])["not rejected"] == 1
    apart = curves.curve_row("key", "b", draws.mean(axis=0) + 30, draws)
    assert compute_answer(agreeing, apart, **fields).answer == SOME_FAIL
    assert compute_answer(apart, **fields).answer == FAILS
    fields |= {"settings": ("a", "c"), "is_registered": True}
    partial = compute_answer(agreeing, **fields)
    assert [j.verdict for j in partial.rows] == ["not rejected", "not measured"]


def test_the_power_of_the_test_of_curves_is_that_of_fresh_draws():
    """Beside independent curves of the same law, moved by as many deviations."""
    rng = np.random.default_rng(8)
    draws = rng.normal(size=(60, 1)) + 0.3 * rng.normal(size=(60, 4))
    powers = [curves.measure_power(draws, shift, 0.05) for shift in (0, 2, 4)]
    assert powers[0] <= 0.1 and powers == sorted(powers) and powers[2] > 0.7
    spread = draws.std(axis=0, ddof=1)
    fresh = rng.normal(size=(60, 1)) + 0.3 * rng.normal(size=(60, 4))
    rejected = [curves.curve_p_value(c + 2 * spread, draws) <= 0.05 for c in fresh]
    assert np.mean(rejected) == pytest.approx(powers[1], abs=0.2)
    note = curves.curve_row("key", "", draws[0], draws[1:]).note
    assert "at 5 % it would reject" in note and "moved by 3 deviations" in note


def test_the_note_on_the_power_names_the_level_of_the_rejections(monkeypatch):
    monkeypatch.setattr(curves, "ERROR", 0.2)
    draws = np.random.default_rng(9).normal(size=(25, 4))
    powers = [round(100 * curves.measure_power(draws, shift, 0.2)) for shift in (1, 2, 3)]
    assert powers != [round(100 * curves.measure_power(draws, shift, 0.05)) for shift in (1, 2, 3)]
    note = curves.curve_row("key", "", draws[0], draws).note
    wanted = ", ".join(f"{power} % of those moved by {i + 1}" for i, power in enumerate(powers))
    assert note.endswith(f"; at 20 % it would reject {wanted} deviations")


CURVES = {  # laws of 240 draws and one more, by layer
    "walks": lambda rng: 0.5 + 0.02 * rng.normal(size=(241, 6)).cumsum(axis=1),
    "heavy tails": lambda rng: 0.5 + 0.02 * rng.standard_t(3, size=(241, 6)).cumsum(axis=1),
    "skew": lambda rng: np.exp(rng.normal(size=(241, 1))) * np.linspace(0.5, 0.2, 6),
    "finer than the figure": lambda rng: 0.002 + 1.7e-4 * rng.normal(size=(241, 6)),
}


@pytest.mark.parametrize("law", CURVES)
def test_chance_and_reading_off_refuse_one_of_twelve_curves_in_one_run_of_twenty_at_most(law):
    """Twelve curves have the law of their draws, and are read off a figure to 1e-3."""
    rng, runs, num_refused, resolution = np.random.default_rng(2), 40, 0, 1e-3
    for _ in range(runs):
        curve_rows = []
        for _ in range(12):
            curve, *draws = CURVES[law](rng)
            read = curve + resolution * rng.uniform(-1, 1, curve.shape)
            p = curves.curve_p_value(read, np.array(draws), resolution)
            curve_rows.append(curves.make_curve_row("key", "", p, len(draws)))
        num_refused += "outside" in judge_curves(curve_rows)
    assert stats.binomtest(num_refused, runs, 0.05, alternative="greater").pvalue > 1e-3


def test_no_place_among_240_draws_refuses_one_of_twelve_curves_by_itself():
    """A curve just farther than all draws has the least p of places, 1/241 < 5 %/12."""
    draws = np.random.default_rng(3).normal(size=(240, 1))
    farthest = np.abs(draws - draws.mean()).max()
    for times, expected in ((1.02, "not rejected"), (2.0, "outside")):
        row = curves.curve_row("key", "", draws.mean(axis=0) + times * farthest, draws)
        assert {*judge_curves([row] * 12)} == {expected}
