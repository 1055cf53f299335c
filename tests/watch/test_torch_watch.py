"""`rank_collapse.torch.watch`: training is the same, and the scalars are those of `rc.monitor`."""

import copy
import functools
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest

pytest.importorskip("torch")

import rank_collapse as rc
from rank_collapse.torch import watch
from rank_collapse.watch.torch_products import ROWS
from rank_collapse.watch.torch_watch import SHARED, _combine_products
from tests.oracles.measured_layers import Attention, Stack, X, add_in_turn, watch_step
from tests.oracles.watched_gpt2 import (
    IDS,
    QUIET,
    L,
    V,
    close,
    gpt2,
    measure_rows,
    torch,
    train_gpt2,
)


def run_by_hand(model, **inputs):
    """Returns what each layer's attention reads, and its weights, by eager attention."""
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
    losses = train_gpt2(plain)
    with_hooks = watch(watched, every=2)
    assert train_gpt2(watched) == losses
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
    assert [row["step"] for row in with_hooks.rows] == [0, 2]
    assert [row["loss"] for row in with_hooks.rows] == losses[::2]
    with_hooks.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())
    train_gpt2(watched)
    assert len(with_hooks.rows) == 2


@pytest.mark.parametrize("padded", [False, True])
def test_scalars_are_those_of_the_monitor_on_the_same_arrays(padded):
    model = gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    mask = torch.arange(12)[None] < torch.tensor([12, 9, 12, 5])[:, None]
    padding = {"attention_mask": mask.long()} if padded else {}
    reads, weights = run_by_hand(model, input_ids=IDS, **padding)
    watched = watch(model, every=1)
    loss = model(input_ids=IDS, labels=IDS, **padding).loss
    loss.backward()
    maps = model.transformer.h[1].attn.c_attn
    gradients = torch.cat([maps.weight.grad, maps.bias.grad[None]]).chunk(3, dim=1)
    norms = [torch.linalg.norm(part).item() for part in gradients]
    torch.optim.SGD(model.parameters(), 0.1).step()
    watched.close()
    (row,) = watched.rows
    monitor_mask = {"mask": mask.numpy()} if padded else {}
    for layer in range(L):
        expected = rc.monitor(reads[layer].numpy(), weights[layer].numpy(), **monitor_mask)
        for name, value in expected.items():
            np.testing.assert_allclose(row[name][layer], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for part, norm in zip(("query", "key", "value"), norms, strict=True):
        np.testing.assert_allclose(row[f"{part}_gradient"][1], norm, rtol=1e-5)
    assert row["loss"] == pytest.approx(loss.item())


def test_of_long_texts_some_queries_are_measured():
    model = gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    ids = torch.arange(2 * 2 * ROWS).reshape(2, -1) * 7 % V
    _, weights = run_by_hand(model, input_ids=ids)
    watched = watch(model, every=1)
    train_gpt2(model, 1, ids=ids)
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
    (step, row), (watched_row,) = rows[0], watched.rows
    assert step == 0 and watched_row["loss"] == row["loss"]
    assert all(
        np.isnan(values[1]) for name, values in watched_row.items() if name not in ("step", "loss")
    )
    for layer in (0, 2):
        options = {"tokens": "unit"} if tokens == "unit" else {}
        expected = rc.monitor(measured[layer].detach().numpy(), **options)
        for name, value in expected.items():
            np.testing.assert_allclose(
                watched_row[name][layer], value, rtol=1e-4, atol=1e-6, err_msg=name
            )
            assert row[f"{name}/layer_{layer}"] == watched_row[name][layer]
        entropy = rc.attention_entropy(weights[layer].detach().numpy()).mean()
        np.testing.assert_allclose(watched_row["attention_entropy"][layer], entropy, rtol=1e-4)


def test_checkpointing_and_accumulation_give_the_same_numbers():
    rows = measure_rows(gpt2(**QUIET))
    checkpointed = gpt2(**QUIET)
    for block in checkpointed.transformer.h:
        block.forward = functools.partial(
            torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
        )
    close(rows, measure_rows(checkpointed))
    close(rows, measure_rows(gpt2(**QUIET), accumulated=2))


COMPILER = shutil.which("c++") or shutil.which("g++")


@pytest.mark.filterwarnings("ignore")  # of dynamo and inductor, about what they do themselves
@pytest.mark.parametrize(
    "backend, fullgraph",
    [
        ("eager", False),
        ("eager", True),
        pytest.param(
            "inductor",
            False,
            marks=[pytest.mark.full, pytest.mark.skipif(not COMPILER, reason="no C++ compiler")],
        ),
    ],
)
def test_compilation_gives_the_same_numbers(backend, fullgraph):
    compiled = torch.compile(Plain(True), backend=backend, fullgraph=fullgraph)
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
    rows = []
    for model in (Plain(True), compiled):
        watched, optimizer = watch(model, 2), torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        watched.close()
        rows.append(watched.rows)
    close(*rows, rtol=1e-4)


def test_mixed_precision():
    """Scalars are those of the same arrays in float32, and training is the same to the bit."""
    plain, watched = gpt2(), gpt2()
    with torch.autocast("cpu", torch.bfloat16):
        losses = train_gpt2(plain)
        with_hooks = watch(watched, every=1)
        assert train_gpt2(watched) == losses
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


@pytest.mark.full
def test_no_weights_of_attention_are_held():
    """Watching raises the peak memory by less than half of one layer's weights."""
    plain, watched = (
        int(
            subprocess.run(
                [sys.executable, "-c", PEAK, mode], capture_output=True, check=True
            ).stdout
        )
        for mode in ("plain", "watched")
    )
    assert watched - plain < 8 * 2048 * 2048 * 4 / 2


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
    assert np.isfinite([*row["query_gradient"], *row["attention_entropy"]]).all()
    for layer in range(L):
        for name, value in rc.monitor(reads[layer].numpy()).items():
            np.testing.assert_allclose(row[name][layer], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_reasons_outside_of_the_layers_are_listed_in_their_order():
    watched = watch(gpt2(**QUIET), 1)
    for name in "dacbe":
        watched.notes.leave_out(name, "layer", "no reason")
    watched.close()
    lines = [line for line in watched.describe().splitlines() if "no reason" in line]
    assert lines == [f"  {name}: no layer: no reason" for name in "dacbe"]


def test_the_gradient_of_shared_parameters_is_that_of_their_first_run():
    model = gpt2(**QUIET)
    model.transformer.h = torch.nn.ModuleList([model.transformer.h[0]] * L)
    (row,) = measure_rows(model)[:1]
    for part in ("query", "key", "value"):
        is_measured = np.isfinite(row[f"{part}_gradient"])
        np.testing.assert_array_equal(is_measured, np.arange(L) == 0)


def test_what_one_product_of_a_run_has_alone_is_kept():
    """An example is the missing mass of a head whose sink is in a separate module."""
    entropy = {"attention_entropy": torch.tensor([1.0, 2.0])}
    sink = {"attention_entropy": torch.tensor([3.0, 6.0]), "missing_mass": torch.tensor([0.1, 0.3])}
    run = types.SimpleNamespace(products=[(0, entropy), (1, sink)])
    scalars = {name: float(value) for name, value in _combine_products(run).items()}
    expected = {"attention_entropy": 3.0, "missing_mass": 0.2}
    expected |= {"attention_entropy_least": 1.0, "attention_entropy_largest": 6.0}
    assert scalars == pytest.approx(expected)


WEIGHTS = ["attention_entropy", "attention_entropy_largest", "attention_entropy_least"]


def read_description(watched):
    """Reads {(number, title of a layer): (names of its metrics, remarks)}, and the other lines."""
    layers, others = {}, []
    for line in watched.describe().splitlines()[1:]:
        title, colon, text = line.partition(": ")
        number, _, name = title.strip().partition(" ")
        if not (colon and number.isdigit()):
            others.append(line.strip())
            continue
        names, _, remarks = text.partition(" (")
        layers[int(number), name] = sorted(names.split(", ")), remarks.removesuffix(")")
    return layers, others


def test_a_description_lists_what_each_layer_has_and_lacks():
    """Scores that are not a distribution have no entropy; the layers around them do."""
    layers = Attention(), Attention(weigh=lambda scores, mask: scores), Attention()
    row, watched = watch_step(Stack(add_in_turn, *layers), X)
    described, others = read_description(watched)
    titles = [(i, f"attentions.{i}") for i in range(3)]
    assert list(described) == titles and not others
    names = {title: names for title, (names, _) in described.items()}
    assert names[titles[0]] == names[titles[2]] == sorted(row.keys() - {"step", "loss"})
    assert set(WEIGHTS) < set(names[titles[0]])
    assert not {*WEIGHTS} & {*names[titles[1]]}
    assert [remarks for _, remarks in described.values()][::2] == ["", ""]
    assert "no weights: " in described[titles[1]][1]
    for i, title in enumerate(titles):
        assert names[title] == sorted(
            name for name in row if name not in ("step", "loss") and np.isfinite(row[name][i])
        )


def test_a_description_says_which_gradients_a_looped_attention_has():
    """As in ALBERT: the gradient of its weights, that of all its runs, is in the first run."""
    attention = Attention()
    row, watched = watch_step(Stack(add_in_turn, *[attention] * 3), X)
    described, _ = read_description(watched)
    assert list(described)[1:] == [(1, "attentions.0, run 2"), (2, "attentions.0, run 3")]
    remarks = [remark for _, remark in described.values()]
    assert remarks == ["", SHARED, SHARED]
    for subject in "ab":
        watched.notes.leave_out("attentions.0", subject, "none")
    remarks = [remark for _, remark in read_description(watched)[0].values()]
    assert remarks == [f"no a: none; no b: none{end}" for end in ("", *[f"; {SHARED}"] * 2)]
    for part in ("query", "key", "value"):
        gradients = [p.grad for p in getattr(attention, part[0]).parameters()]
        norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        expected = [norm, np.nan, np.nan]
        assert row[f"{part}_gradient"] == pytest.approx(expected, 1e-5, nan_ok=True)


def test_a_description_of_some_layers_gives_the_others_none():
    row, watched = watch_step(
        Stack(add_in_turn, *(Attention() for _ in range(3))), X, layers=[1, 3]
    )
    described, others = read_description(watched)
    names = {number: names for (number, _), (names, _) in described.items()}
    assert names == {0: ["not measured"], 1: sorted(row.keys() - {"step", "loss"}), 2: names[0]}
    assert others == ["no layer 3: attention ran in layers 0 to 2"]
    first = watched.describe().splitlines()[0]
    assert first.startswith("a model that is gone, every step, 1 row; cost: ")


def test_a_layer_that_runs_twice_has_two_lines():
    def run_twice(self, x, mask):
        for _ in range(2):
            for attention in self.attentions:
                x = x + attention(x, mask)
        return x

    row, watched = watch_step(Stack(run_twice, Attention(), Attention()), X)
    described, _ = read_description(watched)
    assert list(described) == [
        *((0, "attentions.0"), (1, "attentions.1")),
        *((2, "attentions.0, run 2"), (3, "attentions.1, run 2")),
    ]
    assert len(row["residual_ratio"]) == 4


def test_a_step_that_cannot_be_followed_stops_no_training(monkeypatch, caplog):
    """What a hook of the optimizer raises becomes a reason of each watch that is open."""
    model, another = Stack(add_in_turn, Attention()), Stack(add_in_turn, Attention())
    watched, other = watch(model, 1), watch(another, 1)
    monkeypatch.setattr(type(watched), "_is_counted", lambda *_: 1 / 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.attentions[0].q.weight.detach().clone()
    model(X).backward()
    optimizer.step()
    assert not torch.equal(before, model.attentions[0].q.weight)
    for one in (watched, other):
        assert "no steps: ZeroDivisionError: division by zero" in one.describe()
        one.close()
    assert caplog.text.count("ZeroDivisionError") == 2
