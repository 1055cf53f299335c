"""The trained binaries at tiny sizes: what they write, resume, and refuse."""

import csv
import json

import jax
import numpy as np
import pytest

from experiments import run_circle, run_convex_hull, run_memorization, run_sort
from experiments.circle import results
from experiments.shell import cli
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.text import pairs as texts
from rank_collapse.training.model_file import load_models
from rank_collapse.training.tasks import examples
from rank_collapse.training.training import batch_forward

SMALL = (
    "--depth=2", "--width=2", "--hidden_dim=8", "--n_epochs=2", "--n_repeat=2", "--n_paths=2",
    "--n_train_data=9", "--n_eval_data=5", "--batch_sz=4", "--num_seeds=2",
)  # fmt: skip
SORT = (*SMALL, "--num_labels=4", "--seq_len=3")


def run(module, arguments, folder):
    arguments = [*arguments, f"--output_dir={folder}"]
    return cli.execute(module.main, module.FLAGS, arguments)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_sort_writes_everything_and_reads_it_again(tmp_path, capsys):
    arguments = [*SORT, "--no_sub_path", "--do_rank", "--compute_alpha", "--path_len", "0"]
    assert run(run_sort, arguments, tmp_path) == 0
    found = summary(tmp_path)
    assert found["lengths"] == [0, 1, 2] and set(found["sets"]) == {"2", "5", "20"}
    assert 0 <= found["whole"]["accuracy"]["mean"] <= 1
    # All paths up to the depth are the whole model.
    assert found["up_to"]["mean"][-1] == pytest.approx(found["whole"]["accuracy"]["mean"])
    assert len(found["alpha"]["mean"]) == 2 and len(found["ranks"]["rank"]["mean"]) == 3
    for name in ("paths", "loss", "ranks", "alpha"):
        assert (tmp_path / "figures" / f"{name}.png").exists()
    rows = (tmp_path / "results.csv").read_text().splitlines()
    # Per seed: whole, whole_train, 2 baselines, 3 sizes x 3 lengths x 2 repeats, 3 exact x 3.
    assert len(rows) == 1 + 2 * (4 + 18 + 9)
    before = capsys.readouterr().out
    assert run(run_sort, arguments, tmp_path) == 0
    assert capsys.readouterr().out == before
    with np.load(tmp_path / "arrays.npz") as arrays:
        assert arrays["losses"].shape == (2, 2)


def test_kept_models_are_the_run_s_own(tmp_path):
    assert run(run_sort, SORT, tmp_path) == 0 and not (tmp_path / "models.npz").exists()
    assert run(run_sort, [*SORT, "--keep_models"], tmp_path) == 0
    config, models = load_models(tmp_path / "models.npz")
    options = cli.parse(run_sort.FLAGS, list(SORT))
    setup = run_sort.make_setup(options)
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    for seed, key in enumerate(seed_keys(options.seed, 2)):
        held_out = setup.make_data(jax.random.split(key)[0])["eval"]
        model = jax.tree.map(lambda a, s=seed: a[s], models)
        accuracy = examples.token_accuracy(batch_forward(model, held_out, config), held_out)
        (found,) = [r for r in rows if r["evaluation"] == "whole" and r["seed"] == str(seed)]
        assert float(found["accuracy"]) == pytest.approx(float(accuracy))


def test_all_heads_is_one_path(tmp_path):
    assert run(run_sort, [*SORT, "--all_heads", "--semantics=frozen"], tmp_path) == 0
    assert list(summary(tmp_path)["sets"]) == ["1"]


def test_hull_and_memorization_and_circle(tmp_path):
    assert run(run_convex_hull, [*SMALL, "--seq_len=5", "--ffn2", "--do_mlp"], tmp_path / "h") == 0
    assert "auc" in summary(tmp_path / "h")["whole"]
    texts = ["--task_name=shipped", "--max_seq_length=20", "--num_train_epochs=1"]
    assert run(run_memorization, [*SMALL, *texts], tmp_path / "m") == 0
    circle = ["--n_epochs=1", "--n_train_data=40", "--n_eval_data=6", "--hidden_dim=8"]
    assert run(run_circle, [*circle, "--circle_skip", "--n_repeat=2"], tmp_path / "c") == 0
    assert list(summary(tmp_path / "c")["cases"]) == ["skip, d=8"]
    for folder, figure in (("h", "paths"), ("m", "paths"), ("c", "trajectories")):
        assert (tmp_path / folder / "figures" / f"{figure}.pdf").exists()


@pytest.mark.parametrize(
    "module, arguments, words",
    [
        (run_sort, [*SORT, "--width=3"], "num_heads=3"),
        (run_sort, [*SORT, "--path_len=3"], "path_len=3"),
        (run_sort, [*SORT, "--no_repeat", "--seq_len=5"], "seq_len=5"),
        (run_sort, ["--n_epochs=-1"], "n_epochs"),
        (run_convex_hull, [*SMALL, "--num_labels=3"], "num_labels=3"),
        (run_circle, [*SMALL, "--num_labels=3"], "num_labels=3"),
        (run_memorization, [*SMALL, "--data_dir=no/such/folder"], "no/such/folder/train.tsv"),
        (run_memorization, [*SMALL, "--task_name=MNLI"], "task_name"),
    ],
)
def test_a_mistake_is_one_line(module, arguments, words, tmp_path, capsys):
    assert run(module, arguments, tmp_path / "run") == 2
    error = capsys.readouterr().err.strip()
    assert words in error and len(error.splitlines()) == 1


def test_every_seed_diverged_is_said(tmp_path, capsys):
    assert run(run_sort, [*SORT, "--learning_rate=1e38"], tmp_path) == 2
    assert "every seed diverged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, words",
    [("a\tb\n1\t2\n", "sentence1"), ("index\tsentence1\tsentence2\n", "no rows")],
)
def test_bad_texts_are_one_line(content, words, tmp_path, capsys):
    (tmp_path / "train.tsv").write_text(content)
    assert run(run_memorization, [*SMALL, f"--data_dir={tmp_path}"], tmp_path / "run") == 2
    assert words in capsys.readouterr().err


def test_a_fall_is_counted_from_a_hundredth_to_a_millionth():
    t = np.arange(60)
    cubic, halved, apart = 0.6 ** (3.0 ** np.minimum(t, 5)), 0.6 * 0.5**t, np.full(60, 0.6)
    # Below 1e-2 at t = 3 and below 1e-6 at t = 4; halving at t = 6 and 20.
    assert results._fall_steps(np.stack([cubic, apart]), 1e-2, 1e-6) == [1, 1]
    assert results._fall_steps(np.stack([cubic, halved]), 1e-2, 1e-6) == [1, 14]
    assert results._fall_steps(apart[None], 1e-2, 1e-6) is None


def test_a_trained_vocabulary_is_the_same_every_time():
    pairs = texts.read_pairs("shipped", "", 20)
    vocabularies = [texts.load_tokenizer("absent", pairs)[0].get_vocab() for _ in range(3)]
    assert len(vocabularies[0]) > 100
    assert vocabularies[0] == vocabularies[1] == vocabularies[2]
