"""What the pages and tables of results say: rows, answers, counts, captions and numbers agree."""

import pytest

from experiments.reproducing import statements_page
from experiments.reproducing.statements_page import (
    answer_rows,
    judge_run_rows,
    read_table,
    render_page,
)
from experiments.verdicts import claims, rows
from experiments.verdicts.claims import VERDICTS
from experiments.verdicts.statements import PROTOCOL, STATEMENTS
from tests.support.folders import REPOSITORY

DOCS = REPOSITORY / "docs"


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
    assert len((DOCS / "statements.md").read_text("utf-8").replace("|", " ").split()) <= 3000


def test_what_is_decided_is_on_its_side_of_the_range():
    table = [row for row in read_table() if row["verdict"] in VERDICTS[:2]]
    # rows of other seeds were judged by an earlier rule
    for row in (row for row in table if int(row["first_seed"] or 0) >= PROTOCOL.first_seed):
        low, high = (float(row[name] or "nan") for name in ("low", "high"))
        least, most = STATEMENTS[row["statement"]].claimed
        is_within = least < low and high < most
        assert is_within if row["verdict"] == "within" else high <= least or low >= most, row


def make_run(experiment, commit="a1" * 20, seed=PROTOCOL.first_seed):
    return {"experiment": experiment, "first_seed": seed, "commit": commit, "command": "python"}


def make_share_row(key, setting, values=(1.0,) * 16):
    statement = STATEMENTS[key]
    return rows.share_within_row(key, setting, values, statement.draw_range)


def test_rows_of_all_folders_are_judged_jointly():
    settings = STATEMENTS["circle mlp"].settings
    far, near, run = [-1.0] * 12, [-6.0] * 12, make_run("run_circle")
    pairs = [(make_share_row("circle mlp", s, far), run) for s in settings[:4]]
    pairs.append((make_share_row("circle mlp", settings[4], near), run))
    pairs.append((rows.mean_row("rate", "d", [3.0, 3.01, 2.99]), run))
    table = list(judge_run_rows(pairs))
    assert [row["setting"] for row in table] == [*settings, "d"]
    first = pairs[0][0]
    assert (table[0]["low"], table[0]["high"]) in [
        tuple(first.interval(1 - claims.ERROR / n)) for n in range(1, 7)
    ]
    verdicts = [*["within"] * 4, "outside", "not measured", ""]
    assert [row["verdict"] for row in table] == verdicts
    assert float(table[0]["p_within"]) < 0.025 / 6 < float(table[0]["p_outside"])
    answers = answer_rows(table)
    assert answers["circle mlp"] == "in some settings" and answers["loops grow"] == "not run"
    assert "rate" not in answers  # must hold: no answer
    page = render_page(table)
    counts = "| **in some settings** 4/1/0, 1 not measured | **circle mlp**"
    assert counts in page and "about d^p: 3 |" in page and "| 12 | log10 of the walkers" in page
    assert "one run, of commit a1a1" in page and "from 3000 on" in page


def test_an_answer_says_after_how_many_draws_it_is_open():
    (setting,) = STATEMENTS["additive"].settings
    row = make_share_row("additive", setting, [1.0, -1.0] * 16)
    table = list(judge_run_rows([(row, make_run("run_attention_forms"))]))
    assert "| **open after 32** 0/0/1 | **additive**" in render_page(table)


def test_the_page_says_how_statements_are_decided_and_what_changed():
    page = (DOCS / "statements.md").read_text("utf-8")
    for line in PROTOCOL.changed:
        assert f"- {line}\n" in page
    assert "8, 16, 32, 64, 128" in page and f"from {PROTOCOL.first_seed} on" in page


def test_a_statement_without_the_rows_of_one_experiment_was_not_run():
    settings = STATEMENTS["skips stop"].settings
    runs = [make_run("run_collapse"), make_run("run_architectures")]
    for count, answer in ((1, "not run"), (2, "holds")):
        pairs = [
            (make_share_row("skips stop", s), runs[s.endswith("ased") or "v2" in s])
            for s in settings
        ]
        table = judge_run_rows([pair for pair in pairs if pair[1] in runs[:count]])
        assert answer_rows(list(table))["skips stop"] == answer


@pytest.mark.parametrize("commit", ["a1" * 20 + "-dirty", ""])
def test_rows_of_changed_or_unknown_code_are_not_called_one_run(commit):
    row = make_share_row("circle", "base, d=32")
    table = judge_run_rows([(row, make_run("run_circle", commit))])
    assert "still to come" in render_page(list(table))


@pytest.mark.parametrize("other", [make_run("run_circle", "b2"), make_run("run_circle", seed=0)])
def test_rows_of_other_commits_or_used_seeds_are_not_called_one_run(other):
    row = make_share_row("circle", "base, d=32")
    table = judge_run_rows([(row, make_run("run_circle")), (row, other)])
    assert "still to come" in render_page(list(table))
