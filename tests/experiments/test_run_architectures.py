"""The binary at tiny size, on stored checkpoints, and what bad input gets."""

import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_architectures
from experiments.architectures import published_targets
from experiments.lab import cli
from experiments.verdicts.claims import FAILS, HOLDS, NOT_REJECTED
from rank_collapse.network import surgery
from rank_collapse.report.wording import words
from tests.support.closeness import assert_close
from tests.support.folders import GOLDEN
from tests.support.runs import answered, arrays, result_of


def execute(*arguments):
    return cli.execute(run_architectures.main, run_architectures.FLAGS, list(arguments))


@pytest.fixture
def ids(tmp_path):
    path = tmp_path / "ids.txt"
    path.write_text("3 4 5 6 7 3 4\n8 9 10 11 12\n")
    return path


def test_residuals_are_the_librarys_of_each_text(tmp_path, ids):
    out = tmp_path / "run"
    common = (f"--checkpoints={GOLDEN / 'llama-grouped'}", f"--token_ids={ids}")
    assert execute(*common, "--initialisation=false", f"--output_dir={out}") == 0
    config, params = rc.pretrained.load(GOLDEN / "llama-grouped")
    expected = rc.profile(rc.apply(params, np.array([8, 9, 10, 11, 12]), config))["residual_ratio"]
    name = "llama-grouped/pretrained0/residuals/Transformer/published/residual_ratio"
    np.testing.assert_allclose(arrays(out)[name][1], expected, rtol=1e-4)
    assert {f.name for f in (out / "figures").glob("*.png")} == {"residuals_llama-grouped.png"}


def test_other_weights_in_the_same_folder_are_refused(tmp_path, ids, capsys):
    """As long as the run holds numbers of the old weights. A folder that is moved is the same."""
    folder = Path(shutil.copytree(GOLDEN / "bert", tmp_path / "bert"))
    common = (f"--checkpoints={folder}", f"--token_ids={ids}", f"--output_dir={tmp_path / 'run'}")
    arguments = (*common, "--initialisation=false")
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


def test_a_folder_stands_beside_the_published_curves_or_says_why_not(tmp_path, ids, monkeypatch):
    arguments = (f"--checkpoints={GOLDEN / 'bert'}", f"--token_ids={ids}")
    assert execute(*arguments, "--initialisation=false", f"--output_dir={tmp_path}") == 0
    results, models = result_of(run_architectures, tmp_path)

    def compare_layers():
        rows = list(run_architectures.compare_results(results, models))
        return [row for row in rows if ", layer " in row.quantity], rows[-1]

    assert run_architectures.judge_claims(results, models) == []
    _, last = compare_layers()
    assert last.measured == "not compared" and last.note
    measured = results["bert"]["pretrained"]
    curves = {v: measured[v, "published"][0].mean(axis=0) for v in surgery.ABLATIONS}
    curves["SAN"][2] += 1e4
    for module in (published_targets, run_architectures):
        monkeypatch.setattr(module, "published_curves", lambda *_: {"pretrained": curves})
    layer_rows, last = compare_layers()
    assert last.measured == "1 of 12" and "a single such value refutes" in last.note
    ends = [row.quantity.rpartition(" ")[2] for row in layer_rows if "as the text" in row.quantity]
    assert ends == ["1", "2"]  # nothing was published of this reading
    published = [row for row in layer_rows if "as the text" not in row.quantity]
    assert [row.published for row in published] == [c for v in surgery.ABLATIONS for c in curves[v]]
    different = [
        row.quantity for row in layer_rows if row.note.startswith("differs; other texts explain ± ")
    ]
    assert different == ["bert, pretrained, attention alone: residual ratio, layer 2"]


def test_what_rounding_left_of_attention_alone_is_a_bound():
    """1.4e-7 is what float32 makes of equal tokens: the decades that skips keep are at least 6."""
    row = run_architectures.judge_skips("bert", np.full(8, 0.4), np.linspace(1.1e-7, 1.6e-7, 8))
    assert row.estimate == pytest.approx(np.log10(0.4 / run_architectures.ROUNDING))
    assert "at least" in row.note
    measured = run_architectures.judge_skips("bert", np.full(8, 0.4), np.full(8, 0.04))
    assert measured.estimate == pytest.approx(1) and "at least" not in measured.note
    model = SimpleNamespace(label="bert", settings={}, config=SimpleNamespace(depth=1))
    curves = {("SAN", "published"): np.array([[[0.6, 1.4e-7]], [[0.6, 1.2e-7]]])}
    end, *_ = run_architectures.compare_curve(model, "init", curves, ("SAN", "published"), [])
    assert end.measured == "below 1e-06 (rounding)" and not end.note


