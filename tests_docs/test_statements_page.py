"""What the pages and tables of results say: rows, answers, counts, captions and numbers agree."""

import csv
import io

import pytest
from two_processes import REPOSITORY

from experiments.reproducing import statements_page
from experiments.reproducing.statements_page import answer_rows, judge_run_rows, render_page
from experiments.verdicts import claims
from experiments.verdicts.statements import STATEMENTS
from rank_collapse.report.intervals import Interval

DOCS = REPOSITORY / "docs"


def read_rows(name):
    return list(csv.DictReader(io.StringIO((DOCS / "results" / name).read_text("utf-8"))))


def test_the_page_is_that_of_its_table(tmp_path):
    """What one command makes of the committed rows: the same bytes, twice."""
    names = ("results/statements.csv", "statements.md")
    (tmp_path / "results").mkdir()
    (tmp_path / names[0]).write_bytes((DOCS / names[0]).read_bytes())
    for _ in range(2):
        statements_page.write_page(tmp_path)
        for name in names:
            assert (tmp_path / name).read_bytes() == (DOCS / name).read_bytes(), name


def test_the_page_is_short():
    assert len((DOCS / "statements.md").read_text("utf-8").replace("|", " ").split()) <= 1200


def test_verdicts_follow_from_intervals_and_ranges():
    rows = [row for row in read_rows("statements.csv") if row["verdict"]]
    for row in rows:
        ends = [float(row[name] or "nan") for name in ("low", "high")]
        claimed = STATEMENTS[row["statement"]].claimed
        assert claims.compare_ranges(Interval(*ends), claimed) == row["verdict"], row


def make_run(experiment, commit="a1" * 20, seed=1000):
    return {"experiment": experiment, "first_seed": seed, "commit": commit, "command": "python"}


def test_rows_of_all_folders_are_judged_jointly():
    three, one = [3.0, 3.01, 2.99, 3.0], [-1.0, -1.1, -0.9, -1.0]
    rows = [(claims.mean_row("mlps slow", name, three), make_run("run_collapse")) for name in "ab"]
    rows.append((claims.mean_row("mlps slow", "c", one), make_run("run_collapse")))
    rows.append((claims.mean_row("rate", "d", three), make_run("run_circle")))
    table = list(judge_run_rows(rows))
    assert [row["setting"] for row in table] == ["a", "b", "c", "d"]
    level = claims.mean_row("mlps slow", "a", three).interval(1 - claims.ERROR / 3)  # of three rows
    assert (table[0]["low"], table[0]["high"]) == level
    assert [row["verdict"] for row in table] == ["within", "within", "outside", ""]
    answers = answer_rows(table)
    assert answers["mlps slow"] == "partly supported" and answers["circle"] == "not run"
    assert "rate" not in answers  # must hold: no answer
    page = render_page(table)
    assert "| **partly supported** 2/1/0 | **mlps slow**" in page and "order: 3 |" in page
    assert "one run, of commit a1a1" in page and "from 1000 on" in page


def test_a_statement_without_the_rows_of_one_experiment_was_not_run():
    row = claims.share_within_row("skips stop", "a", [1.0] * 9, (0.1, 2.0))
    runs = [make_run("run_collapse"), make_run("run_architectures")]
    for count, answer in ((1, "not run"), (2, "holds")):
        table = judge_run_rows([(row, run) for run in runs[:count]])
        assert answer_rows(list(table))["skips stop"] == answer


@pytest.mark.parametrize("commit", ["a1" * 20 + "-dirty", ""])
def test_rows_of_changed_or_unknown_code_are_not_called_one_run(commit):
    row = claims.mean_row("mlps slow", "a", [1.0, 1.1, 0.9])
    table = judge_run_rows([(row, make_run("run_collapse", commit))])
    assert "still to come" in render_page(list(table))


@pytest.mark.parametrize("other", [make_run("run_circle", "b2"), make_run("run_circle", seed=0)])
def test_rows_of_other_commits_or_used_seeds_are_not_called_one_run(other):
    row = claims.mean_row("mlps slow", "a", [1.0, 1.1, 0.9])
    table = judge_run_rows([(row, make_run("run_collapse")), (row, other)])
    assert "still to come" in render_page(list(table))
