"""run_width at tiny size: networks of one number of parameters, and what is written of them."""

import numpy as np
import pytest
import safetensors.numpy
from trained_runs import SMALL, finished, rows

from experiments import run_width
from rank_collapse.runs import metrics

pytestmark = pytest.mark.slow

SIZES = [a for a in SMALL if "n_repeat" not in a and "n_paths" not in a]
ARGUMENTS = (
    *SIZES,
    "--depths=1,4",
    "--num_labels=4",
    "--seq_len=3",
    "--n_train_data=9",
    "--n_epochs=2",
    "--batch_sz=4",
)


folder = finished(run_width, *ARGUMENTS, "--keep_models", "--monitor")


def parameters(depth, width):
    """Of the sorting network by hand: letters, positions, projection and norm of the embedding,
    four matrices with biases and a norm per layer, the classifier."""
    embedding = 4 * width + 3 * width + (width + 1) * width + 2 * width
    layer = 4 * (width + 1) * width + 2 * width
    return embedding + depth * layer + (width + 1) * 4


def test_every_depth_has_the_width_nearest_in_parameters(folder):
    target = parameters(2, 8)
    for depth in (1, 4):
        found = run_width.shape_of(run_width.EXPERIMENT.results(folder)[1][f"depth {depth}"])
        widths = range(2, 40, 2)  # a multiple of the heads; at depth 4 the next above is nearest
        best = min(widths, key=lambda w, d=depth: abs(parameters(d, w) - target))
        assert (found["hidden_dim"], found["parameters"]) == (best, parameters(depth, best))
        models = safetensors.numpy.load_file(folder / "models" / f"depth-{depth}.safetensors")
        assert sum(stacked[0].size for stacked in models.values()) == found["parameters"]


def test_what_is_watched_has_a_file_for_each_depth(folder):
    found = {path.name: metrics.read(path) for path in (folder / metrics.FOLDER).iterdir()}
    assert found.keys() == {"depth-1.jsonl", "depth-4.jsonl"}
    for name, lines in found.items():
        steps = [(line["seed"], line["step"]) for line in lines]
        assert steps == [(seed, epoch) for seed in (0, 1) for epoch in range(3)]
        depth = int(name[6:7])
        assert all(len(line["residual_ratio"]) == depth for line in lines)
    assert not (folder / metrics.NAME).exists()


def test_what_is_shown_is_of_the_table(folder):
    """Each depth, and the deepest beside the shallowest."""
    shown, table = run_width.EXPERIMENT.read(folder), rows(folder)
    means = {d: np.mean([float(r["accuracy"]) for r in table if r["depth"] == d]) for d in "14"}
    assert len(table) == 4 and {r["diverged"] for r in table} == {"0"}
    assert [line.measured for line in shown.comparisons] == pytest.approx([*means.values()])
    assert ["depth 1," in line.quantity for line in shown.comparisons] == [True, False]
    (row,) = shown.claims
    assert row.setting == "4 layers and 1" and row.draws == 2
    assert row.estimate == pytest.approx(means["4"] - means["1"])
