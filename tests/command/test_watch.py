"""The command that draws a run while it grows."""

import json
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.lab import folder
from rank_collapse.command import main, watch
from rank_collapse.measures.table import Threshold
from rank_collapse.runs import drawn, metrics
from tests.support.marks import full_but


@pytest.fixture(autouse=True)
def pictures_as_data(monkeypatch):
    """Writes digests for pictures; tests of the picture itself draw it."""
    monkeypatch.setattr(watch, "draw_files", folder.draw_files)


def run_watch(*arguments):
    return main(["watch", *arguments])


def read_output(capsys, *arguments, code=0):
    """Runs the command, checks its exit code, and reads what it prints."""
    assert run_watch(*arguments) == code
    return capsys.readouterr()


def write(folder, *ratios):
    for step, ratio in enumerate(ratios):
        metrics.append(folder / metrics.NAME, step, {"residual_ratio": [0.9, ratio]})


@pytest.mark.full
def test_a_threshold_that_is_passed_is_said_once_and_exits_with_3(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(watch, "draw_files", drawn.draw_files)
    write(tmp_path, 0.5, 1e-3, 1e-4)
    out = read_output(capsys, str(tmp_path), code=watch.PASSED).out
    assert out.count("rank collapse") == 1 and "step 1: residual_ratio 0.001 below 0.01" in out
    assert (tmp_path / "figures" / "metrics.png").stat().st_size > 1000
    assert run_watch(str(tmp_path / metrics.NAME), "--below=residual_ratio=1e-5") == 0


def test_control_characters_of_a_name_are_not_printed(tmp_path, capsys):
    metrics.append(tmp_path / metrics.NAME, 1, {"\x1b[31mx.residual_ratio": 1e-4})
    out = read_output(capsys, str(tmp_path), code=3).out
    assert "x.residual_ratio 0.0001 below" in out and "\x1b" not in out


CONTROLS = ["\x1b]0;owned\x07", "\u202egnp", "a\rb", "a\nb"]


@pytest.mark.parametrize("control", full_but(CONTROLS, "\u202egnp", "a\nb"))
def test_control_characters_of_a_file_are_not_printed(control, tmp_path, capsys):
    """Of a network's file, of the folder, of the picture, of a list of metrics that is cut."""
    folder = tmp_path / f"run{control}"
    values = {f"{control}{i}": 1.0 for i in range(99)}
    metrics.append(folder / metrics.FOLDER / f"net{control}.jsonl", 1, values)
    captured = read_output(capsys, str(folder))
    for text in (captured.out, captured.err):
        assert text and control not in text and not set(text) & set("\x1b\x07\u202e\r")
    assert captured.out.count("\n") == captured.err.count("\n") == 1
    assert main(["watch", str(folder / f"no{control}")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_no_picture_is_drawn_through_a_link(tmp_path, capsys):
    """Neither under the name that was temporary once, nor the picture's, nor elsewhere."""
    write(tmp_path, 0.5)
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "docs").mkdir()
    (tmp_path / "figures").mkdir()
    for name in (".metrics.png.tmp", "metrics.png"):
        (tmp_path / "figures" / name).symlink_to(tmp_path / "mine")
    read_output(capsys, str(tmp_path))
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "figures" / "metrics.png").is_symlink()
    shutil.rmtree(tmp_path / "figures")
    (tmp_path / "figures").symlink_to(tmp_path / "docs")
    assert main(["watch", str(tmp_path)]) == 2
    assert "figures: it is a link" in capsys.readouterr().err
    assert not [*(tmp_path / "docs").iterdir()]


def test_each_network_of_several_has_its_picture_and_its_alarms(tmp_path, capsys):
    for network, ratio in (("deep", 1e-5), ("flat", 0.5)):
        path = tmp_path / metrics.FOLDER / f"{network}.jsonl"
        metrics.append(path, 3, {"residual_ratio": [0.9, ratio]}, seed=0)
    out = read_output(capsys, str(tmp_path), code=watch.PASSED).out
    assert out.startswith("deep: step 3: residual_ratio 1e-05") and "1 threshold" in out
    places = [out.find(f"metrics-{name}.png") for name in ("deep", "flat")]
    assert 0 < places[0] < places[1]  # in the order of the names
    pictures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert pictures == {"metrics-deep.png", "metrics-flat.png"}
    assert (
        str(tmp_path / "figures" / "metrics-flat.png") in read_output(capsys, str(path)).out
    )  # the file alone, in the same run
    # Every alarm counts, a flag keeps the alarm of a loss that is no number, and a threshold may be
    # on a metric of one network alone.
    metrics.append(path, 4, {"loss": float("nan"), "top": 2.0}, seed=0)
    flags = ("--above=top=1", "--above=loss=9")
    out = read_output(capsys, str(tmp_path), *flags, code=watch.PASSED).out
    assert out.splitlines()[:3] == [
        "deep: step 3: residual_ratio 1e-05 below 0.01 at layer 1 of seed 0 (rank collapse)",
        "flat: step 4: loss nan is not finite of seed 0 (divergence)",
        "flat: step 4: top 2 above 1 of seed 0",
    ]
    assert out.splitlines()[3].startswith("3 thresholds passed; ")
    assert run_watch(str(tmp_path), "--above=tops=1") == 2
    available = "but the run has the metrics loss, residual_ratio, top\n"  # no step and no seed
    assert capsys.readouterr().err.endswith(available)


def test_logs_of_one_folder_have_pictures_of_their_own(tmp_path, capsys):
    """Among them one without the suffix of another, and one named like the picture of a network."""
    network = tmp_path / metrics.FOLDER / "a.jsonl"
    logs = {
        "metrics.jsonl": "metrics.png",
        "first.jsonl": "first.png",
        "first.json": "first.json.png",
        "plain": "plain.png",
        "plain.jsonl": "plain.jsonl.png",
        "metrics-a.jsonl": "metrics-a.jsonl.png",
    }
    for path in (network, *(tmp_path / name for name in logs)):
        metrics.append(path, 1, {"loss": 1.0})
    for name, picture in logs.items():
        out = read_output(capsys, str(tmp_path / name)).out
        assert out.endswith(f"{tmp_path / 'figures' / picture}\n")
    assert str(tmp_path / "figures" / "metrics-a.png") in read_output(capsys, str(network)).out
    assert len(list((tmp_path / "figures").iterdir())) == len(logs) + 1


def test_metrics_that_passed_a_threshold_are_drawn_first(tmp_path, monkeypatch):
    rows, drawn_thresholds = [], []

    def keep(new_rows, thresholds):
        rows.extend(new_rows)
        drawn_thresholds.extend(thresholds)
        return "a figure"

    monkeypatch.setattr(watch, "metrics_figure", keep)
    monkeypatch.setattr(watch, "draw_files", lambda figure: {".png": b"a picture"})
    scalars = {"grad_norm": 1.0, "loss": 2.0, "token_cosine": 0.5, "residual_ratio": [0.9, 1e-3]}
    metrics.append(tmp_path / metrics.NAME, 1, scalars)
    assert run_watch(str(tmp_path)) == watch.PASSED
    names = watch.metric_names(rows, drawn_thresholds)
    assert names == ["residual_ratio", "loss", "grad_norm", "token_cosine"]


def test_steps_alone_are_no_metric(tmp_path, capsys):
    (tmp_path / metrics.NAME).write_text('{"step": 1}\n')
    assert "no metric yet" in read_output(capsys, str(tmp_path)).out


def test_the_last_equals_sign_ends_the_name_of_a_metric():
    flags = SimpleNamespace(below=["a=b=0.5"], above=["top=1e3"])
    expected = [Threshold("a=b", 0.5), Threshold("top", 1000.0, above=True)]
    assert watch.parse_thresholds(flags) == expected


def test_a_threshold_on_a_metric_that_never_came_is_a_mistake(tmp_path, capsys):
    write(tmp_path, 0.5)
    metrics.append(tmp_path / metrics.NAME, 9, {"decoder.loss": 1.0})
    assert run_watch(str(tmp_path), "--below=resid=0.9", "--above=loss=9") == 2
    message = "a threshold names 'resid', but the run has the metrics decoder.loss, residual_ratio"
    assert message in capsys.readouterr().err
    assert run_watch(str(tmp_path), "--above=loss=9") == 0  # of a part of the network


def test_of_thresholds_without_a_metric_the_first_is_named(tmp_path, capsys):
    (tmp_path / metrics.NAME).write_text('{"step": 1, "seed": 0}\n')
    assert run_watch(str(tmp_path), "--above=top=1", "--above=best=1", "--below=z=0") == 2
    message = "error: a threshold names 'best', but the run has the metrics none\n"
    assert capsys.readouterr().err == message


def test_a_file_that_is_still_empty_is_no_mistake(tmp_path, capsys):
    (tmp_path / metrics.NAME).touch()
    out = read_output(capsys, str(tmp_path)).out
    assert out == "0 thresholds passed; no metric yet\n"


def test_the_picture_of_a_file_whose_name_is_a_suffix_has_a_name(tmp_path):
    assert watch.picture_name(tmp_path / ".jsonl") == ".jsonl"


def test_as_many_metrics_as_panels_are_all_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(watch, "metrics_figure", lambda rows, thresholds: None)
    monkeypatch.setattr(watch, "draw_files", lambda figure: {".png": b"a picture"})
    most = watch.MOST_PANELS
    for count, text in ((most, ""), (most + 1, f"metrics.png shows {most} of {most + 1} metrics")):
        metrics.append(tmp_path / metrics.NAME, count, {f"m{i}": 1.0 for i in range(count)})
        err = read_output(capsys, str(tmp_path)).err
        assert err.endswith(f"{text}\n") if text else not err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("nowhere",), "nowhere does not exist"),
        (
            (".",),
            "has no metrics.jsonl, which rank_collapse.torch.watch(model, log=FILE) and",
        ),
        (("",), "'' is empty"),
        (("x", "--below="), "--below= is empty"),
        ((__file__,), "has no line of metrics"),
        (("x", "--below=loss"), "--below=loss is not name=value"),
        (("x", "--above=loss=much"), "--above=loss=much is not name=value"),
        (("x", "--below=loss=nan"), "--below=loss=nan is not name=value"),
    ],
)
def test_mistakes_are_named_in_a_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = read_output(capsys, *arguments, code=2).err
    assert message in err and err.count("\n") == 1


