"""Which run the rows of docs/statements.md say they are of."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.reproducing import statements_page
from experiments.verdicts import claims, make_row, mean_row
from experiments.verdicts.claims import Statement
from experiments.verdicts.statements import STATEMENTS

ROW = mean_row("rate", "a setting", [3.0, 3.1, 2.9])


@pytest.mark.parametrize(
    ("flags", "first_seed"),
    [
        ({"seed": 1000, "first_seed": 0}, 1000),
        ({"seed": 0, "first_seed": 2000}, 2000),
        ({"seed": 7}, 7),
        ({}, ""),
    ],
)
def test_rows_say_their_first_seed_and_command(flags, first_seed, tmp_path, monkeypatch):
    """With `seed` keys are of another stream, with `first_seed` further seeds of the same."""
    config = {
        "config": {"experiment": "collapse", **flags},
        "execution": {
            "command": "python -m experiments.run_collapse --depth=2 --output_dir=/x --run_name=y"
        },
        "environment": {"git": "a1" * 20},
        "layout": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(
        statements_page, "read_run", lambda module, folder: SimpleNamespace(claims=[ROW])
    )
    ((row, run),) = statements_page.read_run_rows(tmp_path)
    assert row is ROW
    assert run["experiment"] == "run_collapse" and run["first_seed"] == first_seed
    assert run["command"] == "python -m experiments.run_collapse --depth=2"
    assert run["commit"].startswith("a1a1")


def test_fresh_seeds_are_said_to_be_fresh():
    origin = {"experiment": "run_sort", "commit": "b2" * 20}
    rows = [origin | {"first_seed": seed} for seed in ("3000", "4000", "")]
    text = statements_page.describe_origin(rows)
    assert "from 3000 on" in text and "one run, of commit b2b2b2b2" in text
    second = {"experiment": "run_lens", "commit": "c3" * 20, "first_seed": "3000"}
    text = statements_page.describe_origin([*rows, second])
    assert text == (
        "The rows are from runs of the commits b2b2b2b2, c3c3c3c3, all with seeds from 3000 on."
    )
    changed = second | {"commit": f"{'c3' * 20}-dirty"}
    text = statements_page.describe_origin([*rows, changed])
    assert text.startswith("The run with the registered seeds is still to come")
    joined = second | {"commit": f"{'c3' * 20} and {'a1' * 20}"}  # of a run with two commits
    text = statements_page.describe_origin([*rows, joined])
    assert "the commits a1a1a1a1, b2b2b2b2, c3c3c3c3, all with" in text
    for others in ([second | {"commit": ""}], []):
        text = statements_page.describe_origin([*(others and rows), *others])
        assert text.startswith("The run with the registered seeds is still to come")
        assert text.endswith("from commits: b2b2b2b2, unknown." if others else "commits: none.")
    texts_alone = [origin | {"first_seed": ""}]
    assert "still to come" in statements_page.describe_origin(texts_alone)
    stale = statements_page.describe_origin([*rows, origin | {"first_seed": "1000"}])
    assert stale.startswith("The run with the registered seeds is still to come")


def test_a_row_that_no_run_has_names_no_run():
    """Each of the others names its own run."""
    key, first, second, third = find_statement_with_settings()
    runs = [
        {"experiment": f"run_{name}", "first_seed": seed} for name, seed in (("a", 1), ("b", 2))
    ]
    rows = [mean_row(key, setting, [3.0, 3.1, 2.9]) for setting in (first, third)]
    judged = list(statements_page.judge_run_rows(list(zip(rows, runs, strict=True))))
    by_setting = {row["setting"]: (row["experiment"], row["first_seed"]) for row in judged}
    assert by_setting[first] == ("run_a", 1) and by_setting[third] == ("run_b", 2)
    assert by_setting[second] == ("", "")
    missing = next(row for row in judged if row["setting"] == second)
    assert missing["draws"] == 0 and missing["estimate"] is None


def find_statement_with_settings():
    """Returns a registered statement's key and three of its settings."""
    return next((k, *s.settings[:3]) for k, s in STATEMENTS.items() if len(s.settings) >= 3)


