"""Steps: hooks that others remove, forks, modules that are new, and what a step costs."""

import itertools
import json
import os
import sys

import pytest

pytest.importorskip("torch")

from rank_collapse.torch import watch
from rank_collapse.watch import torch_watch
from rank_collapse.watch.torch_steps import CONTROL_FLOW, OpenWatches, StepTimes
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


def test_hooks_are_said_to_be_removed_only_where_they_are(caplog):
    """Every open watch says it where they are removed."""
    models = [Stack(add_in_turn, Attention()) for _ in range(2)]
    watches = [watch(model, 1) for model in models]
    OpenWatches.say_removed()  # as where the object of earlier hooks is deleted late
    assert not any("removed" in watched.describe() for watched in watches) and not caplog.text
    optimizers = sys.modules["torch.optim.optimizer"]
    optimizers._global_optimizer_pre_hooks.clear()
    optimizers._global_optimizer_post_hooks.clear()
    for watched in watches:
        assert "hooks of torch's optimizers were removed" in watched.notes.reasons[None, "steps"]
        watched.close()
    assert watch(models[0], 1).describe().count("\n") == 0


def test_a_closed_watch_measures_nothing_more():
    model = Stack(add_in_turn, Attention())
    step, watched = make_stepper(model), watch(model, 1)
    step()
    watched.close()
    watched.step = 7
    assert watched.measured is None
    step()
    assert (len(watched.rows), watched.step) == (1, 7)


def test_every_reason_of_a_module_that_is_no_layer_has_a_line():
    watched = watch(Stack(add_in_turn, Attention()), 1)
    for name, subject in ((None, "loss"), (None, "mask"), ("tail", "weights"), ("tail", "tokens")):
        watched.notes.leave_out(name, subject, f"{subject} fails")
    lines = watched.describe().splitlines()[1:]
    watched.close()
    assert sorted(lines) == [
        "  no loss: loss fails",
        "  no mask: mask fails",
        "  tail: no tokens: tokens fails",
        "  tail: no weights: weights fails",
    ]


def test_a_step_counts_once_where_others_removed_a_part_of_the_hooks():
    model = Stack(add_in_turn, Attention())
    step, watched = make_stepper(model), watch(model, 1)
    sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks.clear()
    other = watch(model, 1)
    step()
    assert (watched.step, other.step) == (1, 1)
    watched.close()
    other.close()


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


def test_a_chosen_layer_is_missing_until_it_runs():
    model = Stack(add_in_turn, Attention())
    watched, step = watch(model, 1, layers=[0, 1]), make_stepper(model)
    step()
    assert "no layer 1: attention ran in layer 0 alone" in watched.describe()
    model.attentions.append(Attention())
    step()
    watched.close()
    assert "no layer 1" not in watched.describe()
    assert watched.rows[1]["residual_ratio"][1] == pytest.approx(
        compute_ratio(model.attentions[1].kept[0]), rel=1e-4
    )


def test_a_module_that_is_not_there_is_answered_with_near_names():
    layers = nn.TransformerEncoderLayer(8, 2, 8)
    model = nn.TransformerEncoder(layers, 12, enable_nested_tensor=False)
    with pytest.raises(ValueError) as error:
        watch(model, layers="layer.3")
    assert "layers='layer.3' is not one of the 122 modules" in str(error.value)
    assert "'layers.3'" in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_the_first_one_writes(rank, monkeypatch, tmp_path):
    here = {"is_available": True, "is_initialized": True, "get_rank": rank}
    for name, value in here.items():
        monkeypatch.setattr(torch_watch.distributed, name, lambda value=value: value)
    model, path = Stack(add_in_turn, Attention()), tmp_path / "metrics.jsonl"
    step, watched = make_stepper(model), watch(model, 1, path)
    step()
    watched.close()
    assert len(watched.rows) == 1 and path.exists() == (rank == 0)


def test_an_optimizer_that_has_not_stepped_for_long_is_replaced(monkeypatch):
    """One that steps in between, or has other parameters, does not replace it."""
    monkeypatch.setattr(torch_watch, "NUM_SKIPPED", 2)
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    watched = watch(model, 10**6)
    names = ("first", "second", "other")
    parts = model.parameters(), model.parameters(), other.parameters()
    made = {n: torch.optim.SGD(p, 0.0) for n, p in zip(names, parts, strict=True)}
    steps = []
    order = ["other", "first", "second", "second", "first", *["other"] * 4]
    for name in (*order, "second", "second", "first", "second"):
        made[name].step()
        steps.append(watched.step)
    watched.close()
    assert steps == [0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 4, 4, 5]


class Scaled(torch.optim.SGD):
    """Halves the gradients in its step, as one that unscales them does."""

    def step(self, closure=None):
        if closure is not None:
            closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)


