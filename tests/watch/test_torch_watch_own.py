"""`watch` on users' blocks: with every packing of projections, and every form of the product."""

import copy
import gc
import io
import itertools
import pickle
import weakref

import numpy as np
import pytest

pytest.importorskip("torch")

from rank_collapse.runs import metrics
from rank_collapse.torch import watch
from tests.oracles.torch_models import torch
from tests.oracles.watched_scalars import compute_entropy, compute_ratio

F, D, H, N, B = torch.nn.functional, 16, 2, 7, 3
LENGTHS = torch.tensor([N, 5, 3])
X = 2 * torch.randn(B, N, D, generator=torch.Generator().manual_seed(0))
EXISTS = {
    "all": torch.ones(B, N, dtype=torch.bool),
    "right": torch.arange(N) < LENGTHS[:, None],
    "left": torch.arange(N) >= N - LENGTHS[:, None],
}
# {packing: the rows of one matrix [3 D, D] that make queries, keys and values}
SIDE = torch.arange(3 * D).reshape(3, D)
TURNS = torch.arange(3 * D).reshape(H, 3, D // H).transpose(0, 1).reshape(3, D)
PACKINGS = {"qkv": SIDE, "query_key_value": TURNS, "three": SIDE, "torch": SIDE}


class Attention(torch.nn.Module):
    """Multi-head attention without an output projection."""

    def __init__(self, packing, product):
        super().__init__()
        self.packing, self.product, self.dropout = packing, product, 0.2
        if packing == "torch":
            self.in_proj_weight = None
        elif packing == "three":
            self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(D, D) for _ in range(3))
        else:
            setattr(self, packing, torch.nn.Linear(D, 3 * D))

    def forward(self, x, mask):
        if self.packing == "three":
            projections = [part(x) for part in (self.q_proj, self.k_proj, self.v_proj)]
        else:
            fused = getattr(self, self.packing)(x)
            projections = [fused[..., rows] for rows in PACKINGS[self.packing]]
        q, k, v = (a.unflatten(-1, (H, -1)).transpose(1, 2) for a in projections)
        bias = torch.where(mask, 0.0, -1e9)
        if self.product.startswith("dot"):
            attention_mask = mask if self.product == "dot, bool" else bias
            y = F.scaled_dot_product_attention(q, k, v, attention_mask, dropout_p=self.dropout)
        else:
            p = F.dropout((q @ k.mT * (D // H) ** -0.5 + bias).softmax(dim=-1), self.dropout)
            if self.product == "bmm":
                y = torch.bmm(p.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (len(x), H))
            elif self.product == "einsum":
                y = torch.einsum("bhnm,bhmk->bhnk", p, v)
            else:
                y = p @ v
        return y.transpose(1, 2).flatten(-2)


class Block(torch.nn.Module):
    def __init__(self, packing, product):
        super().__init__()
        self.attn_norm = torch.nn.LayerNorm(D)  # what is first named after attention, and is none
        if packing == "torch":
            self.attn = torch.nn.MultiheadAttention(D, H, 0.2, batch_first=True)
        else:
            self.attn = Attention(packing, product)
        self.weights, self.fails = product == "weights", False

    def forward(self, x, exists, causal):
        y = self.attn_norm(x)
        if isinstance(self.attn, Attention):
            attention_mask = exists[:, None, None] & torch.ones(N, N, dtype=torch.bool)
            x = x + self.attn(y, attention_mask.tril() if causal else attention_mask)
            self.fails, failed = False, self.fails
            if failed:
                raise RuntimeError("out of memory")
            return x
        lower = torch.ones(N, N, dtype=torch.bool).triu(1) if causal else None
        return x + self.attn(y, y, y, ~exists, self.weights, lower)[0]


class UserModel(torch.nn.Module):
    def __init__(self, packing="qkv", product="softmax", depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block(packing, product) for _ in range(depth))
        for p in self.parameters():
            if p.ndim > 1:
                p.data *= 4

    def forward(self, x, exists=EXISTS["all"], causal=False):
        for block in self.blocks:
            x = block(x, exists, causal)
        return x, x.square().mean()


def train(model, *inputs, steps=1):
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(model(*inputs)[1])
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses]


def select_projections(attention, transform):
    """Returns transform(weight) and transform(bias) of queries, of keys, and of values."""
    if isinstance(attention, torch.nn.MultiheadAttention):
        fused = [attention.in_proj_weight, attention.in_proj_bias]
    elif attention.packing == "three":
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        return [(transform(part.weight), transform(part.bias)) for part in parts]
    else:
        fused = [getattr(attention, attention.packing).weight]
        fused += [getattr(attention, attention.packing).bias]
    packing = getattr(attention, "packing", "torch")
    return [tuple(transform(p)[rows] for p in fused) for rows in PACKINGS[packing]]


BLOCKS = (
    ("torch", "weights"),
    ("torch", "no weights"),
    ("qkv", "softmax"),
    ("query_key_value", "softmax"),
    ("three", "softmax"),
    ("query_key_value", "bmm"),
    ("query_key_value", "einsum"),
    ("qkv", "dot, bool"),
    ("query_key_value", "dot, added"),
)


def block_cases():
    """Yields every block with every mask.

    The quick suite has all masks of three blocks, and one mask of each other block.
    """
    for block, padding, causal in itertools.product(BLOCKS, EXISTS, (False, True)):
        is_quick = block in (BLOCKS[1], BLOCKS[2], BLOCKS[7]) or (padding, causal) == ("left", True)
        marks = () if is_quick else pytest.mark.full
        yield pytest.param(*block, padding, causal, marks=marks)


@pytest.mark.parametrize("packing, product, padding, causal", list(block_cases()))
def test_scalars_of_own_blocks(packing, product, padding, causal):
    model, exists = UserModel(packing, product), EXISTS[padding]
    plain = train(copy.deepcopy(model), X, exists, causal)
    fresh, watched = copy.deepcopy(model), watch(model, 1)
    np.testing.assert_equal(train(model, X, exists, causal), plain)
    watched.close()
    (row,), mask = watched.rows, exists.numpy()
    np.testing.assert_equal(row["loss"], plain[0])
    first = fresh.blocks[0]
    x = first.attn_norm(X)
    (q, k, _) = (
        F.linear(x, *projection)
        for projection in select_projections(first.attn, lambda p: p.detach())
    )
    q, k = (a.unflatten(-1, (H, -1)).transpose(1, 2) for a in (q, k))
    attention_mask = exists[:, None, None] & torch.ones(N, N, dtype=torch.bool)
    attention_mask = attention_mask.tril() if causal else attention_mask
    p = (q @ k.mT * (D // H) ** -0.5).masked_fill(~attention_mask, -1e9).softmax(dim=-1)
    assert row["residual_ratio"][0] == pytest.approx(
        compute_ratio(x.detach().numpy(), mask), rel=1e-4
    )
    entropy = compute_entropy(p.detach().numpy(), mask)
    assert row["attention_entropy"][0] == pytest.approx(entropy, rel=1e-4)
    for part, gradients in zip(
        ("query", "key", "value"),
        select_projections(model.blocks[0].attn, lambda p: p.grad),
        strict=True,
    ):
        norm = np.sqrt(sum(g.square().sum().item() for g in gradients))
        np.testing.assert_allclose(row[f"{part}_gradient"][0], norm, rtol=1e-4)


class Runs(UserModel):
    """Runs its layers in some order, and one that fails once more."""

    def __init__(self, order, depth, fails=None):
        super().__init__(depth=depth)
        self.order = order
        if fails is not None:
            self.blocks[fails].fails = True

    def forward(self, x):
        states = [x]
        for i in self.order:
            try:
                states.append(self.blocks[i](states[-1], EXISTS["all"], False))
            except RuntimeError:
                states.append(self.blocks[i](states[-1], EXISTS["all"], False))
        return {"states": states, "loss": states[-1].square().mean()}, states[-1].square().mean()


@pytest.mark.parametrize("tokens", ["read", "raw"])
@pytest.mark.parametrize(
    "order, depth, fails, numbers",
    [
        ((0, 2), 3, None, [0, 1]),  # one dropped: numbers are those of what ran
        ((0, 0, 0), 1, None, [0, 1, 2]),  # a loop
        ((0, 1, 0, 1), 2, None, [0, 1, 2, 3]),
        ((0, 1, 2), 3, 1, [0, 1, 2]),  # one fails, and is run again
    ],
)
def test_layers_have_their_own_numbers(order, depth, fails, numbers, tokens):
    model, lines = Runs(order, depth, fails), []
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    states = copy.deepcopy(model)(X)[0]["states"]
    if tokens == "read":
        pairs = zip(order, states, strict=False)
        states = [None, *(model.blocks[i].attn_norm(x) for i, x in pairs)]
    expected = [compute_ratio(x.detach().numpy(), EXISTS["all"].numpy()) for x in states[1:]]
    watched = watch(model, 1, lambda row, step: lines.append(row), tokens)
    train(model, X)
    watched.close()
    ratios = {i: v for i, v in enumerate(watched.rows[0]["residual_ratio"]) if np.isfinite(v)}
    assert ratios == pytest.approx(dict(zip(numbers, expected, strict=True)), rel=1e-4)
    assert {f"residual_ratio/layer_{i}": v for i, v in ratios.items()}.items() <= lines[0].items()


def test_a_layer_keeps_the_number_of_its_first_run(tmp_path):
    """Layers are dropped at random; one that was dropped at first gets the next number."""
    model, numbers = Runs((), 4), {}
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watched = watch(model, 1, tmp_path / "metrics.jsonl")
    for block in model.blocks:
        block.attn.dropout = 0.0
    for step, order in enumerate([(0, 2), (1, 2), (0, 1, 2), (2,), (3, 0)]):
        model.order = order
        states = copy.deepcopy(model)(X)[0]["states"]
        for i in order:
            numbers.setdefault(i, len(numbers))
        reads = {
            numbers[i]: model.blocks[i].attn_norm(x) for i, x in zip(order, states, strict=False)
        }
        model(X)[1].backward()
        optimizer.step()
        expected = np.full(len(numbers), np.nan)
        for number, x in reads.items():
            expected[number] = compute_ratio(x.detach().numpy(), EXISTS["all"].numpy())
        for row in (watched.rows[step], metrics.read(tmp_path / "metrics.jsonl")[step]):
            np.testing.assert_allclose(row["residual_ratio"], expected, rtol=1e-4)
            assert np.isfinite(row["attention_entropy"]).tolist() == np.isfinite(expected).tolist()
    assert [line.split()[:2] for line in watched.describe().splitlines()[1:]] == [
        [str(number), f"blocks.{i}.attn:"] for i, number in numbers.items()
    ]
    watched.close()


@pytest.mark.full
def test_a_watched_model_is_copied_and_saved_as_another():
    model, plain = UserModel(), UserModel()
    watched = watch(model, 1)
    other = copy.deepcopy(model)
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == plain.state_dict().keys()
    torch.save(model, io.BytesIO())
    torch.optim.swa_utils.AveragedModel(model)
    train(other, X)
    assert watched.step == 0 and not watched.rows
    model(X)[1].backward()
    dead = [weakref.ref(model.blocks[0].attn), weakref.ref(watched)]
    del model, watched
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


def test_weights_are_those_that_meet_the_values():
    """Heads may be mixed after the softmax; a difference of weights is not a distribution."""

    class Mixed(Attention):
        def forward(self, x, mask):
            q, k, v = (a.unflatten(-1, (H, -1)).transpose(1, 2) for a in self.qkv(x).chunk(3, -1))
            p = (q @ k.mT).softmax(dim=-1)
            return (p.flip(1) @ v).transpose(1, 2).flatten(-2)

    class Differential(Attention):
        def forward(self, x, mask):
            q, k, v = (a.unflatten(-1, (H, -1)).transpose(1, 2) for a in self.qkv(x).chunk(3, -1))
            p = (q @ k.mT).softmax(dim=-1) - 0.5 * (k @ q.mT).softmax(dim=-1)
            return (p @ v).transpose(1, 2).flatten(-2)

    model = UserModel(depth=3)
    model.blocks[1].attn = Mixed("qkv", "softmax")
    model.blocks[2].attn = Differential("qkv", "softmax")
    watched = watch(model, 1)
    train(model, X)
    (row,) = watched.rows
    assert np.isfinite(row["attention_entropy"]).tolist() == [True, True, False]
    assert np.isfinite(row["residual_ratio"]).all()
    assert "not a distribution" in watched.describe()
