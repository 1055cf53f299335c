"""The wording of answers: which rows more draws would decide."""

import math

import numpy as np
import pytest

from experiments.verdicts import claims, rows, verdict_wording

MORE_THAN_HALF = (0.5, math.inf)


def compute_answer(*rows, **fields):
    statement = claims.Statement("a paper", "it is so", "a difference", MORE_THAN_HALF, **fields)
    return claims.answer_statement("key", statement, rows)


def make_share_row(count, total):
    """Makes a row of `count` draws of `total` within their range, spread evenly."""
    values = [float((i + 1) * count // total > i * count // total) for i in range(total)]
    return rows.share_within_row("key", "a network", values, MORE_THAN_HALF)


@pytest.mark.parametrize("count, total", [(6, 8), (1, 8), (13, 20), (7, 7)])
def test_an_undecided_row_says_how_many_draws_would_decide_it(count, total):
    answer = compute_answer(make_share_row(count, total))
    text = verdict_wording.answer_lines(answer)
    assert text.startswith(f"open after {total} 0/0/1")
    more = int(text.split("about ")[1].split(" more would")[0])
    times = -(-(total + more) // total)  # as many draws, with the same share
    assert compute_answer(make_share_row(count * times, total * times)).answer != "open"


def test_among_more_rows_it_takes_more_draws():
    few, many = (compute_answer(*[make_share_row(6, 8)] * n) for n in (1, 6))
    alone, joint = (verdict_wording.seeds_to_decide(a.rows[0], len(a.rows)) for a in (few, many))
    assert alone < joint


def test_a_row_that_is_decided_or_near_one_half_says_nothing_more():
    for row in (make_share_row(30, 30), make_share_row(4, 8)):
        assert "would decide" not in verdict_wording.answer_lines(compute_answer(row))
    lost = rows.share_within_row("key", "a network", [math.nan] * 4, MORE_THAN_HALF)
    assert "4 of 4 draws have no number" in verdict_wording.answer_lines(compute_answer(lost))


def test_counts_name_what_was_not_measured():
    verdicts = ["within", "outside", "undecided", "not measured", "not rejected"]
    assert verdict_wording.verdict_counts(verdicts) == "2/1/1, 1 not measured"
    assert verdict_wording.verdict_counts(verdicts[:2]) == "1/1/0"


def test_a_ratio_that_rounding_decides_is_a_bound():
    assert verdict_wording.show_ratio(1.4e-7) == "below 1e-06 (rounding)"
    assert verdict_wording.show_ratio(np.float32(0.25)) == 0.25
    assert verdict_wording.show_ratio(1.4e-7, np.float64) == 1.4e-7
