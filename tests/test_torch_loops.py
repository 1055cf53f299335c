"""`rank_collapse.torch.watch` in training loops: trainers, alarms, two processes, refusals."""

import datetime
import logging

import numpy as np
import pytest
from watched_gpt2 import IDS, QUIET, L, close, gpt2, rows_of, torch, trained, transformers

from rank_collapse.runs import metrics
from rank_collapse.torch import Watch, watch


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


def with_lightning(model, watched, folder):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=5, accelerator="cpu", callbacks=[watched.lightning()], **quiet
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(IDS.repeat(2, 1), batch_size=4))


def with_hugging_face(model, watched, folder):
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        folder / "out", max_steps=5, report_to=[], save_strategy="no", use_cpu=True
    )
    examples = [{"input_ids": row, "labels": row} for row in IDS]
    transformers.Trainer(model, arguments, train_dataset=examples, callbacks=[watched.hf()]).train()


@pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and loggers
@pytest.mark.parametrize(
    "train, steps", [(with_lightning, [0, 2, 4]), (with_hugging_face, [1, 2, 4])]
)
def test_a_trainer_gives_steps_and_closes(train, steps, tmp_path):
    model = gpt2()
    watched = watch(model, every=2, log=tmp_path / "metrics.jsonl")
    train(model, watched, tmp_path)
    assert [row["step"] for row in watched.rows] == steps
    reader = metrics.Reader(tmp_path / "metrics.jsonl")
    reader.read()
    assert reader.ended and len(reader) == 3


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
    assert len(caplog.records) == len(watched.alarms)
    early = min(a.step for a in watched.alarms if a.metric != "loss")
    broken = [row["step"] for row in rows if not np.isfinite(row["loss"])]
    assert early < (broken[0] if broken else 12)


def test_evaluation_and_other_optimizers_are_not_counted():
    model = gpt2()
    watched = watch(model, every=1)
    other = torch.nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    with torch.no_grad():
        model.eval()(input_ids=IDS)
    assert watched.step == 0 and not watched.rows
    trained(model.train(), 1)
    watched.close()
    assert watched.step == 1 and len(watched.rows) == 1


@pytest.mark.parametrize(
    "build, options, text",
    [
        (lambda: torch.nn.Linear(2, 2), {}, "no layers with attention in a Linear"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), {}, "in a Sequential"),
        (
            lambda: torch.nn.Transformer(8, 2, 1, 1, batch_first=True),
            {},
            "encoder.layers.*decoder.layers",
        ),
        (gpt2, {"layers": "h"}, "'h' is not among 'transformer.h' .3 × GPT2Block"),
        (gpt2, {"tokens": "all"}, "tokens='all' is not one of"),
        (gpt2, {"every": 0}, "every=0"),
        (gpt2, {"every": 1.5}, "every=1.5"),
        (gpt2, {"log": 3}, "log=3"),
        (gpt2, {"layers": [7]}, r"layers=\[7\] of a model with layers 0 to 2"),
    ],
)
def test_what_cannot_be_watched_is_refused(build, options, text):
    given = {"every": 100, "log": None, "tokens": "read", "layers": None}
    with pytest.raises(ValueError, match=text):
        Watch(build(), **(given | options))


def test_one_of_two_lists_by_its_name():
    model = torch.nn.Transformer(8, 2, 1, 2, 16, batch_first=True)
    watched = watch(model, 1, layers="decoder.layers")
    x = torch.randn(2, 5, 8)
    model(x, x).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    watched.close()
    assert len(watched.rows[0]["residual_ratio"]) == 2


def of_rank(rank, folder):
    """One of two processes with half of the texts each; the measured rows go to a file."""
    where = f"file://{folder}/meet"
    limit = datetime.timedelta(minutes=2)  # for the other, if it fails
    torch.distributed.init_process_group("gloo", where, limit, rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(gpt2(**QUIET))
    watched = watch(model, every=1, log=f"{folder}/metrics.jsonl")
    trained(model, 2, ids=IDS[2 * rank : 2 * rank + 2])
    watched.close()
    torch.distributed.destroy_process_group()


def test_of_two_processes_the_first_writes_the_means(tmp_path):
    """As one process with all texts does, gradients too."""
    first = torch.multiprocessing.spawn(of_rank, (str(tmp_path),), nprocs=1, join=False)
    of_rank(1, str(tmp_path))
    first.join()
    rows = metrics.read(tmp_path / "metrics.jsonl")
    close(rows_of(gpt2(**QUIET), every=1, steps=2), rows, rtol=1e-4)
