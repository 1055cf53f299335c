"""`rank_collapse.torch.watch` in training loops: trainers, alarms, two processes, refusals."""

import contextlib
import datetime
import gc

import numpy as np
import pytest

pytest.importorskip("torch")

from rank_collapse.runs import metrics
from rank_collapse.torch import Watch, watch
from rank_collapse.watch import torch_passes
from rank_collapse.watch.torch_steps import OpenWatches
from tests.oracles.watched_gpt2 import (
    IDS,
    QUIET,
    L,
    gpt2,
    measure_rows,
    torch,
    train_gpt2,
    transformers,
)
from tests.support.broken_watch import BROKEN, break_part, raises


def test_a_forward_pass_inside_the_step_of_the_optimizer():
    """As Lightning calls it, with a closure."""
    model = gpt2(**QUIET)
    watched = watch(model, every=2)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []

    def closure():
        optimizer.zero_grad()
        losses.append(model(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        return losses[-1]

    for _ in range(4):
        optimizer.step(closure)
    watched.close()
    assert [row["step"] for row in watched.rows] == [0, 2]
    assert [row["loss"] for row in watched.rows] == [loss.item() for loss in losses[::2]]


def with_lightning(model, folder, **options):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):  # itself it is not called
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Module()
    watched = watch(module, **options)
    trainer = lightning.Trainer(max_steps=5, accelerator="cpu", **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(IDS.repeat(2, 1), batch_size=4))
    return watched


def with_two_optimizers(model, folder, **options):
    """Lightning counts the steps of both optimizers, and the watch those of the first."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.automatic_optimization = model, False

        def training_step(self, batch, _):
            loss = self.model(input_ids=batch, labels=batch).loss
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            parameters = list(self.parameters())
            return [torch.optim.SGD(part, 0.1) for part in (parameters[:1], parameters[1:])]

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Module()
    watched = watch(module, **options)
    trainer = lightning.Trainer(max_steps=10, accelerator="cpu", **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(IDS.repeat(5, 1), batch_size=4))
    return watched


def with_hugging_face(model, folder, **options):
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        folder / "out",
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    examples = [{"input_ids": row, "labels": row} for row in IDS]
    watched = watch(model, **options)
    prints = []

    class Keep(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            prints.append(dict(logs))

    trainer = transformers.Trainer(
        model, arguments, train_dataset=examples, callbacks=[watched.hf(), Keep()]
    )
    trainer.train()
    logged = {entry["step"]: entry for entry in trainer.state.log_history[:-1]}
    for row in watched.rows[1:]:
        scalars = {f"residual_ratio/layer_{i}": v for i, v in enumerate(row["residual_ratio"])}
        assert scalars.items() <= logged[row["step"]].items()
    printed, row = [logs for logs in prints if "loss" in logs][-1], watched.rows[-1]
    ours = {name for name in printed if name.startswith(("residual", "attention", "token"))}
    assert len(ours) == 6 and next(iter(printed)) == "loss"
    for name in ("residual_ratio", "attention_entropy"):
        assert printed[f"{name}_mean_of_layers"] == pytest.approx(np.mean(row[name]))
        assert printed[f"{name}_of_worst_layer"] == min(row[name])
        assert printed[f"{name}_worst_layer"] == np.argmin(row[name])
    return watched


@pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and loggers
@pytest.mark.parametrize(
    "train, steps",
    [
        (with_lightning, [0, 2, 4]),
        (with_two_optimizers, [0, 2, 4]),
        (with_hugging_face, [1, 2, 4]),
    ],
)
def test_a_trainer_gives_steps_and_closes(train, steps, tmp_path):
    watched = train(gpt2(), tmp_path, every=2, log=tmp_path)
    assert [row["step"] for row in watched.rows] == steps
    assert len(metrics.read(tmp_path / "metrics.jsonl")) == 3
    assert watched not in OpenWatches.open


def test_evaluation_and_other_optimizers_are_not_counted():
    model = gpt2()
    watched = watch(model, every=1)
    other = torch.nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    with torch.no_grad():
        model.eval()(input_ids=IDS)
    assert watched.step == 0 and not watched.rows
    train_gpt2(model.train(), 1)
    watched.close()
    assert watched.step == 1 and len(watched.rows) == 1


@pytest.mark.parametrize(
    "build, options, text",
    [
        (lambda: None, {}, "model=None"),
        (gpt2, {"layers": []}, r"layers=\[\]"),
        (gpt2, {"mask": 3}, r"mask=3 is not a function of \(args, kwargs\)"),
        (gpt2, {"log": "x" * 300}, r"^log='x{40}'\.\.\. is not a path: "),
        (gpt2, {"tokens": "all"}, "tokens='all' is not one of"),
        (gpt2, {"every": 0}, "every=0"),
        (gpt2, {"every": 1.5}, "every=1.5"),
        (gpt2, {"every": True}, "every=True"),
        (gpt2, {"log": 3}, "log=3"),
    ],
)
def test_what_cannot_be_watched_is_refused(build, options, text):
    defaults = {"every": 100, "log": None, "tokens": "read", "layers": None, "mask": None}
    with pytest.raises(ValueError, match=text):
        Watch(build(), **(defaults | options))


def test_a_layer_that_does_not_exist_is_named(caplog):
    model = gpt2(**QUIET)
    watched = watch(model, every=1, layers=[0, 70])
    train_gpt2(model, 2)
    watched.close()
    # transformers warns, too, in the first test of a process.
    lines = [line for line in caplog.messages if line.startswith("watch")]
    assert lines == [f"watch: no layer 70: attention ran in layers 0 to {L - 1}"]
    assert np.isfinite(watched.rows[0]["residual_ratio"][0]) and len(watched.rows) == 2
    caplog.clear()
    nothing = watch(model, every=1, layers=[70])
    train_gpt2(model, 1)
    nothing.close()
    assert "layers 0 to" in caplog.text and "no product" not in caplog.text


def run_rank(rank, folder, watching):
    """Runs one of two processes, with half of the texts; measured rows go to a file."""
    where = f"file://{folder}/meet"
    limit = datetime.timedelta(minutes=2)  # for the other, if it fails
    torch.distributed.init_process_group("gloo", where, limit, rank=rank, world_size=2)
    train_rank(rank, folder, watching)
    # A model that outlives its group closes it with Python's lock held, for which the group's own
    # threads may wait: a rare deadlock of torch 2.13.
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train_rank(rank, folder, watching):
    """Trains the model of one process for two steps."""
    model = torch.nn.parallel.DistributedDataParallel(gpt2(**QUIET))
    if rank < watching:
        watched = watch(model, every=1, log=f"{folder}/metrics.jsonl")
    train_gpt2(model, 2, ids=IDS[2 * rank : 2 * rank + 2])
    if rank < watching:
        watched.close()


@pytest.mark.full
@pytest.mark.parametrize("watching", [1, 2])
def test_of_two_processes_the_first_writes(tmp_path, watching):
    """It writes what it measures of its own texts; gradients are those of all texts."""
    arguments = str(tmp_path), watching
    first = torch.multiprocessing.spawn(run_rank, arguments, nprocs=1, join=False)
    run_rank(1, *arguments)
    first.join()
    rows = metrics.read(tmp_path / "metrics.jsonl")
    half = measure_rows(gpt2(**QUIET), every=1, steps=2, ids=IDS[:2])
    assert len(rows) == 2 and rows[0]["residual_ratio"].tolist() == half[0]["residual_ratio"]


@pytest.mark.parametrize("broken", BROKEN)
def test_no_error_reaches_training(broken, monkeypatch, tmp_path):
    """Training stays the same when every measure breaks, or nothing can be written."""
    plain, watched = gpt2(), gpt2()
    losses, log = train_gpt2(plain), break_part(broken, monkeypatch, tmp_path)
    with_hooks = watch(watched, every=1, log=log)
    assert train_gpt2(watched) == losses
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
    assert "no space left" in with_hooks.describe().lower()
    with_hooks.close()
    assert with_hooks.step == 4 and [row["loss"] for row in with_hooks.rows] == losses


def test_a_step_after_one_that_failed_is_measured(monkeypatch):
    see_call, attempts = torch_passes.Pass._see_call, iter([raises])
    monkeypatch.setattr(
        torch_passes.Pass, "_see_call", lambda *call: next(attempts, see_call)(*call)
    )
    failed, measured = measure_rows(gpt2(**QUIET), every=1, steps=2)
    assert failed.keys() == {"step", "loss"} and np.isfinite(measured["residual_ratio"]).all()


def test_a_layer_without_gradients_is_named():
    model = gpt2(**QUIET)
    model.transformer.h[1].attn.requires_grad_(False)
    watched = watch(model, every=1)
    train_gpt2(model, 1)
    watched.close()
    reasons = [line for line in watched.describe().splitlines() if "no query gradient" in line]
    assert len(reasons) == 1 and "h.1.attn" in reasons[0]
    assert np.isnan(watched.rows[0]["query_gradient"]).tolist() == [i == 1 for i in range(L)]


def test_the_steps_of_one_optimizer_count():
    model = gpt2(**QUIET)
    watched, ids = watch(model, every=2), {"input_ids": IDS, "labels": IDS}
    groups = [[p for p in model.parameters() if (p.ndim > 1) == big] for big in (True, False)]
    optimizers = [torch.optim.SGD(parameters, 0.1) for parameters in groups]
    skipped = model(**ids).loss
    skipped.backward()
    model.zero_grad()  # as where a GradScaler found an overflow
    with pytest.raises(IndexError):
        model(input_ids=IDS + 999)
    for _ in range(3):
        loss = model(**ids).loss if watched.rows else model(IDS[:2], labels=IDS[:2]).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if watched.step == 1:
            assert watched.rows[0]["loss"] in (loss.item(), skipped.item())
    assert watched.step == 3 and [row["step"] for row in watched.rows] == [0, 2]
    del optimizers, optimizer
    train_gpt2(model, 1)
    assert watched.step == 4
    watched.close()


@pytest.mark.filterwarnings("ignore")  # of dynamo, about what it does itself
def test_steps_that_torch_does_not_see_are_said():
    model = gpt2(**QUIET)
    watched, optimizer = watch(model, every=2), torch.optim.SGD(model.parameters(), 0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(4):
        watched.step = number
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        step()
    assert [row["step"] for row in watched.rows] == [0, 2]
    assert "compiled" in watched.describe()
    for wrong in (None, 1.5, -1):
        with pytest.raises(ValueError, match=f"step={wrong} is not a whole number"):
            watched.step = wrong
    assert watched.step == 3
    watched.close()


def test_an_optimizer_that_never_steps_is_named_at_the_end(caplog):
    model = gpt2(**QUIET)
    watched = watch(model, every=1)
    watched.close()

    def list_warnings():  # transformers warns, too, in the first test of a process
        return [line for line in caplog.messages if line.startswith("watch")]

    assert not list_warnings()  # nothing ran
    watched = watch(model, every=1)
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
    watched.close()
    watched.close()
    reason = "no rows: no optimizer of the model stepped: set Watch.step before each step"
    assert list_warnings() == [f"watch: {reason}"] and reason in watched.describe()


@pytest.mark.parametrize("is_inside", [False, True])
def test_who_else_replaces_the_call_of_modules_is_called(is_inside, monkeypatch):
    """The call is replaced before a watch begins, or while it measures; it is kept after it."""
    model, called = gpt2(**QUIET), []
    expected = measure_rows(gpt2(**QUIET), every=1, steps=3)

    def replace():
        usual = torch.nn.Module.__call__

        def call(module, *args, **kwargs):
            called.append(module)
            return usual(module, *args, **kwargs)

        monkeypatch.setattr(torch.nn.Module, "__call__", call)
        return call

    call = None if is_inside else replace()
    watched = watch(model, every=1)
    call = call or replace()
    train_gpt2(model, 3)
    watched.close()
    assert torch.nn.Module.__call__ is call and called.count(model) == 3
    np.testing.assert_equal(watched.rows, expected)
    train_gpt2(model, 1)
    assert called.count(model) == 4
    again = watch(model, every=1)
    train_gpt2(model, 1)
    again.close()
    assert torch.nn.Module.__call__ is call and called.count(model) == 5
    assert np.isfinite(again.rows[0]["residual_ratio"]).all()


def test_watches_go_on_after_others_have_put_back_the_call_of_torch():
    usual, model = torch.nn.Module._wrapped_call_impl, gpt2(**QUIET)
    watched = watch(model, every=2)
    torch.nn.Module.__call__ = usual  # as one does who replaced it before, in a measured step
    train_gpt2(model, 3)
    watched.close()
    assert [row["step"] for row in watched.rows] == [2]
    assert torch.nn.Module.__call__ is usual


@pytest.mark.full
def test_a_pass_that_ctrl_c_ended_keeps_no_model():
    def interrupt(*_):
        raise KeyboardInterrupt

    model = gpt2(**QUIET)
    watched = watch(model, every=1)
    model.transformer.h[1].register_forward_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        model(IDS, labels=IDS)
    del model
    gc.collect()
    assert "a model that is gone" in watched.describe()
    assert not torch.overrides._len_torch_function_stack() and OpenWatches.stance is None
