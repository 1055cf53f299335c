"""Rows of draws of every kind, and the verdicts that they give."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.verdicts import claims, rows
from experiments.verdicts.claims import MUST_HOLD
from experiments.verdicts.sequential import (
    draws_to_decide,
    median_interval_at_any_stop,
    share_interval_at_any_stop,
)
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
    assert (counts[1].estimate, counts[1].num_made, counts[1].draws) == (1.0, 8, 8)
    assert counts[1].interval(0.5) == (1, 1) and counts[1].note == "of 1000 cases"


def test_the_mean_of_a_scale_is_that_of_the_mean():
    """Of an increasing function: the mean is taken first, and its ends after it."""
    row = rows.mean_row("key", "here", [1.0, 2.0, 4.0], scale=math.exp, note="a note")
    low, high = stats.t.interval(0.95, 2, 7 / 3, stats.sem([1.0, 2.0, 4.0]))
    assert row.estimate == pytest.approx(math.exp(7 / 3))
    assert row.interval(0.95) == pytest.approx((math.exp(low), math.exp(high)))
    assert row.note == "a note" and row.num_made == 3
    assert not rows.mean_row("key", "here", [1.0], scale=math.exp).interval(0.95).is_finite
    empty = rows.mean_row("key", "here", [None, math.inf])
    assert (empty.draws, empty.estimate, empty.num_made) == (0, None, 2)
    assert empty.note == "2 of 2 draws have no number"


def test_a_value_on_either_end_is_outside_an_open_range():
    values, claimed = [0.0, 0.5, 1.0, 1.5, math.nan, None], (0.0, 1.0)
    row = rows.median_row("key", "here", values, claimed, scale=lambda v: v, note="a note")
    within, outside = row.evidence
    assert [side.tolist() for side in within] == [
        [False, True, True, True, False, False],
        [True, True, False, False, False, False],
    ]
    assert [side.tolist() for side in outside] == [
        [True, False, False, False, False, False],
        [False, False, True, True, False, False],
    ]
    assert (row.estimate, row.draws, row.num_made) == (0.75, 4, 6)
    assert row.note == "values 0 to 1.5; a note; 2 of 6 draws have no number"
    skewed = rows.median_row("key", "here", [0.0, 1.0, 8.0], claimed, scale=lambda v: 2 * v)
    assert skewed.estimate == 2 and skewed.note == "values 0 to 16"
    share = rows.share_within_row("key", "here", values, claimed)
    assert [side.tolist() for (side,) in share.evidence] == [
        [False, True, False, False, False, False],
        [True, False, True, True, False, False],
    ]
    assert (share.estimate, share.draws, share.num_made) == (0.25, 4, 6)


def test_an_interval_holds_after_every_draw():
    """It is the part that the intervals after all draws have in common."""
    values = [3.0] * 10 + [1.0, 1.0, 1.0, 5.0, math.nan, 2.0]
    row = make_median_row(values)
    ends = [median_interval_at_any_stop(values[: n + 1], 0.9) for n in range(len(values))]
    lows, highs = zip(*ends, strict=True)
    assert row.interval(0.9) == (max(lows), min(highs)) and ends[-1] != row.interval(0.9)
    share = rows.share_within_row("key", "here", values, (2.5, 4.0))
    ends, unknown = [], 0
    for n in range(1, len(values) + 1):
        unknown = sum(math.isnan(v) for v in values[:n])
        count = sum(2.5 < v < 4.0 for v in values[:n])
        ends.append(share_interval_at_any_stop(count, n - unknown, 0.9, unknown=unknown))
    lows, highs = zip(*ends, strict=True)
    assert share.interval(0.9) == (max(lows), min(highs)) and ends[-1] != share.interval(0.9)
    # an empty intersection: the last one
    turned = make_median_row([1.0] * 9 + [-1.0] * 200)
    last = median_interval_at_any_stop([1.0] * 9 + [-1.0] * 200, 0.95)
    assert turned.interval(0.95) == last and last.high < 0
    assert not make_median_row([]).interval(0.95).is_finite


def test_a_row_needs_the_draws_of_the_sooner_side():
    """Within needs all of its conditions, outside one of them, at half of the error each."""

    def make_evidence(within, outside):
        return rows.Evidence(*(tuple(map(np.array, side)) for side in (within, outside)))

    def draw(count):
        return [True] * count + [False] * (20 - count)

    needed = {count: draws_to_decide(count / 20, 0.025) for count in (14, 16, 18)}
    at_half = {count: draws_to_decide(count / 20, 0.0125) for count in (14, 18)}
    both = make_evidence((draw(14), draw(18)), (draw(6), draw(2)))
    assert both.draws_needed(0.025) == needed[14] > needed[18]
    one = make_evidence((draw(10), draw(18)), (draw(14), draw(2)))
    assert one.draws_needed(0.025) == at_half[14] > needed[14]
    sooner = make_evidence((draw(16), draw(16)), (draw(18), draw(2)))
    assert sooner.draws_needed(0.025) == min(needed[16], at_half[18])
    assert make_evidence((draw(10),), (draw(10),)).draws_needed(0.025) is None
    assert make_evidence(([],), ([],)).draws_needed(0.025) is None


def test_no_evidence_is_stronger_than_none():
    """Of two conditions the weaker counts within; outside the stronger one, for two looks."""
    first, second = np.array([True] * 12), np.array([True] * 9 + [False] * 3)
    alone = [rows.Evidence((a,), (a,)).log_p()[0] for a in (first, second)]
    assert alone[0] < alone[1] < 0
    within, outside = rows.Evidence((first, second), (second, first)).log_p()
    assert within == alone[1] and outside == pytest.approx(alone[0] + math.log(2))
    assert rows.Evidence((~first,), (~first, ~first)).log_p() == (0.0, 0.0)


def test_a_negative_zero_is_a_zero():
    numbers = rows.as_numbers([-0.0, None, True, np.float32(0.5)])
    assert math.copysign(1, numbers[0]) == 1
    np.testing.assert_array_equal(numbers, [0.0, math.nan, 1.0, 0.5])