@pytest.mark.parametrize(
    ("ratios", "layer"),
    [
        ([[0.9, 0.5, 0.4], [0.9, 0.5, 0.4]], "none"),
        ([[0.9, 0.5, 0.0], [0.9, 0.0, 0.0]], 2),
        ([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], 0),  # the tokens are equal from the start
        ([[0.0, 0.5, 0.4]], 0),
        ([[0.9, run_architectures.THRESHOLD, 0.0]], 2),
        ([[0.9, 0.0, 0.0], [0.9, 0.0, 0.0], [0.9, 0.5, 0.0]], 2),  # the mean, not the median
        ([[0.9, 0.0, 0.0], [0.9, 0.019, 0.0]], 1),  # nor the largest
    ],
)
def test_the_first_layer_below_the_alarm_is_that_of_the_mean_or_none(ratios, layer):
    ratios = np.array(ratios)
    assert run_architectures.collapsed_layer(ratios) == (None if layer == "none" else layer)
    model = SimpleNamespace(label="bert", settings={}, config=SimpleNamespace(depth=2))
    curves = {("SAN", "published"): ratios[:, None]}
    *_, line = run_architectures.compare_curve(model, "init", curves, ("SAN", "published"), [])
    assert "first layer" in line.quantity and line.measured == layer


def test_the_published_curve_can_be_one_more_initialisation_or_none(monkeypatch):
    model = SimpleNamespace(
        label="bert",
        settings={},
        has_weights=False,
        config=SimpleNamespace(depth=4),
    )

    def judge_curves(published, seeds=40, first=0.6):
        rng = np.random.default_rng(0)
        san = 1e-7 + 1e-8 * rng.random((seeds, 5))
        san[:, 0] = 0.6 + 0.01 * rng.random(seeds)  # nearly all of which is lost
        skip = np.linspace(0.6, 0.4, 5) + 0.02 * rng.normal(size=(seeds, 1))
        curves = {"SAN": [first] + [1.05e-7] * 4, "SAN+skip": published}
        monkeypatch.setattr(run_architectures, "published_curves", lambda *_: {"init": curves})
        ours = {("SAN", "published"): san[:, None], ("SAN+skip", "published"): skip[:, None]}
        rows = run_architectures.judge_claims({"bert": {"init": ours}}, [model])
        answers = answered(rows)[1]
        assert [answers[key] for key in ("skips stop", "collapse")] == [HOLDS] * 2
        return answers.get("curves")

    near, far = np.linspace(0.61, 0.41, 5).tolist(), [0.6, 0.55, 0.5, 0.45, 0.1]
    assert judge_curves(near) == NOT_REJECTED
    assert judge_curves(near, first=0.9) == NOT_REJECTED  # of other texts than ours
    assert judge_curves(far) == FAILS  # both variants as one curve
    assert judge_curves(far, seeds=19) == FAILS
    assert judge_curves(far, seeds=18) is None  # p = 1/19: nothing could be refused


@pytest.fixture
def published_results():
    """Three initialisations, two texts and layers 0 to 3 of two models of the paper."""
    ratios = {
        "bert-base-cased": [[0.8, 0.02, 0.009, 1e-4], [0.9, 0.8, 0.7, 0.414]],
        "albert-base-v2": [[0.7, 0.6, 0.5, 0.2], [0.95, 0.9, 0.85, 0.65]],
    }
    spread = np.array([-1, 0, 1])[:, None, None] * np.ones((1, 2, 4)) / 100
    results = {
        label: {
            "init": {
                ("SAN", "published"): np.array(alone) * (1 + spread),
                ("SAN+skip", "published"): np.array(skips) * (1 + spread),
            }
        }
        for label, (alone, skips) in ratios.items()
    }
    return ratios, results, [SimpleNamespace(label=label) for label in ratios]


@pytest.mark.parametrize("error", [None, 0.2, 0.001])
def test_the_note_names_the_level_of_the_test(monkeypatch, error):
    """The tolerances widen as the level falls, and the note has the same level."""
    curves = {
        (name, "published"): np.random.default_rng(0).normal(0.5, 0.1, (1, 5, 13))
        for name in surgery.ABLATIONS
    }
    model = SimpleNamespace(settings=rc.pretrained.PUBLISHED["bert-base-cased"])
    usual, note = run_architectures.find_targets(model, "pretrained", curves)
    if error is not None:
        monkeypatch.setattr(published_targets, "ERROR", error)
        targets, note = run_architectures.find_targets(model, "pretrained", curves)
        for target, other in zip(targets, usual, strict=True):
            assert (target.tolerance < other.tolerance) == (error > 0.05)
    assert re.findall(r"[\d.]+ %", note) == [f"{100 * published_targets.ERROR:g} %"]


def test_the_finding_names_the_layer_below_a_hundredth(published_results):
    _, results, models = published_results
    finding = run_architectures.make_finding(results, models)
    assert finding.figure == "collapse" and finding.sentence == (
        "At initialisation the residual ratio of attention alone falls below 0.01 at layer 2 in "
        f"{words('bert-base-cased')}, at no layer in {words('albert-base-v2')}; with skips "
        "the last layer keeps 0.41, 0.65."
    )


