"""Functions and modules of a measured pass: jagged tensors, the loss, FSDP2."""

import functools
import re
import threading
import types

import numpy as np
import pytest

pytest.importorskip("torch")

from rank_collapse.torch import watch
from rank_collapse.watch.torch_hidden import TRANSFORMED
from rank_collapse.watch.torch_passes import read_loss
from tests.oracles.measured_layers import (
    Attention,
    D,
    F,
    H,
    Stack,
    X,
    add_in_turn,
    compute_entropy,
    compute_ratio,
    heads,
    join,
    nn,
    norm,
    torch,
    watch_step,
)


class Jagged(nn.Module):
    def __init__(self, is_fused):
        super().__init__()
        torch.manual_seed(0)
        self.fused = nn.Linear(D, 3 * D) if is_fused else None
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        if self.fused is None:
            parts = [part(x) for part in (self.q, self.k, self.v)]
        else:
            parts = [a.contiguous() for a in self.fused(x).chunk(3, -1)]
        q, k, v = (a.unflatten(-1, [2, -1]).transpose(1, 2) for a in parts)
        self.kept = x.detach(), q.detach(), k.detach()
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_pass_that_torch_traces_is_not_measured():
    """The step is measured in its own pass, whether or not the model was traced before."""
    model, rows = Stack(add_in_turn, Attention(), Attention()), []
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for is_traced in (True, False):
        watched = watch(model, 1)
        if is_traced:
            torch.jit.trace(model, (2 * X[:1],), check_trace=False)
        model(X).backward()
        optimizer.step()
        watched.close()
        rows.append(watched.rows[0])
    assert rows[0]["residual_ratio"] == rows[1]["residual_ratio"]
    assert rows[0]["attention_entropy"] == rows[1]["attention_entropy"]


