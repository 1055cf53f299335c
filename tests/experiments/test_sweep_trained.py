"""Cells of a sweep that differ in floats alone: one ensemble, or one program, and equal results."""

import json

import jax
import numpy as np
import pytest
from trained_runs import run

from experiments import run_collapse, run_sort
from experiments.collapse.ensemble import Programs
from experiments.shell import cli
from rank_collapse.training import ensemble

SORT = (
    "--depth=1", "--width=2", "--hidden_dim=8", "--n_epochs=3", "--n_repeat=1", "--n_paths=2",
    "--n_train_data=9", "--n_eval_data=5", "--batch_sz=4", "--num_seeds=2", "--num_labels=4",
    "--seq_len=3", "--epochs_per_chunk=2",
)  # fmt: skip
COLLAPSE = (
    "--num_heads=2", "--d_model=8", "--num_tokens=5", "--num_seeds=2", "--variants=san,san_skip",
    "--inputs=gaussian", "--depth=2",
)  # fmt: skip


def check_same(folder, alone):
    """A cell left what the binary leaves without a sweep, bit for bit but for times."""
    with np.load(folder / "arrays.npz") as ours, np.load(alone / "arrays.npz") as theirs:
        assert set(ours.files) == set(theirs.files) and ours.files
        for name in ours.files:
            if "seconds" not in name:
                np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    assert (folder / "results.csv").read_bytes() == (alone / "results.csv").read_bytes()
    configs = [json.loads((f / "config.json").read_text())["config"] for f in (folder, alone)]
    assert configs[0] == configs[1]


def test_learning_rates_are_one_ensemble(tmp_path, monkeypatch, capsys):
    made = []
    begin = ensemble.Ensemble.train

    def train(self, keys, *arguments, **options):
        made.append((id(self), len(keys)))
        return begin(self, keys, *arguments, **options)

    monkeypatch.setattr(ensemble.Ensemble, "train", train)
    folder = tmp_path / "sweep"
    grid = "--sweep=learning_rate,init_scale=1e-3:1,3e-3:0.5;weight_decay=0,0.1"
    # Two processes expected: units of one cell each, which share their programs all the same.
    assert run(run_sort, [*SORT, grid, "--slice=0/2"], folder) == 0
    assert len(made) == 2 and {runs for _, runs in made} == {2} and len(dict(made)) == 1
    assert run(run_sort, [*SORT, grid, "--slice=1/2"], folder) == 0
    made.clear()
    assert run(run_sort, [*SORT, grid], tmp_path / "one") == 0
    assert [runs for _, runs in made] == [8]
    assert not list((tmp_path / "one" / "units").iterdir())
    alone = [*SORT, "--learning_rate=3e-3", "--init_scale=0.5", "--weight_decay=0.1"]
    assert run(run_sort, alone, tmp_path / "alone") == 0
    cell = "cells/learning_rate=3e-3,init_scale=0.5,weight_decay=0.1"
    check_same(folder / cell, tmp_path / "alone")
    check_same(tmp_path / "one" / cell, tmp_path / "alone")
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["mean"]) == 4 and all(m["seeds"] == 2 for m in summary["mean"].values())


def test_a_cell_all_of_whose_seeds_diverge_fails_alone(tmp_path, capsys):
    grid = "--sweep=learning_rate=1e-3,1e30"
    assert run(run_sort, [*SORT, grid], tmp_path) == 1
    out, err = capsys.readouterr()
    assert "failed: learning_rate=1e30: every seed diverged at learning_rate=1e+30" in err
    assert "seed 0 of cell 2 diverged" in err and "1 of 2 cells are done" in out


def test_scales_and_gains_share_their_programs(tmp_path, monkeypatch):
    grid = "--sweep=weight_scale=0.5,1;skip_gain=0.5,1"
    assert run(run_collapse, [*COLLAPSE, "--weight_scale=0.5"], tmp_path / "alone") == 0
    compiled = []
    before = Programs.compile
    monkeypatch.setattr(Programs, "compile", lambda *a: (compiled.append(1), before(*a)))
    assert run(run_collapse, [*COLLAPSE, grid], tmp_path / "sweep") == 0
    assert len(compiled) == 1
    check_same(tmp_path / "sweep" / "cells" / "weight_scale=0.5,skip_gain=1", tmp_path / "alone")


@pytest.mark.parametrize("module", [run_sort, run_collapse])
def test_only_floats_are_shared(module):
    """What a binary calls traced are floats, and none of them decides a shape."""
    for name in module.FLAGS.traced:
        if name in module.FLAGS:
            value = module.FLAGS[name].default
            assert isinstance(value, float) or [float(v) for v in value], name
    assert module.FLAGS.aside >= cli.EXECUTION and jax.devices()
