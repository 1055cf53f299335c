"""How tests run a binary, and read what it left."""

import csv
import json
import math

import jax
import numpy as np

from experiments.shell import cli

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
