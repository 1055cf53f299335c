"""Every experiment over an axis: each of two points has the rows and claims of its own run.

The runs are made of kept arrays, those of the second point with other numbers; nothing is compiled
or drawn.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import reproduce
from experiments.lab import cli, run
from experiments.lab.experiment import import_experiment
from experiments.lab.flags import Mode
from experiments.lab.folder import RunFolder
from experiments.lab.grid import list_points
from tests.support.golden import read_arrays
from tests.support.golden_runs import arrays_path, list_arguments

HAVE_SEED = [name for name in reproduce.EXPERIMENTS if "seed" in import_experiment(name).FLAGS]


def change_numbers(arrays):
    """Lowers the magnitude of every fraction by up to a tenth; counts and places stay."""
    rng = np.random.default_rng(0)
    return {
        name: np.where(a == np.round(a), a, a * rng.uniform(0.9, 1.0, a.shape)).astype(a.dtype)
        for name, a in arrays.items()
    }


def make_run(name, module, parts, folder):
    """Makes the run of an experiment over the axis --seed, of {seed: arrays of its point}."""
    options = cli.parse_flags(module.FLAGS, list_arguments(module))
    options.output_dir = str(folder)
    points = list_points(options)
    options.axes = options.axes | {"seed": [str(seed) for seed in parts]}
    arrays = {
        f"{point.prefix}seed={seed}/{key.removeprefix(point.prefix)}": values
        for seed, part in parts.items()
        for point in points
        for key, values in part.items()
        if key.startswith(point.prefix)
    }
    assert {point.prefix for point in list_points(options)} == {
        f"{point.prefix}seed={seed}/" for point in points for seed in parts
    }
    options.mode = Mode(begin_with=arrays)
    return module.main(options)


def describe(shown):
    """Writes the rows, claims and comparisons of a run, in the order of the texts."""
    claims = [
        f"{c.key} | {c.setting} | {c.draws} of {c.num_made} | {c.estimate} | {c.note} | "
        f"{c.interval(0.95)}"
        for c in shown.claims
    ]
    return sorted([*map(str, shown.rows), *claims, *map(str, shown.comparisons)])


@pytest.mark.parametrize("name", HAVE_SEED)
def test_points_of_an_axis_are_their_runs(name, tmp_path, monkeypatch):
    """Labels in words distinguish the points, and the finding belongs to the first point; every
    point of a trained experiment saves its models."""
    module, drawn, saved = import_experiment(name), [], []
    trains = hasattr(module, "save_models")

    def draw(*_):
        return SimpleNamespace(get_suptitle=str, suptitle=lambda *_, **__: None)

    for key in vars(module):
        if key.endswith("_figure") or key.startswith("plot_"):
            monkeypatch.setattr(module, key, draw)
    if trains:
        monkeypatch.setattr(module, "save_models", lambda point, tasks: saved.append(len(tasks)))
    monkeypatch.setattr(run.labelled, "plot_axes", lambda *_: None)
    monkeypatch.setattr(RunFolder, "save_figure", lambda folder, name, _: drawn.append(name))
    arrays = read_arrays(arrays_path(name).read_text("utf-8"))
    parts = {0: arrays, 1: change_numbers(arrays)}
    singles, figures = [], []
    for seed, part in parts.items():
        singles.append(make_run(name, module, {seed: part}, tmp_path / str(seed)))
        figures += drawn
        drawn.clear()
    num_models = sum(saved)
    both = make_run(name, module, parts, tmp_path / "both")
    assert sorted(drawn) == sorted(figures)
    assert sum(saved) == 2 * num_models and bool(num_models) == trains
    assert describe(both) == sorted(itertools.chain(*map(describe, singles)))
    assert both.finding == singles[0].finding
    assert singles[0].rows and str(singles[0].rows) != str(singles[1].rows)
