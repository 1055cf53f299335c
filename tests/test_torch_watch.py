"""`rank_collapse.torch.watch`: training is the same, and the scalars are those of `rc.monitor`."""

import copy
import functools
import logging
import shutil
import subprocess
import sys

import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.runs import metrics

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from rank_collapse.torch import ROWS, watch  # noqa: E402

L, V = 3, 97
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1}
IDS = torch.arange(4 * 12).reshape(4, 12) * 7 % V


def gpt2(**fields):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": L, "n_head": 4, "vocab_size": V, "n_positions": 2 * ROWS}
    config = transformers.GPT2Config(**sizes, **SPECIAL, **fields)
    return transformers.GPT2LMHeadModel(config).train()


def trained(model, steps=4, accumulated=1, ids=IDS):
    """The losses of some steps of Adam."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulated):
            loss = model(input_ids=ids, labels=ids).loss / accumulated
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def by_hand(model, **inputs):
    """What each layer's attention reads and its weights, of a model that keeps its weights."""
    model = copy.deepcopy(model)
    model.config._attn_implementation = "eager"
    reads = []
    for block in model.transformer.h:
        block.attn.register_forward_pre_hook(
            lambda m, args, kw: reads.append((args[0] if args else kw["hidden_states"]).detach()),
            with_kwargs=True,
        )
    with torch.no_grad():
        weights = model(output_attentions=True, **inputs).attentions
    return reads, weights


def test_training_is_the_same_to_the_bit_with_dropout():
    plain, watched = gpt2(), gpt2()
    losses = trained(plain)
    with_hooks = watch(watched, every=2)
    assert trained(watched) == losses
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
    assert [row["step"] for row in with_hooks.rows] == [0, 2]
    assert [row["loss"] for row in with_hooks.rows] == losses[::2]
    with_hooks.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())
    trained(watched)
    assert len(with_hooks.rows) == 2


@pytest.mark.parametrize("padded", [False, True])
def test_scalars_are_those_of_the_monitor_on_the_same_arrays(padded):
    model = gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    mask = torch.arange(12)[None] < torch.tensor([12, 9, 12, 5])[:, None]
    given = {"attention_mask": mask.long()} if padded else {}
    reads, weights = by_hand(model, input_ids=IDS, **given)
    watched = watch(model, every=1)
    loss = model(input_ids=IDS, labels=IDS, **given).loss
    loss.backward()
    maps = model.transformer.h[1].attn.c_attn
    gradients = torch.cat([maps.weight.grad, maps.bias.grad[None]]).chunk(3, dim=1)
    norms = [torch.linalg.norm(part).item() for part in gradients]
    torch.optim.SGD(model.parameters(), 0.1).step()
    watched.close()
    (row,) = watched.rows
    shown = {"mask": mask.numpy()} if padded else {}
    for layer in range(L):
        expected = rc.monitor(reads[layer].numpy(), weights[layer].numpy(), **shown)
        for name, value in expected.items():
            np.testing.assert_allclose(row[name][layer], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for part, norm in zip(("query", "key", "value"), norms, strict=True):
        np.testing.assert_allclose(row[f"{part}_gradient"][1], norm, rtol=1e-5)
    assert row["loss"] == pytest.approx(loss.item())


def test_of_long_texts_some_queries_are_measured():
    model = gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    ids = torch.arange(2 * 2 * ROWS).reshape(2, -1) * 7 % V
    _, weights = by_hand(model, input_ids=ids)
    watched = watch(model, every=1)
    trained(model, 1, ids=ids)
    watched.close()
    rows = np.linspace(0, 2 * ROWS - 1, ROWS).astype(int)
    expected = [rc.attention_entropy(w.numpy()[:, :, rows]).mean() for w in weights]
    np.testing.assert_allclose(watched.rows[0]["attention_entropy"], expected, rtol=1e-5)


class Plain(torch.nn.Module):
    """Blocks of torch itself, tokens first or batch first."""

    def __init__(self, batch_first):
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=batch_first)
        self.encoder = torch.nn.TransformerEncoder(layer, L, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x).square().mean()


