"""Verdicts and answers of statements: rows of every kind, joint verdicts, missing rows, curves."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.verdicts import claims, rows
from experiments.verdicts.claims import (
    FAILS,
    FINDING,
    HOLDS,
    IN_PART,
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


def test_a_verdict_once_reached_stays_whatever_comes_later():
    first = [1.0] * 9
    for later in range(0, 40, 5):
        assert compute_verdict(make_median_row(first + [-1.0] * later)) in ("within", "outside")
    assert compute_verdict(make_median_row(first + [-1.0] * 5)) == "within"
    assert compute_verdict(make_median_row(first + [-1.0] * 200)) == "outside"  # stronger evidence


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
    # fewer than there are rows are no rows that are judged together
    weak_rows = [make_median_row(weak, str(i)) for i in range(10)]
    few = claims.judge_rows(weak_rows, make_statement(), num_rows=1)
    assert {(j.verdict, j.interval) for j in few} == {("undecided", many[0].interval)}


def test_rows_of_a_finding_are_neither_within_nor_outside():
    (judged,) = claims.judge_rows([make_median_row([1.0] * 40)], make_statement(None))
    assert judged.verdict == "undecided"


def test_a_draw_without_a_number_may_lie_on_either_side_of_the_median():
    complete = make_median_row(np.arange(12.0)).interval(0.95)
    unknown = make_median_row([math.nan] * 4 + [*np.arange(12.0)]).interval(0.95)
    assert unknown.low < complete.low and complete.high < unknown.high


def test_a_decided_row_has_the_interval_of_the_level_of_its_place():
    """The most certain row is compared at 2.5 %/n, the next one at 2.5 %/(n − 1), on each side."""
    values = {16: [1.0, 2.0] * 8, 40: [1.0, 3.0] * 20, 24: [-1.0, -2.0] * 12, 12: [0.5, 1.0] * 6}
    values[3] = [0.5, -0.5, 1.0]
    made = {count: make_median_row(numbers) for count, numbers in values.items()}
    judged = dict(zip(made, claims.judge_rows([*made.values()], make_statement()), strict=True))
    assert [j.verdict for j in judged.values()] == [
        *("within", "within", "outside", "within"),
        "undecided",
    ]
    for count, left in ((40, 5), (16, 4), (12, 3), (24, 5), (3, 5)):
        assert judged[count].interval == made[count].interval(1 - 2 * 0.025 / left), count


def test_an_open_answer_has_the_draws_of_its_longest_undecided_row():
    rows_of = [make_median_row([1.0, -1.0] * n, str(n)) for n in (2, 7, 3)]
    decided = make_median_row([1.0] * 40, "decided")
    assert compute_answer(*rows_of, decided).in_words == "open after 14"


def test_a_row_of_no_statement_is_refused():
    row = make_median_row(UP)
    is_refused("'key' is not one of the statements", claims.answer_statements, {}, [row])
    others = [replace(row, key=key) for key in ("z", "a")]
    with pytest.raises(ValueError, match=r"^'a' is not one of the statements"):
        claims.answer_statements({}, others)


def test_rows_of_several_statements_are_answered_in_the_order_of_the_statements():
    lines = [replace(make_median_row(UP, setting), key=key) for key, setting in ("b1", "a1", "b2")]
    statements = {key: make_statement() for key in "abc"}
    answers = claims.answer_statements(statements, lines)
    settings = [(answer.key, [j.row.setting for j in answer.rows]) for answer in answers]
    assert settings == [("a", ["1"]), ("b", ["1", "2"])]


def test_a_row_with_evidence_of_both_sides_is_on_the_side_that_is_rejected():
    """As the last of ten rows that are within, and as the first of those that are outside."""

    def make_decided(*log_p):
        return replace(make_median_row(UP), evidence=SimpleNamespace(log_p=lambda: log_p))

    nine = [make_decided(-50.0, 0.0)] * 9
    judged = claims.judge_rows([*nine, make_decided(*np.log([0.02, 0.01]))], make_statement())
    assert [j.verdict for j in judged] == ["within"] * 10
    assert judged[-1].interval == judged[-1].row.interval(1 - 2 * 0.025)
    judged = claims.judge_rows([*nine, make_decided(*np.log([0.02, 0.001]))], make_statement())
    assert judged[-1].verdict == "outside"  # both are rejected: the stronger evidence
