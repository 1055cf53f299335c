"""Verdicts and answers of statements: rows of every kind, joint verdicts, missing rows, curves."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.verdicts import claims, curves, rows
from experiments.verdicts.claims import (
    FAILS,
    FINDING,
    HOLDS,
    IN_PART,
    MUST_HOLD,
    OPEN,
    SOME_FAIL,
)
from experiments.verdicts.sequential import least_count
from tests.oracles.verdict_rows import (
    compute_answer,
    compute_verdict,
    make_median_row,
    make_statement,
)
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

MORE_THAN_HALF = (0.5, math.inf)


CURVES_AGREE = make_statement((0.05, math.inf), tests_claim=True)


UP, DOWN, BOTH = [1.0, 1.2, 0.9] * 4, [-1.0, -1.2, -0.9] * 4, [1.0, -1.2, 0.9, -0.8] * 3


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (UP, "within"),
        (DOWN, "outside"),
        (BOTH, "undecided"),
        ([1.0] * 8, "within"),  # draws that all agree decide
        ([0.0] * 8, "outside"),  # the range is open
        ([0.0] * 7 + [-1.4], "outside"),
        ([5.0] * 7, "undecided"),  # too few
        ([0.1] * 12 + [-1e9], "within"),  # one draw moves a mean, not a median
        ([], "not measured"),
    ],
)
def test_a_median_above_zero(values, wanted):
    row = make_median_row(values)
    assert compute_verdict(row) == wanted and row.draws == len(values)


def test_a_median_that_is_to_be_the_same_is_refused_on_both_sides():
    near = np.linspace(2.9, 3.1, 12)
    for claimed, wanted in (
        ((2.5, 3.5), "within"),
        ((3.5, 4.5), "outside"),
        ((1.5, 2.5), "outside"),
        ((2.5, 3.0), "undecided"),
        ((2.5, math.inf), "within"),
    ):
        assert compute_verdict(make_median_row(near, claimed=claimed), claimed) == wanted, claimed
    halves = [0.0, 6.0] * 20  # the median may be in between, or not
    assert compute_verdict(make_median_row(halves, claimed=(2, 4)), (2, 4)) == "undecided"
    row = make_median_row([*near, None, math.nan], claimed=(2.5, 3.5))
    assert row.draws == 12 and row.num_made == 14 and "2 of 14 draws have no number" in row.note
    doubled = rows.median_row("key", "here", near, (5.5, 6.5), scale=lambda v: 2 * v)
    assert_close(doubled.interval(0.95), np.multiply(make_median_row(near).interval(0.95), 2))
    assert doubled.estimate == pytest.approx(6) and compute_verdict(doubled, (5.5, 6.5)) == "within"


def test_draws_without_a_number_speak_for_neither_side():
    for unknown, wanted in ((0, "within"), (1, "within"), (8, "undecided")):
        values = [math.nan] * unknown + [1.0] * 14
        assert compute_verdict(make_median_row(values)) == wanted, unknown
        row = rows.share_within_row("key", "here", values, (0.5, 2.0))
        assert compute_verdict(row, MORE_THAN_HALF) == wanted, unknown


def test_means_of_findings_have_students_interval():
    row = rows.mean_row("key", "here", [1.0, 2.0, 4.0, None])
    ends = stats.ttest_1samp([1.0, 2.0, 4.0], 0).confidence_interval(0.9)
    assert row.interval(0.9) == pytest.approx(tuple(ends)) and row.draws == 3
    assert "1 of 4 draws have no number" in row.note and row.evidence is None
    equal = rows.mean_row("key", "here", [2.0] * 3)
    assert not equal.interval(0.95).is_finite and "all draws are equal" in equal.note


def test_the_share_of_draws_in_a_range():
    def make_share_row(values, bounds=(0.1, math.inf)):
        return rows.share_within_row("key", "here", values, bounds)

    half = MORE_THAN_HALF
    assert compute_verdict(make_share_row([0.7] * 8), half) == "within"
    assert compute_verdict(make_share_row([0.01] * 8), half) == "outside"
    assert compute_verdict(make_share_row([0.1] * 8), half) == "outside"  # the range is open
    assert compute_verdict(make_share_row([0.7] * 7), half) == "undecided"
    assert compute_verdict(make_share_row([math.inf, -math.inf] * 4), half) == "undecided"
    row = make_share_row([0.7] * 7 + [0.0])
    assert row.estimate == 7 / 8 and row.note == "7 of 8; values 0 to 0.7"
    unknown = make_share_row([0.7] * 7 + [None])
    assert unknown.estimate == 1 and "1 of 8 draws have no number" in unknown.note
    assert unknown.interval(0.95).low == row.interval(0.95).low
    assert unknown.interval(0.95).high == 1
    assert make_share_row([None] * 8).estimate is None
    assert compute_verdict(make_share_row([None] * 8), half) == "undecided"


def test_a_verdict_once_reached_stays_whatever_comes_later():
    first = [1.0] * 9
    for later in range(0, 40, 5):
        assert compute_verdict(make_median_row(first + [-1.0] * later)) in ("within", "outside")
    assert compute_verdict(make_median_row(first + [-1.0] * 5)) == "within"
    assert compute_verdict(make_median_row(first + [-1.0] * 200)) == "outside"  # stronger evidence


def test_cases_against_what_must_hold_are_counted():
    row = rows.cases_row("key", "here", 0, 0, 8)
    assert "no case" in row.note and row.draws == 0
    counts = [rows.cases_row("key", str(n), n, 1000, 8) for n in (0, 1)]
    answer = compute_answer(*counts, claimed=None, test="tests/a.py::test_b")
    assert answer.answer == MUST_HOLD and sum(claims.count_answers([answer]).values()) == 0


@pytest.mark.parametrize(
    ("draws", "wanted"),
    [
        ([UP, UP], HOLDS),
        ([UP, UP, DOWN], IN_PART),
        ([UP, UP, BOTH], OPEN),
        ([UP, DOWN], IN_PART),
        ([UP, UP, *[DOWN] * 8], IN_PART),  # counts say that two of ten are no support
        ([UP, BOTH], OPEN),
        ([DOWN, BOTH], SOME_FAIL),  # what is undecided may hold
        ([DOWN, BOTH, UP], IN_PART),
        ([DOWN, DOWN], FAILS),
        ([BOTH, BOTH], OPEN),
        ([UP[:2]], OPEN),
    ],
)
def test_the_answers(draws, wanted):
    values = [np.tile(v, 2) if len(v) > 2 else v for v in draws]
    answer = compute_answer(*(make_median_row(v, str(i)) for i, v in enumerate(values)))
    assert answer.answer == wanted
    assert answer.in_words == (f"open after {len(values[-1])}" if wanted == OPEN else wanted)
    finding = compute_answer(*(rows.mean_row("key", "", v) for v in values), claimed=None)
    assert finding.answer == FINDING
    assert claims.count_answers([answer, finding])[wanted] == 1
    assert sum(claims.count_answers([answer, finding]).values()) == 1


def test_a_registered_row_cannot_vanish():
    """Without its deepest setting a statement is not answered by the others."""
    settings = ("16 loops", "64 loops")
    measured = make_median_row(UP, "16 loops")
    answer = compute_answer(measured, settings=settings, is_registered=True)
    assert [j.verdict for j in answer.rows] == ["within", "not measured"]
    assert answer.answer == answer.in_words == OPEN and answer.rows[1].row.setting == "64 loops"
    # two rows are judged together, though one is not there
    eight = make_median_row([1.0] * 8, "16 loops")
    assert compute_answer(eight, settings=settings).answer == HOLDS
    joint = compute_answer(eight, settings=settings, is_registered=True)
    assert joint.rows[0].verdict == "undecided" and joint.in_words == "open after 8"


def test_rows_are_judged_jointly_by_holms_procedure():
    """Compares with the least counts at 2.5 %/(number of rows left)."""
    rng = np.random.default_rng(0)
    for trial in range(20):
        shares = rng.uniform(0.1, 0.9, size=(6, 1))
        draws = np.where(rng.random((6, 30)) < shares, 1.0, -1.0)
        judged_rows = claims.judge_rows([make_median_row(v) for v in draws], make_statement())
        for sign, expected in ((1, "within"), (-1, "outside")):
            log_p = np.array([make_median_row(sign * v).evidence.log_p()[0] for v in draws])
            rejected = np.zeros(6, bool)
            for place, index in enumerate(np.argsort(log_p)):
                if log_p[index] > math.log(0.025 / (6 - place)):
                    break
                rejected[index] = True
            assert [j.verdict == expected for j in judged_rows] == rejected.tolist(), trial
    # a row that is decided alone is undecided among nine rows of noise
    weak, noise = [0.6] * least_count(8, 0.025), [1.0, -1.0] * 4
    assert compute_verdict(make_median_row(weak)) == "within"
    nine = [make_median_row(noise)] * 9
    many = claims.judge_rows([make_median_row(weak), *nine], make_statement())
    assert many[0].verdict == "undecided"
    assert many[0].interval == make_median_row(weak).interval(0.995)
    alone = claims.judge_rows([make_median_row(weak)], make_statement(), num_rows=10)
    assert alone[0].verdict == "undecided"  # the others are judged elsewhere


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
    many = rng.normal(size=(240, 5)).cumsum(axis=1)
    assert {*judge_curves([make_curve_row(apart, many)] * 12)} == {"outside"}
    assert compute_verdict(make_curve_row(apart, draws[:18])) == "undecided"
    assert compute_verdict(make_curve_row(apart, draws[:0])) == "not measured"
    # values read off a figure have a resolution; a curve within it is not apart
    flat = np.zeros((20, 5))
    assert compute_verdict(make_curve_row(np.full(5, 1e-4), flat)) == "outside"
    assert compute_verdict(make_curve_row(np.zeros(5), flat, 1e-3)) == "not rejected"
    # draws that are as far as the curve count as farther
    tied = make_curve_row(np.ones(1), np.repeat([-1.0, 1.0], [10, 9])[:, None])
    assert tied.note.startswith("p = 1 with 19 draws")


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


def test_the_power_of_the_test_of_curves_is_that_of_fresh_draws():
    """Beside independent curves of the same law, moved by as many deviations."""
    rng = np.random.default_rng(8)
    draws = rng.normal(size=(60, 1)) + 0.3 * rng.normal(size=(60, 4))
    powers = [curves.measure_power(draws, shift) for shift in (0, 2, 4)]
    assert powers[0] <= 0.1 and powers == sorted(powers) and powers[2] > 0.7
    spread = draws.std(axis=0, ddof=1)
    fresh = rng.normal(size=(60, 1)) + 0.3 * rng.normal(size=(60, 4))
    rejected = [curves.curve_p_value(c + 2 * spread, draws) <= 0.05 for c in fresh]
    assert np.mean(rejected) == pytest.approx(powers[1], abs=0.2)
    note = curves.curve_row("key", "", draws[0], draws[1:]).note
    assert "at 5 % it would reject" in note and "moved by 3 deviations" in note


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


def test_a_row_of_no_statement_is_refused():
    row = make_median_row(UP)
    is_refused("'key' is not one of the statements", claims.answer_statements, {}, [row])
