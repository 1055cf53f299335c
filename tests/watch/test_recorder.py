"""Rows of a watch: their alarms, their way to a log, and why something is left out."""

import logging
import sys
import types
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
from rank_collapse.measures.table import MEASURES
from rank_collapse.runs import metrics
from rank_collapse.torch import watch
from rank_collapse.watch.recorder import (
    LeftOut,
    Notes,
    Recorder,
    flatten_row,
    make_transformers_callback,
    summarise_layers,
)
from tests.oracles.watched_gpt2 import (
    IDS,
    QUIET,
    L,
    gpt2,
    torch,
    train_gpt2,
)


@pytest.mark.full
def test_an_alarm_comes_before_the_loss_is_no_number(tmp_path, caplog):
    model = gpt2(**QUIET)
    path = tmp_path / "metrics.jsonl"
    watched = watch(model, every=1, log=path, tokens="raw")
    optimizer = torch.optim.SGD(model.parameters(), 3e3)
    with caplog.at_level(logging.WARNING, "rank_collapse"):
        for _ in range(12):
            loss = model(input_ids=IDS, labels=IDS).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watched.close()
    rows = metrics.read(path)
    assert len(rows) == 12 and rows[0]["residual_ratio"].shape == (L,)
    metric = {alarm.metric for alarm in watched.alarms}
    assert metric & {"residual_ratio", "token_cosine", "attention_entropy"}
    texts = [record.getMessage() for record in caplog.records if record.name == "rank_collapse"]
    assert texts == [str(alarm) for alarm in watched.alarms]
    early = min(a.step for a in watched.alarms if a.metric != "loss")
    broken = [row["step"] for row in rows if not np.isfinite(row["loss"])]
    assert early < broken[0]


def test_wandb_has_steps_of_its_own(monkeypatch):
    """Otherwise wandb would drop rows that come between those of a trainer."""
    wandb, lines, defined = types.ModuleType("wandb"), [], []

    def log(row, step=None):
        lines.append((row, step))

    def define(name, step_metric):
        defined.append((name, step_metric))

    log.__module__, wandb.define_metric = "wandb.sdk", define
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    model = gpt2(**QUIET)
    watched = watch(model, every=1, log=log)
    train_gpt2(model, 2)
    watched.close()
    assert [(row["watch/step"], step) for row, step in lines] == [(0, None), (1, None)]
    assert "watch/loss" in lines[0][0] and all(name.startswith("watch/") for name in lines[0][0])
    assert defined == [("watch/*", "watch/step")] * 2


def test_a_writer_gets_every_number_of_a_row():
    lines = []
    writer = types.SimpleNamespace(add_scalar=lambda *line: lines.append(line))
    model = gpt2(**QUIET)
    watched = watch(model, every=1, log=writer)
    train_gpt2(model, 1)
    watched.close()
    (row,) = watched.rows
    expected = []
    for name in row.keys() - {"step"}:
        values = np.atleast_1d(row[name])
        places = [f"{name}/layer_{i}" for i in range(len(values))] if np.ndim(row[name]) else [name]
        expected += zip(places, values, strict=True)
    assert len(expected) > 20
    assert sorted(lines) == sorted((*line, 0) for line in expected if not np.isnan(line[1]))


def test_a_log_may_be_a_function_whose_module_is_unknown():
    """That of a method of a built-in type is None."""
    logged = {}
    Recorder(logged.update, Notes()).add(3, {"a": {0: 1.0, 1: 2.0}}, 2)
    assert logged == {"a/layer_0": 1.0, "a/layer_1": 2.0, "step": 3}


def test_a_path_that_is_too_long_is_refused_in_short():
    with pytest.raises(ValueError, match=r"^log='a{40}'\.\.\. is not a path: .*too long"):
        Recorder(Path("a" * 300), Notes())


def test_a_log_that_fails_for_a_while_goes_on():
    def log(row, step):
        steps.append(step)
        if step < 4:
            raise OSError("no space left")

    model, steps = gpt2(**QUIET), []
    watched = watch(model, every=1, log=log)
    train_gpt2(model, 6)
    assert steps == [0, 1, 2, 3, 4, 5] and "no space" not in watched.describe()
    watched.close()


@pytest.mark.parametrize("mode", ["eval", "no gradients", "another class"])
def test_silence_has_a_reason(mode, caplog):
    model = gpt2(**QUIET)
    watched, optimizer = watch(model, every=1), torch.optim.SGD(model.parameters(), 0.1)
    with caplog.at_level(logging.WARNING, "rank_collapse"):
        for _ in range(3):
            with torch.set_grad_enabled(mode != "no gradients"):
                model.train(mode != "eval")
                if mode != "another class":
                    model(input_ids=IDS)
            optimizer.step()
    watched.close()
    assert not watched.rows and len(caplog.records) == 1
    words = {"eval": "eval mode", "no gradients": "without gradients", "another class": "ran"}
    assert words[mode] in watched.describe()


def fail(error):
    raise error


