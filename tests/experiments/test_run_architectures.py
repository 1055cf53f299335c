"""The binary at tiny size, on stored checkpoints, and what bad input gets."""

import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from trained_runs import answered, arrays, result_of, rows as rows_of, same_arrays

import rank_collapse as rc
from experiments.lab import cli, progress as stops
from experiments.lab.progress import Progress
from experiments.paper.architectures import experiment as run_architectures, resume
from experiments.paper.architectures.models import Model
from experiments.paper.architectures.page import training_figures, trainings_of
from experiments.paper.architectures.results import Results, depths_of
from rank_collapse.network import surgery
from rank_collapse.pretrained import published
from rank_collapse.pretrained.lazy import LazyLayers
from rank_collapse.report.claims import HOLDS, IN_PART
from rank_collapse.runs.folder import RunFolder

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def execute(*arguments):
    return cli.execute(run_architectures.EXPERIMENT.main, run_architectures.FLAGS, list(arguments))


@pytest.fixture
def ids(tmp_path):
    path = tmp_path / "ids.txt"
    path.write_text("3 4 5 6 7 3 4\n8 9 10 11 12\n")
    return path


@pytest.mark.slow
def test_every_part_on_a_checkpoint(tmp_path, ids):
    out = tmp_path / "run"
    given = (f"--checkpoints={GOLDEN / 'bert'}", f"--token_ids={ids}", "--num_path_texts=2")
    assert execute(*given, f"--output_dir={out}") == 0
    (found,), _ = result_of(run_architectures.EXPERIMENT, out)
    assert found.kinds == ["pretrained", "init"]
    assert found.mean("pretrained", "residuals/SAN/published/residual_ratio").shape == (3,)
    assert max(found.mean(kind, "lengths/error") for kind in found.kinds) < 1e-5
    figures = {
        "residuals",
        "tokens",
        "lengths",
        "chains",
        "bounds",
        "layers",
        "removal",
        "attention",
    }
    assert {f.name for f in (out / "figures").glob("*.png")} == {f"{n}_bert.png" for n in figures}
    page = (out / "report.html").read_text()
    assert page.count("data:image/png") == len(figures)
    rows = rows_of(out)
    parts = figures - {"tokens"} | {"log"}
    assert {r["part"] for r in rows} == parts
    heads = [r for r in rows if r["measure"] == "gamma" and r["variant"] == "SAN"]
    assert len(heads) == 2 * 2 * 3  # weights, layers, heads


def test_ctrl_c_waits_for_the_border_of_a_layer(tmp_path, monkeypatch):
    waited = []

    def stream(*_, done, **__):
        done(SimpleNamespace(layers=1, whole=False))
        signal.raise_signal(signal.SIGINT)
        waited.append(True)
        done(SimpleNamespace(layers=2, whole=False))
        waited.append(False)

    monkeypatch.setattr(resume.pretrained, "stream", stream)
    source = SimpleNamespace(config=SimpleNamespace(depth=3))
    with (
        RunFolder(tmp_path, {}) as run,
        Progress(3, "layers") as progress,
        stops.stopping(),
        pytest.raises(stops.Stopped),
    ):
        resume.resumed(run, "bert", source, {}, {}, 8, progress)
    assert waited == [True]


@pytest.mark.slow
def test_a_language_model_whose_disk_goes_away(tmp_path, ids, capsys):
    """The second layer is gone: one line, and the next run goes on after the first layer."""
    folder = Path(shutil.copytree(GOLDEN / "llama-grouped", tmp_path / "llama"))
    shard = folder / "model-00002-of-00003.safetensors"
    parts = "--parts=residuals,lengths,next_token,gradients,removal"
    arguments = (f"--checkpoints={folder}", f"--token_ids={ids}", "--initialisation=false", parts)
    whole, broken = (f"--output_dir={tmp_path / name}" for name in ("whole", "broken"))
    assert execute(*arguments, whole, "--num_path_texts=1") == 0
    kept = tmp_path / "kept"
    asked = resume.pretrained.stream

    def stream(*a, done, **k):
        def gone(state):
            if shard.exists():
                shard.rename(kept)
            done(state)

        return asked(*a, done=gone, **k)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(resume.pretrained, "stream", stream)
        nothing = property(lambda self: {}, lambda self, _: None)  # is read beforehand
        patched.setattr(LazyLayers, "_coming", nothing, raising=False)
        assert execute(*arguments, broken, "--num_path_texts=1") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "00002-of-00003" in error
    kept.rename(shard)
    assert execute(*arguments, broken, "--num_path_texts=1") == 0
    lines = (tmp_path / "broken" / "log.txt").read_text()
    assert lines.count("resumes after layer 1") == 1 and lines.count("layers: 2/2") == 1
    folders = [tmp_path / name for name in ("whole", "broken")]
    same_arrays(*folders)
    (found,), _ = result_of(run_architectures.EXPERIMENT, folders[0])
    depths = depths_of(found, "pretrained")
    assert depths["layers"] == 2 and {"same loss", "same next token"} <= depths.keys()
    means = {name: found.mean("pretrained", name) for name in found.by_kind["pretrained"]}
    assert means["next_token/loss_up_to"][-1] == pytest.approx(means["next_token/loss"], rel=1e-5)
    assert means["removal/loss"] == pytest.approx(means["next_token/loss"], rel=1e-5)
    assert sum(means["gradients/gradient_share"]) == pytest.approx(1, rel=1e-5)
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "same next token" in page


