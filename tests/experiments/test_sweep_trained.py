"""Cells of a sweep that differ in floats alone: one ensemble, or one program, and equal results."""

import json

import numpy as np
import pytest
import quick_training
from quick_training import SMALL
from trained_runs import run, same_arrays
from two_processes import python

from experiments import run_collapse, run_sort, run_transformer
from experiments.collapse import measure
from experiments.shell import cli
from rank_collapse.runs import metrics
from rank_collapse.training.ensemble import Ensemble

GRID = "--sweep=learning_rate,init_scale=1e-3:1,3e-3:0.5"
CELL = "cells/learning_rate=3e-3,init_scale=0.5"


def check_same(folder, alone, rtol=0):
    """A cell left what the binary leaves without a sweep, but for times and `rtol`."""
    same_arrays(alone, folder, rtol)
    found, wanted = (read_table(f / "results.csv") for f in (folder, alone))
    assert found.dtype.names == wanted.dtype.names
    for name in wanted.dtype.names:
        if wanted[name].dtype.kind == "U":
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
        else:
            np.testing.assert_allclose(found[name], wanted[name], rtol, err_msg=name)
    configs = [json.loads((f / "config.json").read_text())["config"] for f in (folder, alone)]
    assert configs[0] == configs[1]


def read_table(path):
    return np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")