def test_a_reason_is_kept_until_it_is_measured_again(caplog):
    notes = Notes()
    assert notes.attempt("h.0", "weights", fail, LeftOut("no keys")) is None
    assert notes.attempt("h.1", "weights", fail, LeftOut("no keys")) is None
    assert notes.attempt(None, "loss", fail, KeyError("x")) is None
    assert notes.attempt("h.1", "tokens", fail, ValueError("of torch")) is None
    notes.remark("h.2", "padding", "reads padding")
    notes.remark(None, "other", "reads padding")
    assert notes.reasons == {
        ("h.0", "weights"): "no weights: no keys",
        ("h.1", "weights"): "no weights: no keys",
        (None, "loss"): "no loss: KeyError: 'x'",
        ("h.1", "tokens"): "no tokens: ValueError: of torch",
        ("h.2", "padding"): "reads padding",
        (None, "other"): "reads padding",
    }
    assert caplog.messages == [  # the first of each kind
        "watch: no weights of h.0: no keys",
        "watch: no loss: KeyError: 'x'",
        "watch: no tokens of h.1: ValueError: of torch",
        "watch: h.2: reads padding",
    ]
    assert notes.attempt("h.0", "weights", lambda a, b: a + b, 1, 2) == 3
    assert ("h.0", "weights") not in notes.reasons and ("h.1", "weights") in notes.reasons
    notes.leave_out(None, "memory", "MemoryError: 3 bytes")
    notes.leave_out(None, "memory", "MemoryError: 4 bytes")
    assert notes.reasons[None, "memory"] == "no memory: MemoryError: 4 bytes"
    assert [text for text in caplog.messages if "MemoryError" in text] == [
        "watch: no memory: MemoryError: 3 bytes"
    ]


def test_an_error_of_a_handler_of_warnings_is_no_error(monkeypatch):
    monkeypatch.setattr(logging.getLogger("rank_collapse"), "warning", lambda *_: fail(OSError()))
    Notes().warn("text")


def test_a_row_has_a_value_for_each_layer_or_one_for_all(caplog):
    lines = []
    recorder = Recorder(lambda row, step: lines.append((step, row)), Notes())
    nan = float("nan")
    scalars = {"residual_ratio": {0: 0.5, 2: 0.001}, "loss": {-1: 2.0}}
    recorder.add(7, scalars, 3)
    recorder.add(8, scalars | {"loss": {-1: nan}}, 3)
    recorder.add(9, scalars, 3, writes=False)
    np.testing.assert_equal(
        recorder.rows[0], {"step": 7, "residual_ratio": [0.5, nan, 0.001], "loss": 2.0}
    )
    assert len(recorder.rows) == 3 and [step for step, _ in lines] == [7, 8]
    assert lines[0][1] == {
        "residual_ratio/layer_0": 0.5,
        "residual_ratio/layer_2": 0.001,
        "loss": 2.0,
    }
    ratio, loss = recorder.alarms  # each once
    assert (ratio.step, ratio.layer, ratio.threshold) == (7, 2, MEASURES["residual_ratio"].alarm)
    assert (loss.step, loss.metric) == (8, "loss")
    assert caplog.messages == [str(ratio), str(loss)]


def test_a_row_is_written_to_a_folder_or_a_file(tmp_path):
    for log in (tmp_path, tmp_path / "a.jsonl", str(tmp_path / "b.jsonl")):
        recorder = Recorder(log, Notes())
        recorder.add(3, {"a": {0: 1.0, 1: 2.0}}, 2)
        path = tmp_path / metrics.NAME if log == tmp_path else log
        (row,) = metrics.read(path)
        assert row["step"] == 3 and row["a"].tolist() == [1.0, 2.0]
        Recorder(log, Notes()).add(4, {"a": {0: 3.0}}, 1)  # to a file that exists
        assert [row["step"] for row in metrics.read(path)] == [3, 4]


def test_what_the_trainer_prints_is_of_the_layers_that_were_measured():
    nan = float("nan")
    row = {"residual_ratio": [nan, 0.5, 0.25, 0.75], "attention_entropy": [nan, nan], "loss": [1.0]}
    assert summarise_layers(row) == {
        "residual_ratio_mean_of_layers": 0.5,
        "residual_ratio_of_worst_layer": 0.25,
        "residual_ratio_worst_layer": 2,
    }
    assert summarise_layers({}) == {}
    flat = [*flatten_row({"a": [nan, 1.0], "b": 2.0, "c": []})]
    assert flat == [("a/layer_1", 1.0), ("b", 2.0)]


def test_the_callback_counts_steps_from_1_logs_the_last_row_and_closes():
    calls = []
    watched = types.SimpleNamespace(rows=[], step=None, close=lambda: calls.append("close"))
    callback = make_transformers_callback(watched)
    state = types.SimpleNamespace(global_step=4, log_history=[{"loss": 1.0}, {"loss": 0.5}])
    callback.on_step_begin(None, state, None)
    assert watched.step == 5
    logs = {"loss": 0.5}
    callback.on_log(None, state, None, logs=logs)  # before the first row
    assert logs == {"loss": 0.5} == state.log_history[-1]
    watched.rows += [{"step": 1, "residual_ratio": [0.9]}]
    watched.rows += [{"step": 3, "residual_ratio": [0.5, 0.25], "loss": 9.0}]
    callback.on_log(None, state, None, logs=logs)
    added = {"residual_ratio/layer_0": 0.5, "residual_ratio/layer_1": 0.25}
    assert state.log_history == [{"loss": 1.0}, {"loss": 0.5} | added]
    assert logs == {
        "loss": 0.5,
        "residual_ratio_mean_of_layers": 0.375,
        "residual_ratio_of_worst_layer": 0.25,
        "residual_ratio_worst_layer": 1,
    }
    assert not calls
    callback.on_train_end(None, state, None)
    assert calls == ["close"]