def test_other_weights_in_the_same_folder_are_refused(tmp_path, ids, capsys):
    """As long as the run holds the old ones' numbers; a folder that is moved is the same."""
    folder = Path(shutil.copytree(GOLDEN / "bert", tmp_path / "bert"))
    common = (f"--checkpoints={folder}", f"--token_ids={ids}", f"--output_dir={tmp_path / 'run'}")
    arguments = (*common, "--parts=residuals", "--initialisation=false")
    assert execute(*arguments) == 0
    folder.rename(tmp_path / "away").rename(folder)
    assert execute(*arguments) == 0
    file, later = folder / "model.safetensors", time.time_ns() + 1
    raw = bytearray(file.read_bytes())
    raw[-8:] = bytes(8)  # the same size
    file.write_bytes(raw)
    os.utime(file, ns=(later, later))
    capsys.readouterr()
    assert execute(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "weights" in error and "--overwrite" in error
    assert execute(*arguments, "--overwrite") == 0


@pytest.mark.slow
def test_ranks_of_a_decoder_and_of_images(tmp_path, ids):
    """Of the states whose residuals are measured."""
    out = tmp_path / "t5"
    common = ("--parts=ranks", "--initialisation=false")
    t5 = (f"--checkpoints={GOLDEN / 't5-gated'}", f"--token_ids={ids}", "--part=decoder")
    assert execute(*t5, *common, f"--output_dir={out}") == 0
    assert {"effective_rank", "residual_ratio"} <= {row["measure"] for row in rows_of(out)}
    images = tmp_path / "images.npy"
    np.save(images, np.random.default_rng(0).standard_normal((2, 6, 4, 8)))
    vit = (f"--checkpoints={GOLDEN / 'vit-wide'}", f"--images={images}")
    assert execute(*vit, *common, f"--output_dir={tmp_path / 'vit'}") == 0
    _, setup = result_of(run_architectures.EXPERIMENT, tmp_path / "vit")
    assert setup.batches["vit-wide"]["x"].shape[:2] == (2, 8)  # patches


def test_residuals_of_what_attention_reads_are_beside_those_of_the_states(tmp_path, ids):
    """In a pre-norm network both differ; the numbers of the states stay."""
    common = (f"--checkpoints={GOLDEN / 'llama-grouped'}", f"--token_ids={ids}")
    found = {}
    for parts in ("residuals", "read"):
        out = tmp_path / parts
        more = (f"--parts={parts}", "--initialisation=false", f"--output_dir={out}")
        assert execute(*common, *more) == 0
        found[parts] = arrays(out)
    added = {name: found["read"].pop(name) for name in set(found["read"]) - set(found["residuals"])}
    assert {n: a.tolist() for n, a in found["read"].items()} == {
        n: a.tolist() for n, a in found["residuals"].items()
    }
    name = "llama-grouped/pretrained0/residuals/Transformer/published/{}residual_ratio"
    config, params = rc.pretrained.load(GOLDEN / "llama-grouped")
    tokens = np.array([8, 9, 10, 11, 12])  # the second text
    want = rc.network_profile(params, tokens, config, tokens="read")["residual_ratio"]
    np.testing.assert_allclose(added[name.format("read_")][1], want, rtol=1e-4)
    assert (abs(added[name.format("read_")] - found["read"][name.format("")]) > 1e-3).any()


def test_a_folder_stands_beside_the_published_curves_or_says_why_not(tmp_path, ids, monkeypatch):
    arguments = (f"--checkpoints={GOLDEN / 'bert'}", f"--token_ids={ids}", "--parts=residuals")
    assert execute(*arguments, "--initialisation=false", f"--output_dir={tmp_path}") == 0
    results, _ = result_of(run_architectures.EXPERIMENT, tmp_path)

    def lines():
        found = list(run_architectures.compare(results))
        return [row for row in found if ", layer " in row.quantity], found[-1]

    _, last = lines()
    assert last.measured == "not compared" and "of a bert of 2 layers" in last.note
    name = "residuals/{}/published/residual_ratio"
    curves = {v: results[0].mean("pretrained", name.format(v)) for v in surgery.VARIANTS}
    curves["SAN"][2] += 1e4
    for module in (published, run_architectures):
        monkeypatch.setattr(module, "published_curves", lambda *_: {"pretrained": curves})
    shown, last = lines()
    assert last.measured == "1 of 12" and "one is a failure" in last.note
    off = [row.quantity for row in shown if row.note.startswith("differs; other texts explain ± ")]
    assert off == ["bert, pretrained, SAN: residual ratio, layer 2"]


def test_the_published_curve_can_be_one_more_initialisation_or_none(monkeypatch):
    model = SimpleNamespace(label="bert", settings={}, config=SimpleNamespace(depth=4))

    def answers(published, seeds=40, first=0.6):
        rng = np.random.default_rng(0)
        san = 1e-7 + 1e-8 * rng.random((seeds, 5))
        san[:, 0] = 0.6 + 0.01 * rng.random(seeds)  # nearly all of which is lost
        skip = np.linspace(0.6, 0.4, 5) + 0.02 * rng.normal(size=(seeds, 1))
        curves = {"SAN": [first] + [1.05e-7] * 4, "SAN+skip": published}
        monkeypatch.setattr(run_architectures, "published_curves", lambda *_: {"init": curves})
        results = {
            f"bert/init{seed}/residuals/{variant}/published/residual_ratio": curve[None]
            for variant, ours in (("SAN", san), ("SAN+skip", skip))
            for seed, curve in enumerate(ours)
        }
        rows = run_architectures.claims([Results(results, model)])
        found = answered(rows)[1]
        assert [found[key] for key in ("skips", "skips stop", "collapse")] == [HOLDS] * 3
        return found.get("curves")

    near, far = np.linspace(0.61, 0.41, 5).tolist(), [0.6, 0.55, 0.5, 0.45, 0.1]
    assert answers(near) == HOLDS
    assert answers(near, first=0.9) == HOLDS  # of other texts than ours
    assert answers(far) == IN_PART
    assert answers(far, seeds=39) == IN_PART
    assert answers(far, seeds=38) is None  # p = 1/39 of two curves: nothing could be refused


def at_step(label, size, texts=3):
    rng = np.random.default_rng(len(label))
    results = {
        f"{label}/pretrained0/residuals/{variant}/published/residual_ratio": rng.random((texts, 3))
        for variant in ("SAN", "SAN+MLP", "SAN+skip", "Transformer")
    }
    results[f"{label}/pretrained0/lengths/size"] = np.tile(size, (texts, 1))
    return Results(results, Model(label, label, {"model_type": "gpt_neox"}, True))


def test_labels_that_end_in_a_step():
    labels = ("pythia@step1000", "step8", "step0", "bert", "pythia@step8", "lone-checkpoint-5")
    found = trainings_of([at_step(label, [1.0, 0, 0]) for label in labels])
    steps = {name: list(group) for name, group in found.items()}
    assert steps == {"pythia": [8, 1000], "gpt_neox": [0, 8]}


@pytest.mark.parametrize("texts", [3, 1])
def test_the_mean_length_is_drawn_by_step(texts):
    sizes = {"step0": [3.0, 1.0, 0.0], "step10": [0.0, 1.0, 3.0]}
    results = [at_step(label, size, texts) for label, size in sizes.items()]
    ((name, draw),) = training_figures(results).items()
    figure = draw()
    assert name == "training_gpt_neox"
    residuals, length = figure.axes  # no cosines and no effective depths were measured
    np.testing.assert_allclose(length.lines[0].get_data(), [[0, 10], [0.25, 1.75]])
    assert len(residuals.lines) == 4
