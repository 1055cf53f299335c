"""The wording of answers: which rows more draws would decide."""

import math

import numpy as np
import pytest

from experiments.verdicts import claims, wording
from experiments.verdicts.intervals import draws_needed
from rank_collapse.report.intervals import mean_interval


def make_values(count, mean, deviation):
    """Makes `count` numbers of this mean and sample deviation, half above and half below."""
    signs = np.where(np.arange(count) % 2, 1.0, -1.0)
    signs -= signs.mean()
    return mean + deviation * signs / signs.std(ddof=1)


@pytest.mark.parametrize("draws, distance", [(2, 0.5), (5, 0.2), (9, 3.0)])
def test_so_many_draws_have_an_interval_that_ends_before(draws, distance):
    half = mean_interval(make_values(draws, 0, 1))[1]
    count = draws_needed(half, draws, distance)
    assert mean_interval(make_values(count, 0, 1))[1] < distance
    fewer = count * 9 // 10
    assert fewer < 2 or mean_interval(make_values(fewer, 0, 1))[1] >= distance


def compute_answer(*rows, claimed=(0.0, math.inf)):
    statement = claims.Statement("a paper", "it is so", "a difference", claimed)
    return claims.answer_statement("key", statement, rows)


def test_an_undecided_row_says_how_many_draws_would_decide_it():
    row = claims.mean_row("key", "a network", make_values(4, 0.5, 1))
    text = wording.answer_lines(compute_answer(row))
    count = int(text.split("about ")[1].split(" would")[0])
    decided = claims.mean_row("key", "a network", make_values(count, 0.5, 1))
    assert (
        compute_answer(decided).answer == "holds" and compute_answer(row).answer == "inconclusive"
    )


def test_too_few_draws_say_the_least_that_decide():
    few = claims.share_row("key", "a network", 2, 2)
    text = wording.answer_lines(compute_answer(few, claimed=(0.5, math.inf)))
    assert text.endswith(f"{claims.FEWEST_OF_SHARE} or more would decide")
    cases = claims.cases_row("key", "a network", 0, 9, 2)
    text = wording.answer_lines(compute_answer(cases, claimed=(-math.inf, 0.5)))
    assert text.endswith(f"{claims.FEWEST_DRAWS} or more would decide")


def test_a_row_that_is_decided_or_lost_says_nothing_more():
    for values in (make_values(9, 5, 1), [math.nan] * 4):
        text = wording.answer_lines(compute_answer(claims.mean_row("key", "a network", values)))
        assert "would decide" not in text
