"""Rows of draws of every kind, and the verdicts that they give."""

import math

import pytest
from scipy import stats

from experiments.verdicts import claims, rows
from experiments.verdicts.claims import MUST_HOLD
from tests.oracles.verdict_rows import compute_answer, compute_verdict, make_median_row

MORE_THAN_HALF = (0.5, math.inf)


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


def test_cases_against_what_must_hold_are_counted():
    row = rows.cases_row("key", "here", 0, 0, 8)
    assert "no case" in row.note and row.draws == 0
    counts = [rows.cases_row("key", str(n), n, 1000, 8) for n in (0, 1)]
    answer = compute_answer(*counts, claimed=None, test="tests/a.py::test_b")
    assert answer.answer == MUST_HOLD and sum(claims.count_answers([answer]).values()) == 0