def test_the_picture_has_the_input_at_layer_0_and_a_dashed_line_with_skips(published_results):
    ratios, results, models = published_results
    mixed = [*models, SimpleNamespace(label="of-a-user")]
    assert run_architectures.collapse_figure(results, mixed) is None
    assert run_architectures.make_finding(results, mixed) is None
    (ax,) = run_architectures.collapse_figure(results, models).axes
    curves = [curve for alone_and_skips in ratios.values() for curve in alone_and_skips]
    labels = [f"{words(name)}, {text}" for name in ratios for text in ("alone", "with skips")]
    assert [line.get_label() for line in ax.lines] == labels
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--"] * 2
    deviation = np.std([-0.01, 0, 0.01])
    for line, band, curve in zip(ax.lines, ax.collections, curves, strict=True):
        assert_close(line.get_xydata(), np.stack([np.arange(4), curve], axis=1))
        (path,) = band.get_paths()
        for layer, value in enumerate(curve):
            ends = path.vertices[path.vertices[:, 0] == layer, 1]
            assert_close(
                [ends.min(), ends.max()], [value * (1 - deviation), value * (1 + deviation)]
            )
    colors = [line.get_color() for line in ax.lines]
    assert colors[0] == colors[1] != colors[2] == colors[3]
    assert ax.get_xlabel() == "layer" and "residual ratio" in ax.get_ylabel()


def test_the_residual_that_is_left_is_divided_by_that_of_the_input(published_results):
    ratios, results, _ = published_results
    model = SimpleNamespace(
        label="albert-base-v2", has_weights=False, settings={}, config=SimpleNamespace(depth=3)
    )
    rows = {row.key: row for row in run_architectures.judge_claims(results, [model])}
    assert "curves" not in rows  # nothing is published of such a network
    alone, skips = ratios["albert-base-v2"]
    assert f" {1 - alone[-1] / alone[0]:.3g}" in rows["collapse"].note
    assert f" {skips[-1] / skips[0]:.3g}" in rows["skips stop"].note
    checkpoint = SimpleNamespace(**vars(model) | {"has_weights": True})
    assert run_architectures.judge_claims(results, [checkpoint]) == []


def test_each_kind_of_weights_has_its_rows_and_lines(monkeypatch):
    """A checkpoint beside its initialisations: colours and names are of the kind; the published
    curve of a kind is grey, and the reading of the text dotted, without a name."""
    draw = np.random.default_rng(0)
    curves = {
        kind: {
            (name, reading): draw.uniform(0.1, 0.9, (seeds, 2, 3))
            for name in surgery.ABLATIONS
            for reading in ("published", "text")[: 1 + (name == "SAN+MLP")]
        }
        for kind, seeds in (("pretrained", 1), ("init", 3))
    }
    curves["init"]["SAN+skip", "published"][0, :, 1] = run_architectures.ROUNDING, 0
    results = {"bert": curves}
    published = {
        kind: {name: np.arange(3) / 10 + index for name in surgery.ABLATIONS}
        for index, kind in enumerate(curves)
    }
    monkeypatch.setattr(run_architectures, "published_curves", lambda *_: published)
    model = SimpleNamespace(label="bert", settings={}, config=SimpleNamespace(depth=2))
    fig = run_architectures.residuals_figure(results, model)
    lines = [
        [
            (line.get_label().removeprefix("_"), line.get_linestyle(), line.get_ydata())
            for line in ax.lines
        ]
        for ax in fig.axes
    ]
    expected = ["published, pretrained", "pretrained", "published, random initialisation"]
    expected += ["random initialisation"]
    for place in (0, 2, 3):
        assert [label for label, *_ in lines[place]] == expected
        assert [dash for _, dash, _ in lines[place]] == ["-", "-", "--", "-"]
    assert [dash for _, dash, _ in lines[1]] == ["-", "-", ":", "--", "-", ":"]
    for (name, reading), at in {("SAN", "published"): (0, 1), ("SAN+MLP", "text"): (1, 2)}.items():
        values = lines[at[0]][at[1]][2]
        assert_close(values, curves["pretrained"][name, reading].mean(axis=(0, 1)))
    assert_close(lines[0][3][2], curves["init"]["SAN", "published"].mean(axis=(0, 1)))
    assert_close(lines[0][2][2], np.arange(3) / 10 + 1)
    colors = [line.get_color() for line in fig.axes[0].lines]
    assert colors[0] == colors[2] and len({*colors}) == 3
    assert all(tick == round(tick) for ax in fig.axes for tick in ax.get_xticks())
    (legend,) = fig.legends
    assert [text.get_text() for text in legend.get_texts()] == expected
    table = list(run_architectures.make_rows(results))
    assert [row["weights"] for row in table] == ["pretrained"] * 15 + ["init"] * 15
    (row,) = (
        row
        for row in table
        if (row["weights"], row["variant"], row["layer"]) == ("init", "SAN+skip", 1)
    )
    values = curves["init"]["SAN+skip", "published"][:, :, 1]
    assert (row["model"], row["reading"], row["examples"]) == ("bert", "published", 6)
    assert_close([row["mean"], row["std"]], [values.mean(), values.std()])
    assert row["rounding"] == 2 / 6