@pytest.mark.parametrize("form", ["plain", "zero", "scaled", "closure", "named closure"])
def test_gradients_are_those_before_the_step_unless_the_step_makes_them(form):
    """They are made by a closure, or by an optimizer that `GradScaler` leaves the scale to."""
    model = Stack(add_in_turn, Attention())
    optimizer, watched = Scaled(model.parameters(), 0.0), watch(model, 1)

    def compute_gradients():
        (model(X) * (form != "zero")).backward()

    if "closure" in form:
        model(X)  # to report its loss
    if form == "closure":
        optimizer.step(compute_gradients)
    elif form == "named closure":
        optimizer.step(closure=compute_gradients)
    else:
        compute_gradients()
        if form == "scaled":
            optimizer.grad_scale = torch.tensor(2.0)
        optimizer.step()
    watched.close()
    query = model.attentions[0].q
    after = torch.cat([query.weight.grad, query.bias.grad[:, None]], dim=1).norm().item()
    expected = after * (2 if form == "plain" else 1)
    assert watched.rows[0]["query_gradient"] == pytest.approx([expected], 1e-4)


def test_the_cost_of_a_measured_step(monkeypatch):
    clock = iter([0, 10, 10.5, 11.5, 21.5, 22.5, 25.5, 45.5])  # median: 10 s and 1 s
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    times = StepTimes()
    times.end_step(True)
    assert times.describe(3) == "known after the second measured step and a plain one"
    for is_measured in (True, False, False, True, False, False, True):
        times.end_step(is_measured)
    assert times.describe(3) == "a measured step took as long as 10.0 others, 75.0% of the time"
    assert times.describe(100) == "a measured step took as long as 10.0 others, 8.3% of the time"


def test_the_cost_is_that_of_the_last_fifty_steps(monkeypatch):
    durations = [*[1.0] * 60, *[2.0] * 50]
    clock = itertools.accumulate([*durations, *[8.0] * 60, *[6.0] * 50], initial=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    times = StepTimes()
    for number in range(221):
        times.end_step(number > 110)
    assert times.describe(1) == "a measured step took as long as 3.0 others, 66.7% of the time"


def test_the_names_of_control_flow_are_those_of_torch():
    from torch._higher_order_ops.associative_scan import associative_scan_op
    from torch._higher_order_ops.cond import cond_op
    from torch._higher_order_ops.map import map_impl
    from torch._higher_order_ops.scan import scan_op
    from torch._higher_order_ops.while_loop import while_loop_op

    operators = cond_op, while_loop_op, scan_op, associative_scan_op, map_impl
    assert [operator.name() for operator in operators] == [*CONTROL_FLOW]


@pytest.mark.parametrize(
    ("numbers", "measured"),
    [
        (range(6), [0, 2, 4]),
        (range(1, 6), [1, 2, 4]),
        ((0, 3, 4, 5, 9, 10, 11), [0, 3, 4, 9, 10]),
    ],
)
def test_steps_that_are_set_by_hand_are_due_by_their_numbers_and_their_cost_is_known(
    numbers, measured, monkeypatch
):
    model, ended, end_step = Stack(add_in_turn, Attention()), [], StepTimes.end_step
    monkeypatch.setattr(
        StepTimes, "end_step", lambda times, kind: (ended.append(kind), end_step(times, kind))
    )
    watched = watch(model, 2)
    for number in numbers:
        watched.step = number
        loss = model(X)
        watched.step = number  # again
        loss.backward()
    assert [row["step"] for row in watched.rows] == measured
    assert all(row["residual_ratio"] == watched.rows[0]["residual_ratio"] for row in watched.rows)
    assert "cost: a measured step took as long as" in watched.describe()
    # From 0 to the first number is a step in which nothing ran.
    assert ended == [False] * (numbers[0] > 0) + [n in measured for n in numbers[:-1]]
    watched.close()


def test_the_cost_beside_steps_that_take_no_time(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: 3.0)
    times = StepTimes()
    for is_measured in (True, False, True):
        times.end_step(is_measured)
    assert times.describe(2) == "a measured step took as long as 0.0 others, 0.0% of the time"


def test_a_watch_says_its_cost(monkeypatch):
    model, ended, end_step = Stack(add_in_turn, Attention()), [], StepTimes.end_step
    monkeypatch.setattr(
        StepTimes, "end_step", lambda times, kind: (ended.append(kind), end_step(times, kind))
    )
    watched, step = watch(model, 3), make_stepper(model)
    for _ in range(2):
        step()
    assert watched.describe().startswith("Stack, every 3 steps, 1 row; cost: known after")
    for _ in range(3):
        step()
    assert "cost: a measured step took as long as" in watched.describe().splitlines()[0]
    assert ended == [True, False, False, True, False]
    watched.close()
