"""The binaries on paths by length, at tiny sizes: what they write, keep, redraw and refuse."""

import json
import shutil

import jax
import numpy as np
import pytest
import xarray as xr
from trained_runs import (
    SMALL,
    answered,
    arrays,
    finished,
    parsed,
    result_of,
    rows,
    run,
    same_arrays,
    seed_of,
    verdicts,
)

from experiments import run_convex_hull, run_memorization, run_sort
from experiments.lab.labelled import make_dataset
from experiments.paper.paths import figures, results
from experiments.paper.paths.measure import BASELINES
from experiments.paper.paths.results import accuracies
from experiments.train import arguments
from experiments.train.watched import layer_scalars
from experiments.verdicts.claims import FINDING
from rank_collapse.runs import metrics
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training import init_state, load_models
from rank_collapse.training.tasks import examples
from rank_collapse.training.training import batch_forward

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
    """Reads the mean over seeds of an evaluation of results.csv that has no path length."""
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
    setup = run_sort.make_setup(options)
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
    setup = run_sort.make_setup(options)
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
    assert {row.draws for row in results.judge_claims("sorting", dataset, setup)} <= {0, 1}
    comparison, *_ = results.compare_results(dataset, setup)
    accuracy = float(dataset.whole.sel(metric="accuracy", seed=0))
    assert comparison.measured == f"{accuracy:.3f}"
    table = results.make_rows(dataset, setup)
    assert {(r["seed"], r["diverged"]) for r in table} == {(0, 0), (1, 1)}
    for draw in figures.FIGURES.values():
        draw(dataset, setup)


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


SETUP = run_sort.make_setup(parsed(run_sort, "--depth=3"))


def make_measurements(truncated, whole_accuracy, baseline, tokens, sets=None):
    """Makes what `accuracies` reads from curves [s, L + 1] of networks that did not diverge."""
    ones = np.ones(len(truncated))
    variables = {
        f"{name}/accuracy": np.asarray(values)
        for name, values in {
            "truncated": truncated,
            "whole": whole_accuracy * ones,
            "offset": 0.7 * ones,
            BASELINES[0]: baseline * ones,
            BASELINES[1]: 0.4 * ones,
        }.items()
    }
    dataset = make_dataset(variables, ("metric", "path_length"))
    dataset = dataset.assign_coords(path_length=np.arange(dataset.sizes["path_length"]))
    if sets is not None:
        places = ("seed", "num_paths", "metric", "path_length", "repeat")
        dataset["sampled"] = xr.DataArray(sets, {"num_paths": [20], "metric": ["accuracy"]}, places)
    return dataset.assign(tokens=("seed", tokens * ones), fine=("seed", ones > 0))


def make_results(carried=1.0, sets=(0.3, 0.9, 0.4, 0.2), seeds=8, below=0):
    """Makes results of a network of depth 3, in which even growth is a mean length of 1.5.

    Σ_k k (a_k − a_{k−1})/(a_3 − baseline) = carried: a_0 = a_1 = a_2 are carried/3 of the way from
    the whole model's .95 down to the baseline's .6. The baseline's standard error is .01.
    """
    wobble = 0.01 * np.arange(seeds)[:, None]
    curves = np.insert(np.repeat(0.95 - 0.35 * (carried + wobble) / 3, 3, axis=1), 3, 0.95, axis=1)
    curves[:below, 1] = 0.57
    sampled = (wobble + sets)[:, None, None, :, None]
    return make_measurements(curves, whole_accuracy=0.95, baseline=0.6, tokens=2400, sets=sampled)


@pytest.mark.parametrize(
    ("fields", "suffice", "one", "falls"),
    [
        ({}, "within", "within", "within"),
        # early for a path, whose mean length is 2, but no earlier than even growth
        ({"carried": 1.7}, "outside", "within", "within"),
        ({"carried": 1.465}, "undecided", "within", "within"),  # in half of the networks
        ({"sets": (0.3, 0.65, 0.7, 0.8)}, "within", "outside", "outside"),
        # below the baseline, but for chance, sets guess at all lengths and do not fall
        ({"sets": (0.3, 0.5, 0.4, 0.3)}, "within", "outside", "outside"),
        ({"sets": (0.3, 0.54, 0.4, 0.3)}, "within", "outside", "outside"),
        # a truncation below the baseline carries nothing, as a guess does
        ({"below": 1}, "undecided", "within", "within"),
        ({"below": 1, "seeds": 16}, "within", "within", "within"),
        ({"below": 4}, "undecided", "within", "within"),
        ({"sets": (0.3, 0.5, 0.4, 0.3), "below": 8}, "outside", "outside", "outside"),
        ({"seeds": 2}, "undecided", "undecided", "undecided"),
    ],
)
def test_verdicts(fields, suffice, one, falls):
    rows = list(results.judge_claims("sorting", make_results(**fields), SETUP))
    answers, judged = answered(rows)[1], verdicts(rows)
    assert [key for key, answer in answers.items() if answer == FINDING] == ["biases", "all of it"]
    assert [judged[key] for key in ("short suffice", "one short", "falls")] == [suffice, one, falls]