@pytest.mark.parametrize("tokens", ["read", "raw", "unit"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_blocks_of_torch(batch_first, tokens):
    model, rows = Plain(batch_first), []
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
    watched = watch(model, 1, lambda row, step: rows.append((step, row)), tokens, layers=[0, 2])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x if batch_first else x.transpose(0, 1)).backward()
    optimizer.step()
    watched.close()
    states, weights = [x], []
    fresh = Plain(True)
    for layer in fresh.encoder.layers:
        weights.append(
            layer.self_attn(states[-1], states[-1], states[-1], average_attn_weights=False)[1]
        )
        states.append(layer(states[-1]))
    measured = states[:-1] if tokens == "read" else states[1:]  # post-norm: attention reads X
    (step, row), (kept,) = rows[0], watched.rows
    assert step == 0 and kept["loss"] == row["loss"]
    for place, layer in enumerate((0, 2)):
        of = {"tokens": "unit"} if tokens == "unit" else {}
        expected = rc.monitor(measured[layer].detach().numpy(), **of)
        for name, value in expected.items():
            np.testing.assert_allclose(kept[name][place], value, rtol=1e-4, atol=1e-6, err_msg=name)
            assert row[f"{name}/layer_{layer}"] == kept[name][place]
        entropy = rc.attention_entropy(weights[layer].detach().numpy()).mean()
        np.testing.assert_allclose(kept["attention_entropy"][place], entropy, rtol=1e-4)


def rows_of(model, every=2, **how):
    watched = watch(model, every)
    trained(model, **how)
    watched.close()
    return watched.rows


def close(rows, others, rtol=1e-5):
    assert len(rows) == len(others) == 2
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name in row:
            np.testing.assert_allclose(other[name], row[name], rtol, 1e-6, err_msg=name)


QUIET = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def test_checkpointing_and_accumulation_give_the_same_numbers():
    rows = rows_of(gpt2(**QUIET))
    checkpointed = gpt2(**QUIET)
    for block in checkpointed.transformer.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    close(rows, rows_of(checkpointed))
    close(rows, rows_of(gpt2(**QUIET), accumulated=2))


COMPILER = shutil.which("c++") or shutil.which("g++")


@pytest.mark.filterwarnings("ignore")  # of dynamo and inductor, about what they do themselves
@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param(
            "inductor",
            marks=[pytest.mark.slow, pytest.mark.skipif(not COMPILER, reason="no C++ compiler")],
        ),
    ],
)
def test_compilation_gives_the_same_numbers(backend):
    model = gpt2(**QUIET)
    close(rows_of(gpt2(**QUIET)), rows_of(torch.compile(model, backend=backend)), rtol=1e-4)


def test_mixed_precision():
    """The numbers are those of the same arrays in float32, and training is the same to the bit."""
    plain, watched = gpt2(), gpt2()
    with torch.autocast("cpu", torch.bfloat16):
        losses = trained(plain)
        with_hooks = watch(watched, every=1)
        assert trained(watched) == losses
    with_hooks.close()
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
    model, reads, projected = gpt2(**QUIET), [], []
    for block in model.transformer.h:
        block.ln_1.register_forward_hook(lambda m, a, out: reads.append(out.detach().float()))
        block.attn.c_attn.register_forward_hook(lambda m, a, out: projected.append(out.detach()))
    with_hooks = watch(model, every=1)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=IDS, labels=IDS).loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    with_hooks.close()
    (row,) = with_hooks.rows
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    for layer in range(L):
        assert projected[layer].dtype == torch.bfloat16
        q, k, _ = (
            a.float().unflatten(-1, (4, 8)).transpose(1, 2) for a in projected[layer].chunk(3, -1)
        )
        scores = (q @ k.mT / np.sqrt(8)).masked_fill(~causal, -np.inf)
        expected = rc.monitor(reads[layer].numpy(), scores.softmax(-1).numpy())
        for name, value in expected.items():
            np.testing.assert_allclose(row[name][layer], value, rtol=1e-5, atol=1e-6, err_msg=name)


