"""How tests run a binary, and read what it left."""

import csv
import json
import math

import jax
import numpy as np
import pytest

from experiments.shell import cli
from experiments.shell.statements import STATEMENTS
from rank_collapse.report.claims import answers_of

SMALL = (
    "--depth=2",
    "--width=2",
    "--hidden_dim=8",
    "--n_repeat=2",
    "--n_paths=2",
    "--n_eval_data=5",
    "--num_seeds=2",
)


def run(module, arguments, folder):
    """The exit code of a binary."""
    return cli.execute(module.main, module.FLAGS, [*arguments, f"--output_dir={folder}"])


def finished(module, *arguments):
    """A fixture: the folder of one run of a binary, never written to again."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory):
        path = tmp_path_factory.mktemp("run")
        assert run(module, arguments, path) == 0
        return path

    return folder


def parsed(module, *arguments):
    return cli.parse(module.FLAGS, list(arguments))


def answered(rows):
    """{(statement, setting): verdict} and {statement: answer} of the rows of an experiment."""
    answers = answers_of(STATEMENTS, rows)
    verdicts = {(a.key, j.row.setting): j.verdict for a in answers for j in a.rows}
    return verdicts, {a.key: a.answer for a in answers}


def verdicts(rows):
    """{statement: verdict of its first setting}"""
    return {a.key: a.rows[0].verdict for a in answers_of(STATEMENTS, rows)}


def arrays(folder):
    with np.load(folder / "arrays.npz") as saved:
        return dict(saved)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def rows(folder):
    return list(csv.DictReader((folder / "results.csv").read_text().splitlines()))


def single_columns(folder):
    """Columns of results.csv whose fractions are all numbers of float32."""
    found = []
    for name in rows(folder)[0]:
        values = np.array([_number(row[name]) for row in rows(folder)])
        values = values[np.isfinite(values) & (values != np.round(values))]
        if len(values) and np.all(values == values.astype(np.float32)):
            found.append(name)
    return found


def _number(text):
    try:
        return float(text)
    except ValueError:
        return math.nan


def seed_of(tree, index):
    """One seed's part of a pytree with a leading seed axis."""
    return jax.tree.map(lambda a: a[index], tree)


def contents(folder):
    """{name: bytes} of everything that a person reads."""
    names = ["results.csv", "summary.json", *(f"figures/{p.name}" for p in figures(folder))]
    return {name: (folder / name).read_bytes() for name in names}


def figures(folder):
    return sorted((folder / "figures").iterdir())


def check_mistake(module, arguments, message, folder, capsys, *, early=True):
    """A mistake in the flags is one line and exit 2; where it is seen early there is no folder."""
    assert run(module, arguments, folder / "refused") == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.startswith("error: ") and "\n" not in error, error
    assert not (folder / "refused").exists() or not early
