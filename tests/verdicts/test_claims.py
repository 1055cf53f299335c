"""Verdicts and answers of statements: rows, joint intervals beside scipy's, few draws, curves."""

import itertools
import math

import numpy as np
import pytest
from refusals import is_refused
from scipy import stats

from experiments.verdicts import claims
from experiments.verdicts.claims import (
    FAILS,
    FINDING,
    HOLDS,
    IN_PART,
    MUST_HOLD,
    OPEN,
    SOME_FAIL,
    Statement,
)

ABOVE = (0.0, math.inf)
MORE_THAN_HALF = (0.5, math.inf)


def compute_verdict(row, claimed=ABOVE):
    (judged,) = claims.judge_rows([row], claimed)
    return judged.verdict


def make_mean_row(values, setting="here"):
    return claims.mean_row("key", setting, values)


def compute_answer(*rows, claimed=ABOVE, **fields):
    statement = Statement("Section 1", "It is so.", "x", claimed, **fields)
    return claims.answer_statement("key", statement, rows)


UP, DOWN, BOTH = [1.0, 1.2, 0.9], [-1.0, -1.2, -0.9], [1.0, -1.2, 0.9]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (UP, "within"),
        (DOWN, "outside"),
        (BOTH, "undecided"),
        ([1.0, 1.0, 1.0], "undecided"),  # equal draws do not say how much others differ
        ([0.0, 0.0, 0.0], "undecided"),
        ([5.0, 5.1], "undecided"),  # too few
        ([], "undecided"),
    ],
)
def test_a_mean_above_zero(values, wanted):
    assert compute_verdict(make_mean_row(values)) == wanted and make_mean_row(values).draws == len(
        values
    )


def test_a_mean_in_a_range_and_draws_without_a_number():
    near = [2.99, 3.0, 3.02]
    assert compute_verdict(make_mean_row(near), (2.5, 3.5)) == "within"
    assert compute_verdict(make_mean_row(near), (3.5, 4.5)) == "outside"
    row = make_mean_row([*near, None, math.nan])
    assert row.draws == 3 and "2 of 5 draws have no number" in row.note
    doubled = claims.mean_row("key", "here", near, scale=lambda v: 2 * v)
    np.testing.assert_allclose(
        doubled.interval(0.95), np.multiply(make_mean_row(near).interval(0.95), 2)
    )
    assert doubled.estimate == pytest.approx(6.00667, abs=1e-4)


def test_shares():
    half = (0.5, math.inf)
    for count, total, expected in (
        (60, 64, "within"),
        (16, 64, "outside"),
        (30, 64, "undecided"),
        (2, 2, "undecided"),
        (4, 4, "undecided"),
        (5, 5, "within"),
    ):
        assert compute_verdict(claims.share_row("key", "here", count, total), half) == expected


def test_the_share_of_draws_in_a_range():
    def make_share_row(values, bounds=(0.1, math.inf)):
        return claims.share_within_row("key", "here", values, bounds)

    half = MORE_THAN_HALF
    assert compute_verdict(make_share_row([0.7] * 8), half) == "within"
    assert compute_verdict(make_share_row([0.01] * 8), half) == "outside"
    assert compute_verdict(make_share_row([0.1] * 8), half) == "outside"  # the range is open
    assert compute_verdict(make_share_row([0.7] * 3), half) == "undecided"
    assert compute_verdict(make_share_row([math.inf, -math.inf] * 4), half) == "undecided"
    row = make_share_row([0.7] * 7 + [0.0])
    assert row.estimate == 7 / 8 and row.note == "7 of 8; values 0 to 0.7"
    expected = stats.binomtest(7, 8).proportion_ci(0.95, method="wilson")
    assert row.interval(0.95) == pytest.approx(tuple(expected))
    # a draw without a number may be on either side
    unknown = make_share_row([0.7] * 7 + [None])
    assert unknown.estimate == 1 and "1 of 8 draws have no number" in unknown.note
    all_of_it = stats.binomtest(8, 8).proportion_ci(0.95, method="wilson")
    assert unknown.interval(0.95) == pytest.approx((expected.low, all_of_it.high))
    lost = make_share_row([0.7] * 6 + [math.nan] * 12)
    assert compute_verdict(lost, half) == "undecided" and lost.draws == 6
    assert (
        make_share_row([None] * 8).estimate is None
        and compute_verdict(make_share_row([None] * 8), half) == "undecided"
    )