@pytest.fixture
def ensembles(monkeypatch):
    """(which, how many runs) of each call of `Ensemble.train`."""
    calls, train = [], Ensemble.train

    def counted(self, keys, *arguments, **options):
        calls.append((id(self), len(keys)))
        return train(self, keys, *arguments, **options)

    monkeypatch.setattr(Ensemble, "train", counted)
    return calls


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one cell without a sweep."""
    folder = tmp_path_factory.mktemp("alone")
    flags = ["--learning_rate=3e-3", "--init_scale=0.5"]
    assert run(quick_training, [*SMALL, *flags], folder) == 0
    return folder


def test_a_process_of_two_computes_half_of_the_cells_as_one_ensemble(alone, ensembles, tmp_path):
    grid = f"{GRID};weight_decay=0,0.1"
    assert run(quick_training, [*SMALL, grid, "--slice=1/2"], tmp_path) == 0
    assert [runs for _, runs in ensembles] == [4]
    check_same(tmp_path / f"{CELL},weight_decay=0", alone)


def test_a_cell_all_of_whose_seeds_diverge_fails_alone(tmp_path, capsys):
    grid = "--sweep=learning_rate,init_scale=1e-3:1,1e30:9"
    assert run(quick_training, [*SMALL, grid], tmp_path) == 1
    out, err = capsys.readouterr()
    assert "failed: learning_rate=1e30,init_scale=9" in err and "every seed diverged at" in err
    assert "seed 0 of cell 2 diverged" in err and "1 of 2 cells are done" in out


@pytest.mark.slow
def test_a_cell_whose_values_mean_nothing_fails_alone(ensembles, tmp_path, capsys):
    """As label_smoothing=1.5 of run_transformer; --warmup and --label_smoothing are its own."""
    values = [a for a in SMALL if "width" not in a and "seq_len" not in a]
    grid = "--sweep=label_smoothing=1.5,0,0.1"
    arguments = [*values, "--width=1", "--seq_len=2", "--n_epochs=1", "--task=copy", grid]
    assert run(run_transformer, arguments, tmp_path) == 1
    out, err = capsys.readouterr()
    (failed,) = [line for line in err.splitlines() if line.startswith("failed: ")]
    assert failed == "failed: label_smoothing=1.5: label_smoothing=1.5 is not in [0, 1)"
    assert "2 of 3 cells are done" in out and [runs for _, runs in ensembles] == [4]


@pytest.mark.slow
def test_chunks_of_seeds_that_fit_into_memory_change_nothing(ensembles, tmp_path, monkeypatch):
    arguments, folder = [*SMALL, "--num_seeds=4", "--keep_models"], tmp_path / "chunks"
    assert run(quick_training, arguments, tmp_path / "whole") == 0
    assert [runs for _, runs in ensembles] == [4]
    ensembles.clear()

    train = Ensemble.train

    def interrupted(self, *arguments, **options):
        if len(ensembles) == 1:
            raise KeyboardInterrupt
        return train(self, *arguments, **options)

    monkeypatch.setattr(Ensemble, "train", interrupted)
    assert run(quick_training, [*arguments, "--memory_gb=1e-9"], folder) == 130
    assert [runs for _, runs in ensembles] == [2]
    monkeypatch.setattr(Ensemble, "train", train)
    # Chunks that are done are read, also where there is room for all.
    assert run(quick_training, arguments, folder) == 0
    assert [runs for _, runs in ensembles] == [2, 2]
    check_same(folder, tmp_path / "whole")
    saved = [tmp_path / name / "models.safetensors" for name in ("whole", "chunks")]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    assert "for 2 of 4 seeds at a time" in (folder / "log.txt").read_text()
    assert not (folder / "checkpoints").exists()


@pytest.mark.slow
def test_chunks_done_before_the_monitor_was_asked_for_are_trained_again(tmp_path, monkeypatch):
    """One that is saved, and one that was interrupted before it was measured."""
    arguments = [
        *SMALL,
        "--num_seeds=4",
        "--memory_gb=1e-9",
        "--n_epochs=2",
        "--checkpoint_seconds=0",
    ]
    train, trained = Ensemble.train, []

    def interrupted(self, *arguments, **options):
        trained.append(train(self, *arguments, **options))
        if len(trained) == 2:
            raise KeyboardInterrupt
        return trained[-1]

    monkeypatch.setattr(Ensemble, "train", interrupted)
    assert run(quick_training, arguments, tmp_path) == 130
    monkeypatch.setattr(Ensemble, "train", train)
    assert run(quick_training, [*arguments, "--monitor"], tmp_path) == 0
    steps = [(row["seed"], row["step"]) for row in metrics.read(tmp_path / metrics.NAME)]
    assert steps == [(seed, epoch) for seed in range(4) for epoch in range(3)]


@pytest.mark.slow
def test_scales_and_gains_are_cells_of_one_program(tmp_path, monkeypatch):
    small = [a for a in run_collapse.EXPERIMENT.presets["tiny"] if "variants" not in a]
    small += ["--variants=san", "--inputs=gaussian"]
    grid = "--sweep=weight_scale=0.5,1;skip_gain=0.5,1"
    assert run(run_collapse, [*small, "--weight_scale=0.5"], tmp_path / "alone") == 0
    made, make = [], measure.Mapped
    monkeypatch.setattr(measure, "Mapped", lambda *a, **how: made.append(1) or make(*a, **how))
    assert run(run_collapse, [*small, grid], tmp_path / "sweep") == 0
    assert len(made) == 1
    check_same(tmp_path / "sweep" / "cells" / "weight_scale=0.5,skip_gain=1", tmp_path / "alone")


@pytest.mark.parametrize("module", [run_sort, run_collapse])
def test_only_floats_are_shared(module):
    """What a binary calls traced are floats, and none of them decides a shape."""
    for name in module.FLAGS.traced:
        if name in module.FLAGS:
            value = module.FLAGS[name].default
            assert isinstance(value, float) or [float(v) for v in value], name
    assert module.FLAGS.aside >= cli.EXECUTION


JOINED = "--sweep=learning_rate=3e-4,1e-3,3e-3,1e-2;init_scale=0.5,1"  # two a worker at a time


@pytest.mark.slow
@pytest.mark.parametrize("grid", [GRID, JOINED])
def test_workers_train_joined_cells_as_one_process_does_but_for_rounding(grid, tmp_path):
    """Two workers cut an ensemble in parts, whose programs XLA rounds otherwise: training alike,
    measured values up to 5e-7 apart."""
    assert run(quick_training, [*SMALL, grid], tmp_path / "serial") == 0
    shared = ("--workers=2", f"--output_dir={tmp_path / 'shared'}")
    done = python("tests/quick_training.py", *SMALL, grid, *shared)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = sorted(path.name for path in (tmp_path / "serial" / "cells").iterdir())
    assert len(cells) in (2, 8)
    for cell in cells:
        with (
            np.load(tmp_path / "serial" / "cells" / cell / "arrays.npz") as wanted,
            np.load(tmp_path / "shared" / "cells" / cell / "arrays.npz") as found,
        ):
            assert set(wanted.files) == set(found.files)
            for name in (n for n in wanted.files if "seconds" not in n):
                np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=5e-7)
    assert not list((tmp_path / "shared").glob("units/*"))