@pytest.mark.full
def test_of_very_many_metrics_some_dozens_are_drawn_and_it_says_so(tmp_path, capsys):
    for step in range(3):
        metrics.append(tmp_path / metrics.NAME, step, {f"m{i}": i + step for i in range(300)})
    assert "metrics.png shows 36 of 300 metrics" in read_output(capsys, str(tmp_path)).err


def test_a_metric_of_any_name_is_drawn(tmp_path, monkeypatch):
    """The names have formulas, which matplotlib refused, and control characters."""
    monkeypatch.setattr(watch, "draw_files", drawn.draw_files)
    metrics.append(tmp_path / metrics.NAME, 1, {"$\\frac{$": 1.0, "\x1b[31m": 2.0, "m" * 10**5: 1})
    assert run_watch(str(tmp_path)) == 0
    assert (tmp_path / "figures" / "metrics.png").stat().st_size > 1000


@pytest.mark.full
def test_what_a_trainer_writes_is_watched(tmp_path, capsys):
    """The newest state is read; the names of metrics have the layers."""
    for step in (2, 4):
        history = [
            {"step": s, "loss": 3.0 / s, "epoch": 0.1, **make_layer_scalars(0.9, 0.1 / s)}
            for s in range(1, step + 1)
        ]
        history += [{"step": step, "eval_loss": 3.0}] * (step == 4)
        history += [{"step": step, "train_runtime": 9.0, "loss": float("nan")}] * (step == 4)
        saved = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        saved.parent.mkdir()
        state = {"log_history": history, "global_step": step, "max_steps": 4}
        saved.write_text(json.dumps(state))
        os.utime(saved, (step, step))
    out = read_output(
        capsys, str(tmp_path), "--below=residual_ratio=0.04", code=watch.PASSED
    ).out  # ends with it
    assert "step 3: residual_ratio 0.0333 below 0.04 at layer 1" in out
    assert "step 4: loss nan is not finite" in out and "2 thresholds passed" in out
    assert (tmp_path / "figures" / "trainer_state.png").exists()
    assert "epoch" not in read_output(capsys, str(saved), code=watch.PASSED).out  # the file itself
    (tmp_path / "trainer_state.json").write_text('{"log_history": 3}')
    assert read_output(capsys, str(tmp_path), code=2).err.startswith(
        f"error: {tmp_path / 'trainer_state.json'} cannot be read"
    )