def test_cases_against_what_must_hold_are_counted():
    below_one = (-math.inf, 0.5)
    for count, total, draws, expected in (
        (0, 1000, 8, "within"),
        (1, 1000, 8, "outside"),
        (0, 1000, 2, "undecided"),
        (0, 0, 8, "undecided"),
    ):
        row = claims.cases_row("key", "here", count, total, draws)
        assert compute_verdict(row, below_one) == expected
    assert "no case" in row.note
    rows = [claims.cases_row("key", str(n), n, 1000, 8) for n in (0, 1)]
    answer = compute_answer(*rows, claimed=None, test="tests/a.py::test_b")
    assert answer.answer == MUST_HOLD and sum(claims.count_answers([answer]).values()) == 0


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([UP, UP], HOLDS),
        ([UP, UP, DOWN], IN_PART),
        ([UP, UP, BOTH], IN_PART),
        ([UP, DOWN], SOME_FAIL),  # one row is no part
        ([UP, BOTH], OPEN),
        ([DOWN, BOTH], SOME_FAIL),  # what is undecided may hold
        ([DOWN, BOTH, UP], SOME_FAIL),
        ([DOWN, DOWN], FAILS),
        ([BOTH, BOTH], OPEN),
        ([UP[:2]], OPEN),
    ],
)
def test_the_five_answers(rows, wanted):
    # twelve draws each, so that a row is as clear among several as it is alone
    answer = compute_answer(
        *(
            make_mean_row(np.tile(v, 4), str(i)) if len(v) > 2 else make_mean_row(v, str(i))
            for i, v in enumerate(rows)
        )
    )
    assert answer.answer == wanted
    finding = compute_answer(*(make_mean_row(v) for v in rows), claimed=None)
    assert finding.answer == FINDING
    assert claims.count_answers([answer, finding])[wanted] == 1
    assert sum(claims.count_answers([answer, finding]).values()) == 1


def test_intervals_are_joint_by_holms_procedure():
    """Compares with one-sided tests, the smallest p first, at 2.5 %/(number of tests left)."""
    rng = np.random.default_rng(0)
    for trial in range(20):
        draws = rng.normal(rng.normal(size=6)[:, None], 1.0, size=(6, 5))
        judged_rows = claims.judge_rows([make_mean_row(v) for v in draws], ABOVE)
        for side, expected in (("greater", "within"), ("less", "outside")):
            p = np.array([stats.ttest_1samp(v, 0, alternative=side).pvalue for v in draws])
            rejected, order = np.zeros(6, bool), np.argsort(p)
            for place, index in enumerate(order):
                if p[index] > 0.025 / (6 - place):
                    break
                rejected[index] = True
            assert [j.verdict == expected for j in judged_rows] == rejected.tolist(), trial
    # a row that is decided alone is undecided among nine rows of noise
    weak, noise = [0.6, 1.2, 0.9, 0.7], [1.0, -1.0, 0.5, -0.5]
    assert compute_verdict(make_mean_row(weak)) == "within"
    many = claims.judge_rows([make_mean_row(weak), *([make_mean_row(noise)] * 9)], ABOVE)
    assert many[0].verdict == "undecided"
    assert many[0].interval == pytest.approx(make_mean_row(weak).interval(0.995))


RUNS = 1000


def has_wrong_verdict(judged_rows):
    """Says whether a row has a wrong verdict, where the truth of every row is the border.

    "within" is wrong for rows 0, 2, .., and "outside" for the others.
    """
    return any(j.verdict == ("within", "outside")[i % 2] for i, j in enumerate(judged_rows))


