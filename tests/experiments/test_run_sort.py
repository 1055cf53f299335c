"""The binaries on paths by length, at tiny sizes: what they write, keep, redraw and refuse."""

import json
import shutil

import jax
import numpy as np
import pytest

from experiments import run_convex_hull, run_memorization, run_sort
from experiments.path_accuracy import accuracy_figures, accuracy_results
from experiments.train import arguments
from experiments.train.watched import layer_scalars
from rank_collapse.runs import metrics
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training import init_state, load_models
from rank_collapse.training.tasks import examples
from rank_collapse.training.training import batch_forward
from tests.support.runs import (
    SMALL,
    arrays,
    finished,
    parsed,
    result_of,
    rows,
    run,
    same_arrays,
    seed_of,
)

# Enough to learn to sort three letters out of four.
SORT = (
    *SMALL,
    "--num_labels=4",
    "--seq_len=3",
    "--n_train_data=120",
    "--n_epochs=12",
    "--batch_sz=10",
    "--learning_rate=1e-2",
    "--n_eval_data=20",
)
MEASURED = (*SORT, "--no_sub_path", "--path_len", "0")


folder = finished(run_sort, *MEASURED, "--keep_models", "--monitor")


def read_accuracy(folder, evaluation, metric="accuracy"):
    """Reads the mean over seeds of an evaluation of accuracies.csv that has no path length."""
    values = [float(r[metric]) for r in rows(folder) if r["evaluation"] == evaluation]
    assert len(values) == 2
    return np.mean(values)


@pytest.mark.full
def test_sort_writes_everything(folder):
    dataset, _ = result_of(run_sort, folder)
    assert dataset.path_length.values.tolist() == [0, 1, 2]
    assert dataset.num_paths.values.tolist() == [2, 5, 20]
    # All paths up to the depth are the whole model.
    accuracy = dataset.sel(metric="accuracy")
    for name, at in (("up_to", -1), ("from", 0), ("truncated", -1)):
        np.testing.assert_allclose(accuracy[name].isel(path_length=at), accuracy.whole, rtol=1e-6)
    shapley_sum = accuracy.shapley.sum("path_length")
    np.testing.assert_allclose(shapley_sum, accuracy.whole - accuracy.offset, rtol=1e-5)
    # Per seed: whole, whole_train, 2 baselines, offset, 3 sizes x 3 lengths x 2 repeats, 5 x 3.
    assert len(rows(folder)) == 2 * (5 + 18 + 15)
    semantics = {r["evaluation"]: r["semantics"] for r in rows(folder)}
    assert semantics["sampled"] == "recomputed" and semantics["truncated"] == "self-consistent"
    assert semantics["exact"] == semantics["offset"] == "frozen"
    assert not (folder / "checkpoints").exists()


@pytest.mark.full
def test_sort_learns(folder):
    losses = arrays(folder)["results/losses"]
    assert losses.shape == (2, 12) and (losses[:, -1] < 0.7 * losses[:, 0]).all()
    assert read_accuracy(folder, "whole") > read_accuracy(folder, "majority baseline") + 0.2


@pytest.mark.full
def test_kept_models_give_the_accuracies_of_the_table(folder):
    config, models = load_models(folder / "models.safetensors")
    options = parsed(run_sort, *SORT)
    setup = run_sort.make_task(options)
    table = {(r["evaluation"], r["seed"]): float(r["accuracy"]) for r in rows(folder)}

    @jax.jit
    def accuracies(model, key):
        data = setup.make_data(jax.random.split(key)[0])
        logits = {part: batch_forward(model, data[part], config) for part in ("eval", "train")}
        return {part: examples.token_accuracy(x, data[part]) for part, x in logits.items()}

    for seed, key in enumerate(seed_keys(options.seed, 2)):
        model_accuracies = accuracies(seed_of(models, seed), key)
        assert table["whole", str(seed)] == pytest.approx(float(model_accuracies["eval"]))
        assert table["whole_train", str(seed)] == pytest.approx(float(model_accuracies["train"]))


