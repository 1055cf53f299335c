"""Networks trained in a run folder: what is kept of them, and how progress names them."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments import run_sort
from experiments.lab import Chunk, RunFolder
from experiments.train import train_networks as module
from experiments.train.trained_tasks import ALONE
from tests.support.runs import SMALL, parsed


def train_without_computing(options, path, monkeypatch):
    """Returns the arrays of `train_networks`, of two seeds with weights [4] of ones."""
    trained = SimpleNamespace(state=SimpleNamespace(model={"w": np.ones((3, 4))}))  # one is padding
    measured = {"loss": {"last": np.zeros(2)}, "diverged_at": np.full(2, -1)}
    monkeypatch.setattr(module.Ensemble, "train", lambda *_, **__: trained)
    monkeypatch.setattr(module, "measure_chunk", lambda *_: dict(measured))
    with RunFolder(path, {}) as run:
        task = run_sort.make_task(options)
        return module.train_networks(options, {ALONE: task}, run, lambda *_: {})[ALONE]


@pytest.mark.parametrize("flags", [(), ("--keep_models",)])
def test_weights_are_kept_only_where_they_are_asked_for(flags, tmp_path, monkeypatch):
    arrays = train_without_computing(parsed(run_sort, *SMALL, *flags), tmp_path, monkeypatch)
    assert arrays.keys() == {"loss/last", "diverged_at"} | ({"model/w"} if flags else set())
    assert all(len(array) == 2 for array in arrays.values())


def test_further_seeds_have_weights_where_the_first_ones_do(tmp_path, monkeypatch):
    for flags in ("--num_seeds=2 --keep_models", "--num_seeds=4"):
        options = parsed(run_sort, *SMALL, *flags.split())
        arrays = train_without_computing(options, tmp_path, monkeypatch)
        assert arrays["model/w"].shape == (options.num_seeds, 4)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["a", "a"], "a"),
        (["b", "a", "a"], "b and 1 more"),
        (["b", "a", "c"], "b and 2 more"),
    ],
)
def test_progress_names_the_first_cell_and_counts_the_others(cells, words):
    assert module.describe_cells(Chunk(cells, range(len(cells)), None, None)) == words


def test_a_run_is_named_by_its_seed_and_its_cell_where_there_are_several():
    assert module.describe_run(ALONE, 3) == "seed 3"
    assert module.describe_run(f"{ALONE}/rate=0.1", 3) == "seed 3 of rate=0.1"
    assert module.describe_run("depth 4", 0) == "seed 0 of depth 4"
