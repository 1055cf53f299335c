"""What the pages and tables of results say: rows, answers, counts, captions and numbers agree."""

import csv
import io

from two_processes import REPOSITORY

from experiments.lab.statements import STATEMENTS
from experiments.reproducing import statements_page
from experiments.reproducing.statements_page import NOT_KEPT, answer_rows, merge_rows, render_page
from experiments.verdicts import claims

DOCS = REPOSITORY / "docs"


def rows(name):
    return list(csv.DictReader(io.StringIO((DOCS / "results" / name).read_text("utf-8"))))


def test_the_page_and_both_tables_of_statements_are_one(tmp_path):
    """What one command makes of the committed rows: the same bytes, twice."""
    names = ("results/statements.csv", "results/answers.csv", "statements.md")
    (tmp_path / "results").mkdir()
    (tmp_path / names[0]).write_bytes((DOCS / names[0]).read_bytes())
    for _ in range(2):
        statements_page.write_page(tmp_path)
        for name in names:
            assert (tmp_path / name).read_bytes() == (DOCS / name).read_bytes(), name


def test_every_row_tests_what_its_statement_says():
    found = rows("statements.csv")
    assert len(found) > 20
    assert [row["statement"] for row in found if not statements_page.is_current(row)] == []


def run_of(experiment, seed=1):
    return {"experiment": experiment, "date": "2026-11-26", "seed": seed, "command": "python"}


def test_a_run_takes_the_place_of_what_its_experiment_had():
    three, one = [3.0, 3.01, 2.99, 3.0], [1.0, 1.1, 0.9, 1.0]
    collapse = [(claims.mean_row("rate", name, three), run_of("run_collapse")) for name in "ab"]
    circle = claims.mean_row("rate", "c", three)
    rows = merge_rows([], [*collapse, (circle, run_of("run_circle", 0))])
    assert [row["setting"] for row in rows] == ["a", "b", "c"]
    assert answer_rows(rows[:2])["rate"]["answer"] == NOT_KEPT  # no rows of the circle
    found = answer_rows(rows)["rate"]
    assert (found["answer"], found["rows"], found["where"]) == ("holds", "3", "within: a, b, c")
    assert "**holds** | **rate**" in render_page({"rate": found})
    rows = merge_rows(rows, [(claims.mean_row("rate", "d", one), run_of("run_circle"))])
    assert [row["setting"] for row in rows] == ["a", "b", "d"]
    level = claims.mean_row("rate", "d", one).interval(1 - claims.ERROR / 3)  # of three rows
    assert (rows[2]["low"], rows[2]["high"]) == level
    found = answer_rows(rows)["rate"]
    assert found["where"] == "within: a, b; outside: d"
    assert "**partly supported** | **rate**" in render_page({"rate": found})
    assert render_page({}).count("| **not run**") == len(STATEMENTS)


def test_what_weakens_a_universal_claim_is_said_at_its_answer():
    shares = [(claims.share_row("circle mlp", "a", 60, 64), run_of("run_circle"))]
    known = answer_rows(merge_rows([], shares))
    assert known["circle mlp"]["answer"] == "holds"
    assert "**holds**, in most runs<br>on held-out seeds | **circle mlp**" in render_page(known)
    assert statements_page.full_size_answers(known)["circle mlp"].endswith(": holds")
