"""run_width on made-up accuracies."""

from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

from experiments import run_width
from experiments.lab.experiment import read_run
from rank_collapse.runs import metrics
from tests.support.closeness import assert_close
from tests.support.runs import SIZES, finished, parsed, result_of, rows


def test_the_deepest_is_set_beside_the_shallowest_in_any_order():
    """--depths=12,1 is --depths=1,12; a seed that diverged at one depth has no difference."""
    accuracies = {"depth 12": [0.9, 0.8, 0.5], "depth 1": [0.88, 0.4, 0.5], "depth 3": [0.0] * 3}
    results = {
        name: {"diverged_at": np.array([-1, -1, 2 if "12" in name else -1])}
        | {"whole": {"accuracy": np.array(values)}}
        for name, values in accuracies.items()
    }
    cases = {
        name: SimpleNamespace(
            recipe=SimpleNamespace(config=SimpleNamespace(depth=int(name.split()[1])))
        )
        for name in results
    }
    (row,) = run_width.judge_claims(results, cases)
    assert row.setting == "12 layers and 1" and row.draws == 2
    assert row.estimate == pytest.approx(0.5)  # of the two seeds, one is within .05


WIDTH_ARGUMENTS = (
    *SIZES,
    "--depth=2",
    "--depths=1,4",
    "--num_labels=4",
    "--seq_len=3",
    "--n_train_data=9",
    "--n_epochs=2",
    "--batch_sz=4",
)


by_depth = finished(run_width, *WIDTH_ARGUMENTS, "--keep_models", "--monitor")


def count_parameters(depth, width):
    """Counts those of the sorting network: letters, positions, projection and norm of the
    embedding, four matrices with biases and a norm per layer, the classifier."""
    embedding = 4 * width + 3 * width + (width + 1) * width + 2 * width
    layer = 4 * (width + 1) * width + 2 * width
    return embedding + depth * layer + (width + 1) * 4


@pytest.mark.full
def test_every_depth_has_the_width_nearest_in_parameters(by_depth):
    target = count_parameters(2, 8)
    for depth in (1, 4):
        shape = run_width.describe_shape(result_of(run_width, by_depth)[1][f"depth {depth}"])
        widths = range(2, 40, 2)  # a multiple of the heads; at depth 4 the next above is nearest
        best = min(widths, key=lambda w, d=depth: abs(count_parameters(d, w) - target))
        assert (shape["hidden_dim"], shape["parameters"]) == (best, count_parameters(depth, best))
        models = safetensors.numpy.load_file(by_depth / "models" / f"depth-{depth}.safetensors")
        assert sum(stacked[0].size for stacked in models.values()) == shape["parameters"]


@pytest.mark.full
def test_what_is_watched_has_a_file_for_each_depth(by_depth):
    lines_by_file = {
        path.name: metrics.read(path) for path in (by_depth / metrics.FOLDER).iterdir()
    }
    assert lines_by_file.keys() == {"depth-1.jsonl", "depth-4.jsonl"}
    for name, lines in lines_by_file.items():
        steps = [(line["seed"], line["step"]) for line in lines]
        assert steps == [(seed, epoch) for seed in (0, 1) for epoch in range(3)]
        depth = int(name[6:7])
        assert all(len(line["residual_ratio"]) == depth for line in lines)
    assert not (by_depth / metrics.NAME).exists()


@pytest.mark.full
def test_widths_shown_are_of_the_table(by_depth):
    """Each depth, and the deepest beside the shallowest."""
    report, table = read_run(run_width, by_depth), rows(by_depth)
    means = {d: np.mean([float(r["accuracy"]) for r in table if r["depth"] == d]) for d in "14"}
    assert len(table) == 4 and {r["diverged"] for r in table} == {"0"}
    assert [line.measured for line in report.comparisons] == pytest.approx([*means.values()])
    assert ["depth 1," in line.quantity for line in report.comparisons] == [True, False]
    (row,) = report.claims
    assert row.setting == "4 layers and 1" and row.draws == 2
    by_depth_and_seed = {(r["depth"], r["seed"]): float(r["accuracy"]) for r in table}
    gains = [by_depth_and_seed["4", s] - by_depth_and_seed["1", s] for s in ("0", "1")]
    assert row.estimate == pytest.approx(np.mean(np.abs(gains) <= 0.05))


def test_losses_and_accuracies_drawn_are_of_the_seeds_that_did_not_diverge(monkeypatch):
    losses = np.array([[4.0, 1.0], [np.nan, np.nan], [9.0, 4.0]])
    results = {
        "depth 1": {
            "diverged_at": np.array([-1, 0, -1]),
            "losses": losses,
            "whole": {"accuracy": np.array([0.5, 0.0, 0.75])},
        }
    }
    config = SimpleNamespace(depth=1, d_model=8)
    cases = {"depth 1": SimpleNamespace(recipe=SimpleNamespace(config=config))}
    loss, accuracy = run_width.width_figure(results, cases).axes
    assert_close(loss.lines[0].get_ydata(), [6.0, 2.0])  # geometric means
    assert loss.lines[0].get_label() == "1 layer, width 8"
    assert_close(accuracy.lines[0].get_ydata(), [0.625])
    untrained = {"depth 1": results["depth 1"] | {"losses": losses[:, :0]}}
    assert run_width.width_figure(untrained, cases) is None
    shape = {"depth": 1, "hidden_dim": 8, "parameters": 90}
    monkeypatch.setattr(run_width, "describe_shape", lambda case: shape)
    (line,) = run_width.compare_results(results, cases)
    assert (line.quantity, line.measured) == ("token accuracy at depth 1, width 8", 0.625)
    assert line.note == "standard deviation 0.125 over 2 seeds; 90 parameters"


def test_widths_are_multiples_of_the_heads_nearest_in_parameters():
    """A network of too many layers has one feature a head."""
    flags, depths = ("--depth=2", "--d_model=8", "--width=2", "--num_labels=4"), (4, 1, 40)
    options = parsed(run_width, *flags, "--seq_len=3", f"--depths={','.join(map(str, depths))}")
    target = count_parameters(2, 8)
    cases = run_width.make_cases(options)
    assert [*cases] == [case.name for case in cases.values()] == [f"depth {d}" for d in depths]
    for depth, case in zip(depths, cases.values(), strict=True):
        best = min(range(2, 40, 2), key=lambda w, d=depth: abs(count_parameters(d, w) - target))
        expected = {"depth": depth, "hidden_dim": best, "parameters": count_parameters(depth, best)}
        assert run_width.describe_shape(case) == expected
        assert case.recipe.config.ff_width == case.recipe.config.embedding.d_embed == best
    assert best == 2