@pytest.mark.full
def test_what_is_watched_has_a_line_for_every_seed_and_epoch(folder):
    lines = metrics.read(folder / metrics.NAME)
    steps = [(line["seed"], line["step"]) for line in lines]
    assert steps == [(seed, epoch) for seed in (0, 1) for epoch in range(13)]
    aux = [line["loss"] for line in lines if line["step"] > 0]
    np.testing.assert_array_equal(aux, arrays(folder)["results/losses"].ravel())
    config, models = load_models(folder / "models.safetensors")
    options = parsed(run_sort, *SORT)
    key_data, key_state = jax.random.split(seed_keys(options.seed, 2)[1])
    setup = run_sort.make_task(options)
    data = setup.make_data(key_data)
    untrained = init_state(key_state, arguments.make_hyper(options), setup.recipe).model
    (first,) = (line for line in lines if line["seed"] == 1 and line["step"] == 0)
    for line, model in ((first, untrained), (lines[-1], seed_of(models, 1))):
        for name, by_layer in layer_scalars(model, data, config).items():
            np.testing.assert_allclose(line[name], by_layer, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("flag", ["monitor", "keep_models"])
def test_files_asked_for_later_are_refused(flag, folder, tmp_path, capsys):
    saved = arrays(folder)
    plain = {name: array for name, array in saved.items() if "/model/" not in name}
    np.savez(tmp_path / "arrays.npz", **plain)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"arrays": [*plain]}))
    assert run(run_sort, [*MEASURED, f"--{flag}"], tmp_path) == 2
    assert f"was trained without --{flag}: --overwrite" in capsys.readouterr().err


@pytest.mark.full
def test_a_run_that_keeps_weights_goes_on_with_them(folder, tmp_path):
    """Further seeds had none, and then arrays.npz was not of two seeds."""
    np.savez(tmp_path / "arrays.npz", **{name: a[:1] for name, a in arrays(folder).items()})
    shutil.copy(folder / "config.json", tmp_path)
    assert run(run_sort, MEASURED, tmp_path) == 0
    same_arrays(folder, tmp_path, rtol=1e-3)
    assert len(load_models(tmp_path / "models.safetensors")[1].classifier.b) == 2


@pytest.mark.full
def test_a_seed_that_diverged_is_kept_apart(folder):
    dataset, setup = result_of(run_sort, folder)
    dataset = dataset.assign(fine=("seed", [True, False]))
    assert {row.draws for row in accuracy_results.judge_claims(dataset, setup, "sorting")} <= {0, 1}
    comparison, *_ = accuracy_results.compare_results(dataset, setup)
    accuracy = float(dataset.whole.sel(metric="accuracy", seed=0))
    assert comparison.measured == f"{accuracy:.3f}"
    table = accuracy_results.make_rows(dataset, setup)
    assert {(r["seed"], r["diverged"]) for r in table} == {(0, 0), (1, 1)}
    for name in run_sort.EXPERIMENT.figures:
        getattr(accuracy_figures, f"{name}_figure")(dataset, setup)


HULL = "--seq_len=8 --hidden_dim=16 --ffn2 --do_mlp --n_train_data=1000 --n_epochs=20 "
HULL += "--batch_sz=10 --learning_rate=3e-3 --n_eval_data=40"
LABELS = "--task_name=shipped --max_seq_length=20 --n_train_data=4 --n_paths=5 --n_repeat=1 "
LABELS += "--num_train_epochs=60 --batch_sz=2 --learning_rate=1e-2"


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "arguments", "metric", "guess"),
    [
        (run_convex_hull, HULL, "auc", lambda folder: 0.55),
        (run_memorization, LABELS, "accuracy", lambda f: read_accuracy(f, "majority baseline")),
    ],
)
def test_other_tasks_are_learned_better_than_by_guessing(
    module, arguments, metric, guess, tmp_path
):
    assert run(module, [*SMALL, *arguments.split()], tmp_path) == 0
    assert read_accuracy(tmp_path, "whole", metric) > guess(tmp_path) + 0.1
