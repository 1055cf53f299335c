"""Steps: hooks that others remove, forks, modules that are new, and what a step costs."""

import json
import os
import sys

import pytest

pytest.importorskip("torch")

from rank_collapse.torch import watch
from rank_collapse.watch.torch_steps import OpenWatches, StepTimes
from tests.oracles.measured_layers import Attention, Stack, X, add_in_turn, compute_ratio, nn, torch


def make_stepper(model, rate=0.0):
    optimizer = torch.optim.SGD(model.parameters(), rate)

    def step():
        model(X).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("every", [1, 2])
def test_hooks_that_others_remove_are_said(every, caplog):
    model = Stack(add_in_turn, Attention())
    step, watched = make_stepper(model), watch(model, every)
    step()
    step()
    num_rows, reason = len(watched.rows), "hooks of torch's optimizers were removed"
    assert reason not in watched.describe() + caplog.text
    optimizers = sys.modules["torch.optim.optimizer"]
    optimizers._global_optimizer_pre_hooks.clear()
    optimizers._global_optimizer_post_hooks.clear()
    assert caplog.text.count(reason) == 1
    step()
    step()
    assert len(watched.rows) == num_rows and watched.describe().count(reason) == 1
    watched.step = 4
    step()
    watched.step = 5
    assert watched.rows[-1]["step"] == 4  # by hand
    other = watch(model, 1)
    step()
    assert other.rows and OpenWatches.has_hooks() and reason not in watched.describe()
    watched.close()
    other.close()
    assert caplog.text.count(reason) == 1


def test_a_fork_writes_no_line(tmp_path, monkeypatch):
    path, model = tmp_path / "metrics.jsonl", Stack(add_in_turn, Attention())
    watched, step = watch(model, 1, path), make_stepper(model)
    step()
    with monkeypatch.context() as forked:
        process = os.getpid()
        forked.setattr(os, "getpid", lambda: process + 1)
        step()
        assert len(watched.rows) == 2
        assert "no line of the log: this process was forked" in watched.describe()
    step()
    watched.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 2]


def test_modules_that_are_new_have_their_names():
    model = Stack(add_in_turn, Attention(), Attention())
    watched, step = watch(model, 1), make_stepper(model)
    step()
    model.attentions[1] = Attention()
    step()
    replaced = compute_ratio(model.attentions[1].kept[0])
    assert watched.rows[1]["residual_ratio"][1] == pytest.approx(replaced, rel=1e-4)
    model.attentions.append(Attention())
    step()
    watched.close()
    expected = [compute_ratio(a.kept[0]) for a in model.attentions]
    assert watched.rows[2]["residual_ratio"] == pytest.approx(expected, rel=1e-4)
    lines = watched.describe().splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == [f"  {i} attentions.{i}" for i in range(3)]


def test_a_module_that_is_not_there_is_answered_with_near_names():
    layers = nn.TransformerEncoderLayer(8, 2, 8)
    model = nn.TransformerEncoder(layers, 12, enable_nested_tensor=False)
    with pytest.raises(ValueError) as error:
        watch(model, layers="layer.3")
    assert "layers='layer.3' is not one of the 122 modules" in str(error.value)
    assert "'layers.3'" in str(error.value) and len(str(error.value)) < 200


def test_the_cost_of_a_measured_step(monkeypatch):
    clock = iter([0, 10, 11, 12, 22, 23, 24, 34])  # measured: 10 s, others: 1 s
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    times = StepTimes()
    times.end_step(True)
    assert times.describe(3) == "known after the second measured step and a plain one"
    for is_measured in (True, False, False, True, False, False, True):
        times.end_step(is_measured)
    assert times.describe(3) == "a measured step took as long as 10.0 others, 75.0% of the time"
    assert times.describe(100) == "a measured step took as long as 10.0 others, 8.3% of the time"


def test_a_watch_says_its_cost():
    model = Stack(add_in_turn, Attention())
    watched, step = watch(model, 2), make_stepper(model)
    for _ in range(2):
        step()
    assert "cost: known after" in watched.describe()
    for _ in range(3):
        step()
    assert "cost: a measured step took as long as" in watched.describe().splitlines()[0]
    watched.close()
