"""The wording of answers: which rows more draws would decide."""

import math

import numpy as np
import pytest

from experiments.verdicts import claims, rows, statement_page, verdict_wording
from rank_collapse.measures.rounding import rounding_limit

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
    limit = rounding_limit("float32")
    assert verdict_wording.show_ratio(limit) == "below 1e-06 (rounding)"  # the limit itself
    assert verdict_wording.show_ratio(np.nextafter(limit, 1.0)) > limit


def make_statement(claimed=None, **fields):
    return claims.Statement("a paper", "it is so", "a difference", claimed, **fields)


def test_what_refutes_a_statement_is_outside_its_range_of_a_draw():
    inf = math.inf
    for fields, text in (
        ({}, ""),
        ({"claimed": (2.5, 3.5)}, "≤ 2.5 or ≥ 3.5"),
        ({"claimed": (-inf, 3.5)}, "≥ 3.5"),
        ({"claimed": MORE_THAN_HALF, "draw_range": (2.0, inf)}, "≤ 2 in half"),
        ({"claimed": MORE_THAN_HALF, "draw_range": (1.0, 2.0)}, "≤ 1 or ≥ 2 in half"),
    ):
        assert verdict_wording.refuting_text(make_statement(**fields)) == text


def test_what_is_measured_is_a_median_a_share_or_the_statistic():
    inf, half = math.inf, {"claimed": MORE_THAN_HALF}
    for fields, start in (
        ({}, ""),
        ({"claimed": (0.05, inf), "tests_claim": True}, ""),
        ({"claimed": (2.5, 3.5)}, "median over draws: "),
        ({"draw_range": (2.0, inf)} | half, "share of draws with a value above 2: "),
        ({"draw_range": (-inf, 0.0)} | half, "share of draws with a value below 0: "),
        (
            {"draw_range": (-0.05, 0.05)} | half,
            "share of draws with a value between -0.05 and 0.05: ",
        ),
    ):
        statement = make_statement(**fields)
        assert verdict_wording.describe_measured(statement) == f"{start}a difference"


def test_statements_are_counted_with_their_settings_and_the_chance_of_an_error():
    """Findings have no answer, and are neither tested nor wrong."""
    held = [make_share_row(30, 30)] * 2
    finding = claims.answer_statement("f", make_statement(), [rows.mean_row("f", "", [1.0])])
    answers = [compute_answer(*held), compute_answer(held[0]), finding, compute_answer()]
    assert verdict_wording.count_line(answers) == (
        "Statements tested: 3, in settings: 3. Answers: holds 2, open 1. At most 0.15 of the "
        "answers are expected to be wrong by chance."
    )
    assert verdict_wording.count_line([finding]) == (
        "No statement with an answer was tested; findings have none."
    )
    assert verdict_wording.count_text([finding]) == "none gets an answer"


def test_the_lines_of_an_answer():
    """A decided row, one that more draws would decide, one without a number, and a finding."""
    undecided = rows.share_within_row("key", "some", [1.0, 1.0, 1.0, 0.0, None], MORE_THAN_HALF)
    answer = compute_answer(make_share_row(30, 30), undecided, rows.missing_row("key", "none"))
    needed = undecided.evidence.draws_needed(0.025 / 3)
    first, *lines = verdict_wording.answer_lines(answer).splitlines()
    assert first == "open after 5 1/0/1, 1 not measured a paper: it is so"
    assert lines[0].startswith("    within     a network: 1 (0.") and lines[0].endswith(
        " to 1); 30 draws; 30 of 30; all 1"
    )
    assert lines[1].startswith("    undecided  some: 0.75 (")
    assert lines[1].endswith(
        "; 4 draws; 3 of 4; values 0 to 1; 1 of 5 draws have no number; "
        f"about {needed - 5:,} more would decide"
    )
    assert lines[2] == "    not measured none: —"
    row = rows.mean_row("f", "here", [2.0])
    finding = claims.answer_statement("f", make_statement(), [row])
    assert verdict_wording.answer_lines(finding).splitlines() == [
        "finding        a paper: it is so",
        "               here: 2; 1 draw",
    ]


def test_what_must_hold_says_what_its_test_requires():
    """Its rows have intervals that may exclude the value of the theory, and no range."""
    statement = make_statement(test="tests/file.py::test_it", criterion="2 ± 0.2 %")
    answer = claims.answer_statement("k", statement, [rows.mean_row("k", "here", [2.1, 2.2, 2.3])])
    first, second, row = verdict_wording.answer_lines(answer).splitlines()
    assert first == "must hold      a paper: it is so"
    assert second.strip() == "its test requires: 2 ± 0.2 %"
    assert row.strip().startswith("here: 2.2 (")
    described = "a difference; its test requires: 2 ± 0.2 %"
    assert verdict_wording.describe_measured(statement) == described
    assert f">{described}<" in statement_page.render_statement(answer)


def test_a_row_is_marked_if_its_statement_was_not_registered_for_its_setting():
    """The text of a statement may name a size that a smaller run does not have."""
    mark = " (not a setting of the statement)"
    row = make_share_row(30, 30)  # of "a network"
    for settings, text in (
        (("a network", "another"), "a network"),
        (("another",), f"a network{mark}"),
        ((), "a network"),  # a finding: no settings are registered
    ):
        answer = compute_answer(row, settings=settings)
        assert verdict_wording.setting_text(row, answer.statement) == text
        line = verdict_wording.answer_lines(answer).splitlines()[1]
        assert line.startswith(f"    within     {text}: 1 (")
        assert f"<tr><td>{text}</td>" in statement_page.render_statement(answer)


def test_an_interval_of_one_point_is_of_a_median_or_a_count():
    """A count of cases has no uncertainty; equal draws of a median have an interval."""
    count = rows.cases_row("key", "here", 3, 9, 2)
    median = rows.median_row("key", "here", [2.0] * 30, (0.0, math.inf))
    statement = make_statement((0.0, math.inf))
    (judged,) = claims.judge_rows([median], statement)
    assert verdict_wording.estimate_text(judged) == "2 (2 to 2)"
    (judged,) = claims.judge_rows([count], make_statement())
    assert verdict_wording.estimate_text(judged) == "3"
    assert verdict_wording.row_note(count) == "2 draws; of 9 cases"