@pytest.mark.parametrize("draws", [3, 8, 20])
@pytest.mark.parametrize("rows", [1, 2])
def test_shares_whose_truth_is_one_half_are_wrong_in_at_most_a_twentieth(rows, draws):
    """Sums the probabilities of all counts that rows may have, without draws."""
    share_rows = [claims.share_row("", "", count, draws) for count in range(draws + 1)]
    weights = stats.binom.pmf(np.arange(draws + 1), draws, 0.5)
    chance = sum(
        np.prod(weights[list(counts)])
        for counts in itertools.product(range(draws + 1), repeat=rows)
        if has_wrong_verdict(claims.judge_rows([share_rows[k] for k in counts], MORE_THAN_HALF))
    )
    assert chance <= 0.05 and (draws < claims.FEWEST_OF_SHARE) == (chance == 0)


def test_a_curve_among_draws():
    rng = np.random.default_rng(1)
    draws = rng.normal(size=(20, 5)).cumsum(axis=1)

    def make_curve_row(*arguments):
        return claims.curve_row("key", "here", *arguments)

    assert compute_verdict(make_curve_row(rng.normal(size=5).cumsum(), draws)) == "within"
    apart = draws.mean(axis=0) + np.array([0, 0, 0, 30, 0])
    row = make_curve_row(apart, draws)
    assert compute_verdict(row) == "outside" and "p = 0.048 with 20 draws" in row.note
    # the smallest p of 20 draws decides nothing among 12 curves; that of 240 draws does
    twelve = claims.judge_rows([row] * 12, ABOVE)
    assert {j.verdict for j in twelve} == {"undecided"} and not twelve[0].interval.is_finite
    many = rng.normal(size=(240, 5)).cumsum(axis=1)
    assert {j.verdict for j in claims.judge_rows([make_curve_row(apart, many)] * 12, ABOVE)} == {
        "outside"
    }
    assert compute_verdict(make_curve_row(apart, draws[:18])) == "undecided"
    assert compute_verdict(make_curve_row(apart, draws[:0])) == "undecided"
    # values read off a figure have a resolution; a curve within it is not apart
    flat = np.zeros((20, 5))
    assert compute_verdict(make_curve_row(np.full(5, 1e-4), flat)) == "outside"
    assert compute_verdict(make_curve_row(np.zeros(5), flat, 1e-3)) == "within"
    # draws that are as far as the curve count as farther
    tied = make_curve_row(np.ones(1), np.repeat([-1.0, 1.0], [10, 9])[:, None])
    assert tied.note == "p = 1 with 19 draws"


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
        rows = []
        for _ in range(12):
            curve, *draws = CURVES[law](rng)
            read = curve + resolution * rng.uniform(-1, 1, curve.shape)
            rows.append(claims.curve_row("key", "", read, draws, resolution))
        num_refused += any(j.verdict == "outside" for j in claims.judge_rows(rows, ABOVE))
    assert stats.binomtest(num_refused, runs, 0.05, alternative="greater").pvalue > 1e-3


def test_no_place_among_240_draws_refuses_one_of_twelve_curves_by_itself():
    """A curve just farther than all draws has the least p of places, 1/241 < 5 %/12."""
    draws = np.random.default_rng(3).normal(size=(240, 1))
    farthest = np.abs(draws - draws.mean()).max()
    for times, expected in ((1.02, "within"), (2.0, "outside")):
        row = claims.curve_row("key", "", draws.mean(axis=0) + times * farthest, draws)
        assert {j.verdict for j in claims.judge_rows([row] * 12, ABOVE)} == {expected}


def test_a_row_of_no_statement_is_refused():
    is_refused(
        "'key' is not one of the statements", claims.answer_statements, {}, [make_mean_row(UP)]
    )


@pytest.mark.parametrize("draws", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (8, 20))])
@pytest.mark.parametrize("rows", [1, 3])
def test_at_most_one_run_in_twenty_has_a_wrong_verdict(rows, draws):
    """The rows are means that depend on each other; runs are drawn."""
    rng, count = np.random.default_rng(draws), 0
    for common, independent in zip(
        rng.normal(size=(RUNS, 1, draws)), rng.normal(size=(RUNS, rows, draws)), strict=True
    ):
        count += has_wrong_verdict(
            claims.judge_rows([make_mean_row(v) for v in 0.7 * common + 0.7 * independent], ABOVE)
        )
    assert stats.binomtest(count, RUNS, 0.05, alternative="greater").pvalue > 1e-3