def test_functions_that_change_tensors_in_place_by_name_or_in_lists():
    """Such functions are called by FSDP2 with mixed precision."""

    def add_changed(self, x, mask):
        for attention in self.attentions:
            y = attention(norm(x), mask)
            torch._foreach_copy_((torch.empty_like(y),), (y,))
            x = x + torch.relu_(input=self.mlp(y))
        return x

    def add_plain(self, x, mask):
        for attention in self.attentions:
            x = x + self.mlp(attention(norm(x), mask)).relu()
        return x

    def make(body):
        torch.manual_seed(4)
        return Stack(body, Attention(), Attention(), mlp=nn.Linear(D, D))

    expected, _ = watch_step(make(add_plain), X)
    row, watched = watch_step(make(add_changed), X)
    assert row == expected, watched


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_fused", [False, True])
def test_rows_of_jagged_tensors_are_examples(is_fused):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Jagged(is_fused) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(F.layer_norm(x, (D,)))
            return x.values().square().mean()

    model = Model()
    x = torch.nested.nested_tensor([X[0], X[1, :3], X[2, :8]], layout=torch.jagged)
    row, watched = watch_step(model, x)
    for i, layer in enumerate(model.layers):
        reads, queries, keys = (a.unbind() for a in layer.kept)
        ratio = np.mean([compute_ratio(a[None]) for a in reads])
        assert row["residual_ratio"][i] == pytest.approx(ratio, rel=1e-4), watched
        weights = [
            (q @ k.mT / (D // 2) ** 0.5).softmax(-1) for q, k in zip(queries, keys, strict=True)
        ]
        entropy = np.mean([compute_entropy(p[None]) for p in weights])
        assert row["attention_entropy"][i] == pytest.approx(entropy, rel=1e-4)
        part = layer.fused or layer.q
        gradient = torch.cat([part.weight.grad[:D], part.bias.grad[:D, None]], dim=1).norm()
        assert row["query_gradient"][i] == pytest.approx(gradient.item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_that_runs_again_on_jagged_tensors_is_a_layer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Jagged(False)

        def forward(self, x):
            for _ in range(2):
                x = x + self.layer(x)
            return x.values().square().mean()

    x = torch.nested.nested_tensor([X[0], X[1, :3]], layout=torch.jagged)
    row, watched = watch_step(Model(), x)
    ratio = np.mean([compute_ratio(a[None]) for a in (X[0], X[1, :3])])
    assert row["residual_ratio"][0] == pytest.approx(ratio, rel=1e-4)
    assert np.isfinite(row["residual_ratio"]).tolist() == [True] * 2, watched


class Beside(nn.Module):
    """A module that returns no real floats: numbers, marks, complex phases, or nothing."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def attend_alone(attention, x):
    """Computes attention of one example, [n, d]."""
    q, k = (F.linear(x, part.weight) for part in (attention.q, attention.k))
    return (q @ k.mT).softmax(-1) @ x


def test_modules_that_return_no_floats_and_transforms_of_functions_change_nothing():
    def body(self, x, mask):
        for attention in self.attentions:
            x = x + attention(x)
            for module in self.beside:
                module(x)
            x = x + torch.func.vmap(functools.partial(attend_alone, attention))(x)
        return x

    functions = [
        lambda x: x.argmax(-1),
        lambda x: x > 0,
        lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()),
        lambda x: None,
        lambda x: {"count": 3, "places": [x.argmax(-1)]},
    ]
    model = Stack(body, Attention(), Attention(), beside=[Beside(f) for f in functions])
    row, watched = watch_step(model, X)
    kept = [attention.kept for attention in model.attentions]
    assert row["residual_ratio"] == pytest.approx([compute_ratio(x) for x, _ in kept], 1e-4)
    assert row["attention_entropy"] == pytest.approx([compute_entropy(p) for _, p in kept], 1e-4)
    assert re.findall("no .*", watched.describe()) == [f"no layer: its attention {TRANSFORMED}"]


class Interrupted(Attention):
    """Attention during which another thread calls another module, and stays in it."""

    def forward(self, x, mask=None):
        self.interrupt()
        return super().forward(x, mask)


def test_another_thread_that_calls_a_module_has_no_say_in_the_attentions():
    has_entered, may_leave = threading.Event(), threading.Event()

    def wait(x):
        has_entered.set()
        assert may_leave.wait(60)

    def interrupt():
        if not has_entered.is_set():
            thread.start()
            assert has_entered.wait(60)

    model = Stack(add_in_turn, Interrupted(), Interrupted(), beside=Beside(wait))
    model.beside.weight = nn.Parameter(torch.ones(1))
    for attention in model.attentions:
        attention.interrupt = interrupt
    thread = threading.Thread(target=model.beside, args=(X,))
    try:
        row, watched = watch_step(model, X)
    finally:
        may_leave.set()
        thread.join()
    titles = [line.split(":")[0] for line in watched.describe().splitlines()[1:]]
    assert titles == [f"  {i} attentions.{i}" for i in range(2)]
    expected = [compute_ratio(attention.kept[0]) for attention in model.attentions]
    assert row["residual_ratio"] == pytest.approx(expected, 1e-4)


def test_a_pass_without_products_says_so():
    _, watched = watch_step(Stack(lambda self, x, mask: self.map(x), map=nn.Linear(D, D)), X)
    reason = "no layers: no product of weights and values was seen in it"
    assert reason in watched.describe()


def test_the_loss_of_a_step_is_that_of_the_first_part_that_has_one():
    """Parts of a model may be called one after the other."""
    model = nn.ModuleDict({name: Stack(add_in_turn, Attention()) for name in "abc"})
    first = Beside(lambda x: x * 1)
    model["first"] = first
    watched = watch(model, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = first(X)
    losses = [model[name](x) for name in "abc"]
    sum(losses).backward()
    optimizer.step()
    watched.close()
    (row,) = watched.rows
    assert row["loss"] == losses[0].item() != losses[1].item()
    assert np.isfinite(row["residual_ratio"]).tolist() == [True] * 3


def test_the_loss_is_named_or_the_one_number_among_the_results():
    loss, other = torch.tensor(2.0), torch.tensor(3.0)
    x, count = torch.ones(2, 3), torch.tensor(7)
    output = types.SimpleNamespace(loss=loss)
    for result in (
        loss, (x, loss), {"x": x, "count": count, "out": loss}, output,
        {"loss": loss, "other": other}, {"loss": loss[None, None], "other": other},
    ):  # fmt: skip
        number = read_loss(result)
        assert number.shape == () and number == 2
    for result in (x, (loss, other), count, {"loss": torch.ones(3), "other": other}, None, "text"):
        assert read_loss(result) is None


class Functional(nn.Module):
    """Attention without parameters, to which the layer around it gives its weights."""

    def forward(self, x, *weights):
        q, k, v = (F.linear(x, weight) for weight in weights)
        return (q @ k.mT / 3).softmax(-1) @ v


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.core, self.parts = Functional(), nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x, mask=None):
        return self.core(x, *(part.weight for part in self.parts))


def test_maps_in_modules_without_parameters_are_of_the_module_around_them():
    row, watched = watch_step(Stack(add_in_turn, Around(), Around()), X)
    titles = [line.split(":")[0] for line in watched.describe().splitlines()[1:]]
    assert titles == [f"  {i} attentions.{i}" for i in range(2)]
    assert np.isfinite(row["query_gradient"]).all()


@pytest.mark.filterwarnings("ignore")  # of FSDP2 itself
@pytest.mark.parametrize("is_before, dtype", [(False, None), (True, None), (False, torch.bfloat16)])
def test_a_model_under_fsdp2_is_measured_without_gradients(is_before, dtype, tmp_path):
    """FSDP2 casts parameters by a function that writes into a tuple of tensors."""
    sharding = pytest.importorskip("torch.distributed.fsdp")
    torch.manual_seed(0)
    plain = Stack(add_in_turn, Attention(), Attention())
    sharded = Stack(add_in_turn, Attention(), Attention())
    sharded.load_state_dict(plain.state_dict())
    expected, _ = watch_step(plain, X)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        watched = None if is_before else watch(sharded, 1)
        policy = sharding.MixedPrecisionPolicy(param_dtype=dtype)
        for module in (*sharded.attentions, sharded):
            sharding.fully_shard(module, mesh=mesh, mp_policy=policy)
        watched = watched or watch(sharded, 1)
        optimizer = torch.optim.SGD(sharded.parameters(), 0.1)
        sharded(X).backward()
        optimizer.step()
        watched.close()
    finally:
        torch.distributed.destroy_process_group()
    (row,) = watched.rows
    tolerance = 1e-5 if dtype is None else 1e-2
    for name in ("residual_ratio", "attention_entropy"):
        assert row[name] == pytest.approx(expected[name], rel=tolerance)
    assert not any("gradient" in name for name in row)
    assert "no gradients: under FSDP2 each process has parts of them" in watched.describe()


class Block(Attention):
    """A layer whose stream is one of several results.

    Args:
        extra: extra(x) gives the other results.
        place: Place of the stream among them.
        as_dict: Whether the results have names.
        is_plain: Whether queries are the tokens as they are, which the map of the keys then gives.
    """

    def __init__(self, extra, place, as_dict, is_plain):
        super().__init__()
        self.extra, self.place, self.as_dict, self.is_plain = extra, place, as_dict, is_plain

    def forward(self, x, mask):
        queries = x if self.is_plain else self.q(x)
        p = (heads(queries) @ heads(self.k(x)).mT * (D // H) ** -0.5).softmax(-1)
        self.kept = x.detach(), p.detach()
        results = list(self.extra(x))
        results.insert(self.place, x + self.o(join(p @ heads(self.v(x)))))
        return dict(enumerate(results)) if self.as_dict else tuple(results)


def pass_streams(self, x, mask):
    for block in self.blocks:
        x = block(x, mask)[block.place]
    return x


@pytest.mark.parametrize(
    ("extra", "place", "as_dict"),
    [
        (lambda x: (), 0, False),
        (lambda x: (x.square().mean(),), 1, False),  # a loss of the layer before its stream
        (lambda x: (torch.zeros(2), x.detach().mean()), 2, True),
        (lambda x: (x[:, :1], x[:1]), 1, False),
    ],
)
def test_a_layer_may_return_several_tensors_and_its_stream_not_first(extra, place, as_dict):
    """The layer after it reads that stream, as it does where the stream is the only result."""
    plain, several = (
        Stack(pass_streams, blocks=[Block(*arguments, is_plain) for is_plain in (0, 1, 0)])
        for arguments in ((lambda x: (), 0, False), (extra, place, as_dict))
    )
    several.load_state_dict(plain.state_dict())
    (expected, _), (row, watched) = (watch_step(model, X) for model in (plain, several))
    assert row.keys() == expected.keys(), watched
    for name in expected:
        assert row[name] == pytest.approx(expected[name], rel=1e-5, nan_ok=True), (name, watched)
    reads, weights = zip(*(block.kept for block in several.blocks), strict=True)
    assert row["residual_ratio"] == pytest.approx([compute_ratio(x) for x in reads], rel=1e-4)
    entropies = [compute_entropy(p) for p in weights]
    assert row["attention_entropy"] == pytest.approx(entropies, rel=1e-4)
    assert [line.split(":")[0] for line in watched.describe().splitlines()[1:]] == [
        f"  {i} blocks.{i}" for i in range(3)
    ]