PEAK = """
import resource, sys, torch, transformers
from rank_collapse.torch import watch

torch.manual_seed(0)
torch.set_num_threads(1)
sizes = dict(n_embd=64, n_layer=4, n_head=8, vocab_size=8, n_positions=2048)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
    **sizes, bos_token_id=0, eos_token_id=1, attn_pdrop=0.0, _attn_implementation="sdpa"))
watched = watch(model, every=1) if sys.argv[1] == "watched" else None
optimizer, ids = torch.optim.SGD(model.parameters(), 0.1), torch.arange(2048)[None] % 8
for _ in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
assert watched is None or len(watched.rows) == 2
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_no_weights_of_attention_are_held():
    """The peak of a watched run is above the plain one by less than one layer's weights are."""
    plain, watched = (
        int(
            subprocess.run(
                [sys.executable, "-c", PEAK, how], capture_output=True, check=True
            ).stdout
        )
        for how in ("plain", "watched")
    )
    assert watched - plain < 8 * 2048 * 2048 * 4 / 2


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


def test_a_vision_model_of_timm():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": L, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=5, **sizes)
    model.train()
    reads, images = [], torch.randn(3, 3, 16, 16)
    for block in model.blocks:
        block.norm1.register_forward_hook(lambda m, a, out: reads.append(out.detach()))
    watched = watch(model, every=1)
    model(images).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    watched.close()
    (row,) = watched.rows
    assert len(row["query_gradient"]) == len(row["attention_entropy"]) == L
    for layer in range(L):
        for name, value in rc.monitor(reads[layer].numpy()).items():
            np.testing.assert_allclose(row[name][layer], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and loggers
def test_lightning_gives_steps_and_closes(tmp_path):
    lightning = pytest.importorskip("lightning")
    model = gpt2()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    watched = watch(model, every=2, log=tmp_path / "metrics.jsonl")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=5, accelerator="cpu", callbacks=[watched.lightning()], **quiet
    )
    data = torch.utils.data.DataLoader(IDS.repeat(2, 1), batch_size=4)
    trainer.fit(Module(), data)
    assert [row["step"] for row in watched.rows] == [0, 2, 4]
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


def test_the_trainer_gives_steps_and_closes(tmp_path):
    pytest.importorskip("accelerate")
    model = gpt2()
    watched = watch(model, every=2, log=tmp_path / "metrics.jsonl")
    arguments = transformers.TrainingArguments(
        tmp_path / "out", max_steps=5, report_to=[], save_strategy="no", use_cpu=True
    )
    examples = [{"input_ids": row, "labels": row} for row in IDS]
    transformers.Trainer(model, arguments, train_dataset=examples, callbacks=[watched.hf()]).train()
    assert [row["step"] for row in watched.rows] == [0, 2, 4]
    reader = metrics.Reader(tmp_path / "metrics.jsonl")
    reader.read()
    assert reader.ended and len(reader) == 3


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
        (lambda: torch.nn.Linear(2, 2), {}, "not clear in no list of modules"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), {}, r"'' \(1 × Linear\)"),
        (
            lambda: torch.nn.Transformer(8, 2, 1, 1, batch_first=True),
            {},
            "encoder.layers.*decoder.layers",
        ),
        (gpt2, {"layers": "h"}, "'h' is not among 'transformer.h' .3 × GPT2Block"),
        (gpt2, {"tokens": "all"}, "tokens='all' is not one of"),
        (gpt2, {"every": 0}, "every=0"),
    ],
)
def test_what_cannot_be_watched_is_refused(build, options, text):
    with pytest.raises(ValueError, match=text):
        watch(build(), **options)


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
    torch.distributed.init_process_group("gloo", where, rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(gpt2(**QUIET))
    watched = watch(model, every=1, log=f"{folder}/metrics.jsonl")
    trained(model, 2, ids=IDS[2 * rank : 2 * rank + 2])
    watched.close()
    torch.distributed.destroy_process_group()


def test_of_two_processes_the_first_writes_the_means(tmp_path):
    """As one process with all texts does, gradients too."""
    torch.multiprocessing.spawn(of_rank, (str(tmp_path),), nprocs=2)
    rows = metrics.read(tmp_path / "metrics.jsonl")
    close(rows_of(gpt2(**QUIET), every=1, steps=2), rows, rtol=1e-4)
