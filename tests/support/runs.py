"""Runs binaries in tests, and reads the files that they leave."""

import csv
import json
import math

import jax
import numpy as np
import pytest

from experiments.lab import cli, list_points
from experiments.lab.experiment import read_run
from experiments.verdicts.claims import answer_statements
from experiments.verdicts.statements import STATEMENTS
from tests.support.closeness import assert_close

SMALL = (
    "--depth=2",
    "--width=2",
    "--hidden_dim=8",
    "--n_repeat=2",
    "--n_paths=2",
    "--n_eval_data=5",
    "--num_seeds=2",
)
# For experiments without paths, whose depth the test sets.
SIZES = [flag for flag in SMALL if not any(w in flag for w in ("n_repeat", "n_paths", "depth"))]


def run(module, arguments, folder):
    """Runs a binary; returns its exit code."""
    return cli.execute(module.main, module.FLAGS, [*arguments, f"--output_dir={folder}"])


def finished(module, *arguments):
    """A fixture: the folder of one run of a binary, never written to again."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory):
        path = tmp_path_factory.mktemp("run")
        assert run(module, arguments, path) == 0
        return path

    return folder


def opened_with(module, monkeypatch, options):
    """(function that makes the set-up, function that identifies it) with which a run is opened."""
    opened = []

    def open_run(*arguments):
        opened.append(arguments)
        raise InterruptedError

    monkeypatch.setattr(module, "open_run", open_run)
    with pytest.raises(InterruptedError):
        module.main(options)
    ((opened_options, *functions),) = opened
    assert opened_options is options
    return functions


def result_of(module, folder):
    """Reads (results, set-up) of a run with one point: no axes, or only axes of its results."""
    (point,) = read_run(module, folder).points
    return point.results, point.setup


def parsed(module, *arguments):
    """Options of a binary: those of the first point, where there are axes."""
    return list_points(cli.parse_flags(module.FLAGS, list(arguments)))[0]


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
    """Lists the columns of results.csv whose fractions are all numbers of float32."""
    columns = []
    for name in rows(folder)[0]:
        values = np.array([number(row[name]) for row in rows(folder)])
        values = values[np.isfinite(values) & (values != np.round(values))]
        if len(values) and np.all(values == values.astype(np.float32)):
            columns.append(name)
    return columns


def number(text):
    """Reads a number; a word is NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seed_of(tree, index):
    """One seed's part of a pytree with a leading seed axis."""
    return jax.tree.map(lambda a: a[index], tree)


def contents(folder):
    """Reads {name: bytes} of all files that are made for readers."""
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


def same_arrays(folder, other_folder, rtol=0):
    """Checks that two runs have the same arrays but for times: bit for bit, or up to `rtol`."""
    with (
        np.load(folder / "arrays.npz") as expected,
        np.load(other_folder / "arrays.npz") as other_arrays,
    ):
        assert set(expected.files) == set(other_arrays.files) and expected.files
        for name in expected.files:
            if "seconds" not in name:
                assert_close(other_arrays[name], expected[name], rtol, err_msg=name)
                assert other_arrays[name].dtype == expected[name].dtype, name


SHOWN = ("results.csv", "summary.json", "report.html", "figures/*")


def check_second_run(again, folder, capsys):
    """Runs a command again on its finished folder: as it is, then with half of its files deleted.

    Every second file is deleted, so that a figure lacks its PDF once and its PNG once.
    The caller makes sure that computing fails.

    Args:
        again: Runs the command and returns its exit code.
        folder: The run's folder.
        capsys: pytest's; what is printed must be the same each time.
    """
    outputs = sorted(path for pattern in SHOWN for path in folder.glob(pattern))
    assert {"summary.json", "results.csv"} <= {path.name for path in outputs}
    originals = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in outputs}
    capsys.readouterr()
    assert again() == 0
    printed = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in outputs} == {
        p: m[0] for p, m in originals.items()
    }
    for deleted in (outputs[::2], outputs[1::2]):
        for path in deleted:
            path.unlink()
        assert again() == 0
        assert capsys.readouterr().out == printed
        for path in deleted:
            assert path.read_bytes() == originals[path][1], f"{path.name} came back as another"
