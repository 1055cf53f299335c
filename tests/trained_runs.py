"""How tests run a binary, and read what it left."""

import csv
import json
import math

import jax
import numpy as np
import pytest

from experiments.lab import cli
from experiments.lab.experiment import read_run
from experiments.verdicts.claims import answer_statements
from experiments.verdicts.statements import STATEMENTS

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


def result_of(module, folder):
    """(results, set-up) of a folder without axes, or whose axes are all of its results'."""
    (point,) = read_run(module, folder).points
    return point.results, point.setup


def parsed(module, *arguments):
    return cli.parse_flags(module.FLAGS, list(arguments))


def answered(rows):
    """{(statement, setting): verdict} and {statement: answer} of the rows of an experiment."""
    answers = answer_statements(STATEMENTS, rows)
    verdicts = {(a.key, j.row.setting): j.verdict for a in answers for j in a.rows}
    return verdicts, {a.key: a.answer for a in answers}


def verdicts(rows):
    """{statement: verdict of its first setting}"""
    return {a.key: a.rows[0].verdict for a in answer_statements(STATEMENTS, rows)}


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
        values = np.array([number(row[name]) for row in rows(folder)])
        values = values[np.isfinite(values) & (values != np.round(values))]
        if len(values) and np.all(values == values.astype(np.float32)):
            found.append(name)
    return found


def number(text):
    """NaN of a word."""
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


def same_arrays(folder, other, rtol=0):
    """Two runs found the same but for times: bit for bit, or up to rounding."""
    with np.load(folder / "arrays.npz") as wanted, np.load(other / "arrays.npz") as found:
        assert set(wanted.files) == set(found.files) and wanted.files
        for name in wanted.files:
            if "seconds" not in name:
                np.testing.assert_allclose(found[name], wanted[name], rtol, err_msg=name)
                assert found[name].dtype == wanted[name].dtype, name


SHOWN = ("results.csv", "summary.json", "report.html", "figures/*")


def check_second_run(again, folder, capsys):
    """Runs a command again on its finished folder: as it is, then without what it shows.

    Every other file at a time, so that a figure lacks its PDF once and its PNG once.
    The caller makes sure that computing fails.

    Args:
        again: Runs the command and returns its exit code.
        folder: The run's folder.
        capsys: pytest's; what is printed must be the same each time.
    """
    shown = sorted(path for pattern in SHOWN for path in folder.glob(pattern))
    assert {"summary.json", "results.csv"} <= {path.name for path in shown}
    made = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in shown}
    capsys.readouterr()
    assert again() == 0
    printed = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in shown} == {p: m[0] for p, m in made.items()}
    for deleted in (shown[::2], shown[1::2]):
        for path in deleted:
            path.unlink()
        assert again() == 0
        assert capsys.readouterr().out == printed
        for path in deleted:
            assert path.read_bytes() == made[path][1], f"{path.name} came back as another"