def test_layers_of_a_trainer_are_one_curve_in_their_order(tmp_path):
    """Twelve layers become one curve, as in `metrics.jsonl`; the eleventh has no number."""
    entry = {f"residual_ratio/layer_{i}": float(i) for i in range(12) if i != 10}
    entry |= {f"decoder/entropy/layer_{i}": 1.0 for i in range(2)} | {"step": 1, "loss": 2.0}
    (tmp_path / watch.STATE).write_text(json.dumps({"log_history": [entry]}))
    (row,) = watch.trainer_rows(tmp_path / watch.STATE)
    assert row.keys() == {"step", "loss", "residual_ratio", "decoder.entropy"}
    expected = [*range(10), np.nan, 11]
    np.testing.assert_array_equal(row["residual_ratio"], expected)


def test_the_newest_history_of_a_trainer_is_read_by_step(tmp_path, capsys):
    """Entries of a step are one row, whatever their order; times and counts are no metrics."""
    history = [
        {"step": 4, "loss": 1.0, "epoch": 2.0, "learning_rate": 0.1},
        {"step": 2, "loss": 3.0, "epoch": 1.0, "best": True, "name": "a"},
        {"step": 4, "eval_loss": 2.0, "eval_runtime": 5.0, "eval_steps_per_second": 7.0},
        {"step": 4, "train_runtime": 9.0, "total_flos": 1e9, "eval/loss": 2.0},
    ]
    for time, name in enumerate(("9", "11", "9", "10", "9", "10")):
        newest = tmp_path / f"checkpoint-{name}" / watch.STATE
        newest.parent.mkdir(exist_ok=True)
        newest.write_text(json.dumps({"log_history": history if name == "10" else []}))
        os.utime(newest, (time, time))
        assert watch.find_files(tmp_path) == [newest]
    assert watch.read_rows(newest) == [
        {"step": 2, "loss": 3.0},
        {"step": 4, "loss": 1.0, "learning_rate": 0.1, "eval_loss": 2.0, "eval.loss": 2.0},
    ]
    picture = tmp_path / "figures" / "trainer_state.png"  # of the run, not of the checkpoint
    assert read_output(capsys, str(newest)).out == f"0 thresholds passed; {picture}\n"
    metrics.append(tmp_path / metrics.NAME, 1, {"loss": 1.0})
    assert watch.find_files(tmp_path) == [tmp_path / metrics.NAME]  # ours before a Trainer's


def make_layer_scalars(*ratios):
    return {f"residual_ratio/layer_{i}": ratio for i, ratio in enumerate(ratios)}


MALFORMED = ["", "[]", '{"log_history": 3}', '{"log_history": [{"loss": 1}]}', "[" * 100_000]
MALFORMED += ['{"log_history": [{"step": 1e999, "loss": 1}]}', "\xff"]


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_state_is_one_line(content, tmp_path, capsys):
    (tmp_path / watch.STATE).write_bytes(content.encode("latin-1"))
    err = read_output(capsys, str(tmp_path), code=2).err
    assert err.startswith(f"error: {tmp_path / watch.STATE} ") and err.count("\n") == 1


def test_without_matplotlib_thresholds_are_still_passed(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write(tmp_path, 1e-6)
    out, _ = read_output(capsys, str(tmp_path), code=watch.PASSED)
    assert "1 threshold passed; no picture: " in out
    assert not (tmp_path / "figures").exists()
