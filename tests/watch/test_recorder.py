"""Rows of a watch: their alarms, their way to a log, and why something is left out."""

import logging
import sys
import types

import numpy as np
import pytest

pytest.importorskip("torch")
from rank_collapse.runs import metrics
from rank_collapse.torch import watch
from tests.oracles.watched_gpt2 import (
    IDS,
    QUIET,
    L,
    gpt2,
    torch,
    train_gpt2,
)


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
    wandb, lines = types.ModuleType("wandb"), []

    def log(row, step=None):
        lines.append((row, step))

    log.__module__, wandb.define_metric = "wandb.sdk", lambda name, step_metric: None
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    model = gpt2(**QUIET)
    watched = watch(model, every=1, log=log)
    train_gpt2(model, 2)
    watched.close()
    assert [(row["watch/step"], step) for row, step in lines] == [(0, None), (1, None)]


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