def test_the_protocol_names_the_level_at_which_statements_are_judged(monkeypatch):
    """The one of `claims`, half of it on each side; the count of errors by chance is of it, too."""
    assert statements_page.ERROR == claims.ERROR
    for error, whole, side in ((claims.ERROR, "5 %", "2.5 %"), (0.01, "1 %", "0.5 %")):
        monkeypatch.setattr(statements_page, "ERROR", error)
        text = " ".join(statements_page.describe_protocol().split())
        assert f"probability of at most {whole}, whenever" in text
        assert f"correction at {side} on each side" in text
        sentence = statements_page.count_sentence(dict.fromkeys(map(str, range(60)), claims.HOLDS))
        assert f"At most {60 * error:.1f} of these answers" in sentence


def render_lines(rows, monkeypatch, answer="open", **fields):
    """Renders the lines of one statement with an answer, or of a test without one."""
    statement = Statement("Section 1", "It is so.", "x", experiments=("run_sort",), **fields)
    monkeypatch.setattr(statements_page, "STATEMENTS", {"key": statement})
    monkeypatch.setattr(statements_page, "PAGE_TEXT", "{tested}{checked}")
    for name in ("count_sentence", "describe_origin"):
        monkeypatch.setattr(statements_page, name, lambda _: "")
    monkeypatch.setattr(statements_page, "answer_rows", lambda _: {"key": answer})
    columns = {"statement": "key", "note": "", "estimate": "", "verdict": "within", "draws": "8"}
    return statements_page.render_page([columns | row for row in rows])


def test_an_open_statement_has_the_draws_of_its_open_rows(monkeypatch):
    """Beside them the column has those of all measured rows."""
    rows = [
        {"draws": draws, "verdict": verdict}
        for draws, verdict in (
            *(("8", "within"), ("64", "undecided"), ("16", "undecided")),
            *(("128", "outside"), ("0", "not measured")),
        )
    ]
    line = render_lines(rows, monkeypatch, claimed=(0.0, 1.0))
    assert line == (
        "| **open after 16 to 64** 1/1/2, 1 not measured | **key** (Section 1) It is so. "
        "| 8 to 128 | x: ≤ 0 or ≥ 1 |\n"
    )


@pytest.mark.parametrize(
    ("answer", "cells"),
    [
        ("holds", "| **holds** 2/0/0 | **key** (Section 1) It is so. | 8 to 64 |"),
        ("not run", "| **not run** | **key** (Section 1) It is so. |  |"),
    ],
)
def test_a_statement_that_is_decided_has_its_counts_and_one_that_was_not_run_none(
    answer, cells, monkeypatch
):
    rows = [{"draws": draws, "verdict": "within"} for draws in ("64", "8")]
    line = render_lines(rows, monkeypatch, answer, claimed=(0.0, 1.0))
    assert line == f"{cells} x: ≤ 0 or ≥ 1 |\n"


@pytest.mark.parametrize(
    ("rows", "measured"),
    [
        ([("2.5", ""), ("", ""), ("1.5", "at least the bound"), (None, "")], "at least 1.5 to 2.5"),
        ([("2.5", ""), ("2.5", "")], "2.5"),
        ([("3", "")], "3"),
        ([("", "")], "not run"),
        ([], "not run"),
    ],
)
def test_a_number_without_an_answer_has_the_range_of_its_rows(rows, measured, monkeypatch):
    rows = [{"estimate": estimate, "note": note} for estimate, note in rows]
    line = render_lines(rows, monkeypatch, test="tests/test_a.py::test_b")
    assert line == f"| (Section 1) It is so. | x: {measured} | `tests/test_a.py::test_b` |\n"


