"""The registered statements: each says what decides it."""

import ast
import math
from pathlib import Path

import pytest

from experiments.lab.experiment import list_experiments
from experiments.verdicts import statements
from experiments.verdicts.statements import STATEMENTS
from tests.support.folders import REPOSITORY


def test_every_statement_says_what_decides_it():
    paths = Path(statements.__file__).parents[1].rglob("*.py")
    sources = "".join(path.read_text("utf-8") for path in paths)
    for key, statement in STATEMENTS.items():
        assert (
            statement.source
            and statement.text.endswith(".")
            and statement.statistic
            and (statement.experiments or statement.test)
        ), key
        assert set(statement.experiments) <= set(list_experiments()), key
        assert statement.claimed is None or not statement.test, key
        if statement.claimed is not None:
            assert statement.claimed[0] < statement.claimed[1], key
        # as the page says
        assert statement.draw_range is None or statement.claimed == (0.5, math.inf), key
        assert not statement.experiments or f'"{key}"' in sources, key


def test_rows_of_a_statement_are_of_its_range(monkeypatch):
    """A mean without a range, a median in it, or the share of draws in a range of their own."""
    kinds = {
        "finding": statements.Statement("", "", ""),
        "median": statements.Statement("", "", "", (0.0, 4.0)),
        "share": statements.Statement("", "", "", (0.5, math.inf), (2.0, 9.0)),
    }
    monkeypatch.setattr(statements, "STATEMENTS", kinds)
    values, scale = [1.0, 3.0, 5.0, 11.0], {"scale": lambda v: v / 2}
    finding, median = (
        statements.make_row(key, "here", values, note="a note", **scale)
        for key in ("finding", "median")
    )
    share = statements.make_row("share", "here", values, note="a note")
    assert (finding.estimate, finding.note, finding.evidence) == (2.5, "a note", None)
    assert (median.estimate, median.note) == (2.0, "values 0.5 to 5.5; a note")
    assert [side.sum() for side in median.evidence.within] == [4, 3]
    assert (share.estimate, share.note) == (0.5, "2 of 4; values 1 to 11; a note")
    for row, key in ((finding, "finding"), (median, "median"), (share, "share")):
        assert (row.key, row.setting, row.draws) == (key, "here", 4)


FILE = (
    "[protocol]\nfirst_seed = 7\nrounds = [8, 16]\nbudgets = {run_sort = 64}\n"
    'texts = "None — 0 °."\nchanged = []\n'
    '[one]\nsource = "a"\ntext = "b"\nstatistic = "c"\nclaimed = [0.5, inf]\n'
    'draw_range = [-inf, 2.0]\nsettings = ["x", "y"]\n'
)


def test_ranges_and_lists_of_a_file_are_tuples(tmp_path):
    path = tmp_path / "statements.toml"
    path.write_text(FILE, "utf-8")
    protocol, table = statements.read_statements(path)
    assert protocol.texts == "None — 0 °."
    assert (protocol.first_seed, protocol.rounds, protocol.budgets) == (
        7,
        [8, 16],
        {"run_sort": 64},
    )
    fields = {"draw_range": (-math.inf, 2.0), "settings": ("x", "y")}
    assert table == {"one": statements.Statement("a", "b", "c", (0.5, math.inf), **fields)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("draw_range", "draw_rage"), "draw_rage"),
        (("claimed", "Claimed"), "Claimed"),
        (("statistic", "statistics"), "statistics"),  # too much is said before what is missing
        (('statistic = "c"', ""), "statistic"),
        (("rounds", "round"), "'round'"),
        (("changed = []", ""), "'changed'"),
    ],
)
def test_a_field_that_a_statement_or_the_protocol_does_not_have_is_named(
    tmp_path, changed, message
):
    """A field without its name would leave the statement another range, or none."""
    path = tmp_path / "statements.toml"
    path.write_text(FILE)
    statements.read_statements(path)
    path.write_text(FILE.replace(*changed))
    with pytest.raises(TypeError, match=message):
        statements.read_statements(path)


@pytest.mark.parametrize("key", [key for key, statement in STATEMENTS.items() if statement.test])
def test_what_must_hold_names_a_test_of_this_repository(key):
    path, _, name = STATEMENTS[key].test.partition("::")
    source = (REPOSITORY / path).read_text("utf-8")
    functions = {n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    assert name.startswith("test_") and name in functions


def test_few_statements_are_counted():
    assert sum(statement.claimed is not None for statement in STATEMENTS.values()) <= 44