def test_no_seed_is_left_out_but_of_findings_on_what_was_learned():
    dataset = make_results(seeds=5)
    dataset.whole.values[1] = 0.6
    rows = list(results.judge_claims("sorting", dataset, SETUP))
    assert "1 of 5 draws have no number" in rows[0].note  # which may be on either side
    draws = {row.key: row.draws for row in rows}
    assert draws == {"short suffice": 4, "one short": 5, "falls": 5, "biases": 4, "all of it": 4}
    biases = next(
        row for row in results.judge_claims("sorting", make_results(), SETUP) if row.key == "biases"
    )
    assert biases.estimate == pytest.approx((0.7 - 0.6) / (0.95 - 0.6))


def test_what_is_shown_beside_published_values():
    comparisons = {c.quantity: c for c in results.compare_results(make_results(), SETUP)}
    whole_model = comparisons["token accuracy of the whole model"]
    assert whole_model.measured.startswith("0.950") and whole_model.published == 0.98
    text = "path length {}: without longer paths, self-consistent"
    truncated = [comparisons[text.format(k)].measured for k in range(4)]  # .95 − .35 · 1.035/3
    assert truncated == pytest.approx([0.829, 0.829, 0.829, 0.950], abs=5e-4)
    assert comparisons["frozen biases alone, without a path"].measured.startswith("0.700")
    (best,) = (c.measured for q, c in comparisons.items() if "best length" in q)
    assert best == 1


def test_the_length_at_which_the_accuracy_comes():
    cases = (  # a_0 .. a_3, Σ_k k (a_k − a_{k−1})/(a_3 − .5), least k within .015, fell below
        ((0.5, 0.9, 0.9, 0.9), 1, 1, False),
        ((0.6, 0.7, 0.8, 0.9), 1.5, 3, False),  # a quarter at each of 0, 1, 2, 3
        ((0.6, 0.88, 0.886, 0.9), 0.835, 2, False),
        # A truncation below the majority class, as of the hull, counts as it.
        ((0.6, 0.4, 0.8, 0.9), 2.0, 3, True),
        ((0.6, 0.46, 0.8, 0.9), 2.0, 3, False),  # ± 0.025
    )
    curves, *expected = zip(*cases, strict=True)
    measures = accuracies(make_measurements(curves, whole_accuracy=0.9, baseline=0.5, tokens=400.0))
    for name, values in zip(("carried", "enough", "fell_below"), expected, strict=True):
        np.testing.assert_allclose(measures[name], values)
    guessing = make_measurements(
        [(0.5, 0.5, 0.5, 0.52)] * 2, whole_accuracy=0.52, baseline=0.5, tokens=400.0
    )
    measures = accuracies(guessing.assign(fine=("seed", [False, True])))
    assert not measures.learned.any() and len(measures.learned) == 1  # the other diverged
    assert np.isnan([measures.carried, measures.enough]).all()


def test_the_finding_names_the_fewest_layers_and_single_lengths():
    """From 0.9 of what the whole model has above a guess; sampled sets are the largest ones."""
    curves, sets = [(0.6, 0.7, 0.93, 0.95)] * 2, np.array([0.3, 0.89, 0.4, 0.25])
    measured = make_measurements(
        curves,
        whole_accuracy=0.95,
        baseline=0.6,
        tokens=2400,
        sets=np.tile(sets[:, None], (2, 1, 1, 1, 1)),
    )
    finding = results.make_finding("of the letters are sorted", measured, SETUP)
    assert finding.figure == "short_paths" and finding.sentence == (
        "0.93 of the letters are sorted without paths through more than 2 of 3 layers (0.95 with "
        "all paths, 0.60 by a guess); 20 sampled paths of length 1 give 0.89, of length 3 0.25."
    )