def test_without_runs_the_page_is_written_anew_from_its_own_table(tmp_path):
    docs = tmp_path / "docs"
    (docs / "results").mkdir(parents=True)
    key = next(key for key, statement in STATEMENTS.items() if statement.claimed)
    row = {"statement": key, "setting": "a", "verdict": "within", "estimate": "1.5", "draws": "8"}
    row |= {"experiment": "run_sort", "first_seed": "7", "commit": "c4" * 20, "note": ""}
    table = ",".join(row) + "\n" + ",".join(row.values()) + "\n"
    (docs / "results" / "statements.csv").write_text(table)
    statements_page.write_page(docs)
    assert (docs / "results" / "statements.csv").read_text() == table
    assert "from commits: c4c4c4c4." in (docs / "statements.md").read_text("utf-8")


@pytest.mark.parametrize("is_within", [True, False])
def test_each_side_of_a_row_has_its_own_p(is_within):
    """Of draws on one side all evidence is for this side, and none for the other."""
    key, setting, *_ = find_statement_with_settings()
    low, high = STATEMENTS[key].claimed
    inside = low + 1.0 if np.isfinite(low) else high - 1.0
    draws = [inside if is_within else 2 * (low if np.isfinite(low) else high) - inside] * 16
    pair = make_row(key, setting, draws), {"experiment": "run_a"}
    row = next(r for r in statements_page.judge_run_rows([pair]) if r["setting"] == setting)
    small, large = ("p_within", "p_outside")[:: 1 if is_within else -1]
    assert 0 < float(row[small]) < 0.01 and float(row[large]) == 1


def test_a_statement_is_answered_where_all_its_experiments_were_run(monkeypatch):
    """By the verdicts of its own rows; one without a range has no answer."""
    both = Statement("1", "x", "x", (0.0, 1.0), experiments=("run_a", "run_b"))
    statements = {"both": both, "one": replace(both, experiments=("run_a",))}
    statements["none"] = replace(both, claimed=None, test="a")
    monkeypatch.setattr(statements_page, "STATEMENTS", statements)

    def answer(*rows):
        names = ("statement", "experiment", "verdict")
        return statements_page.answer_rows([dict(zip(names, row, strict=True)) for row in rows])

    assert answer() == {"both": "not run", "one": "not run"}
    rows = [("both", "run_a", "within"), ("one", "run_a", "outside")]
    assert answer(*rows) == {"both": "not run", "one": "does not hold"}
    rows += [("both", "run_b", "within"), ("none", "run_c", "")]
    assert answer(*rows)["both"] == "holds"
    rows += [("both", "", "not measured")]  # a setting that no run has
    assert answer(*rows)["both"] == "open"
    rows += [("both", "run_a", "outside"), ("both", "run_b", "undecided")]
    assert answer(*rows) == {"both": "in some settings", "one": "does not hold"}
    assert answer(*rows, ("both", "run_c", "within"))["both"] == "not run"  # of another register


def test_every_row_has_an_answer_on_the_page_of_a_whole_run(monkeypatch):
    """The sentence counts them by answer, and the page has a line for each statement."""
    rows = [
        {"statement": key, "experiment": name, "verdict": verdict, "draws": "8", "note": ""}
        | {"first_seed": "3000", "commit": "d5" * 20, "estimate": "1.5"}
        for (key, statement), verdict in zip(
            STATEMENTS.items(), itertools.cycle(("within", "outside"))
        )
        for name in statement.experiments
    ]
    claimed = [statement for statement in STATEMENTS.values() if statement.claimed]
    page = statements_page.render_page(rows)
    lines = [line for line in page.splitlines() if line.startswith("| **")]
    assert len(lines) == len(claimed) and not any("not run" in line for line in lines)
    holds = sum("| **holds** " in line for line in lines)
    fails = sum("| **does not hold** " in line for line in lines)
    assert holds + fails == len(claimed) and min(holds, fails) > 5
    sentence = f"The answers to the {len(claimed)} statements are: {holds} “holds”, {fails} “does"
    assert sentence in page and "All rows are from one run, of commit d5d5d5d5, with" in page
