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
        assert statement.claimed is None or len(statement.text.split()) < 25, key
        assert not statement.experiments or f'"{key}"' in sources, key


@pytest.mark.parametrize("key", [key for key, statement in STATEMENTS.items() if statement.test])
def test_what_must_hold_names_a_test_of_this_repository(key):
    path, _, name = STATEMENTS[key].test.partition("::")
    source = (REPOSITORY / path).read_text("utf-8")
    functions = {n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    assert name.startswith("test_") and name in functions


def test_few_statements_are_counted():
    assert sum(statement.claimed is not None for statement in STATEMENTS.values()) <= 44
