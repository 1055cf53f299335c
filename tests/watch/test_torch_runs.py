"""The attentions of a pass: which layers are measured, and what is left out."""

import types

import numpy as np
import pytest

pytest.importorskip("torch")
from rank_collapse.torch import watch
from rank_collapse.watch import torch_products
from rank_collapse.watch.recorder import Notes
from rank_collapse.watch.torch_frames import Frame
from rank_collapse.watch.torch_pieces import Run
from rank_collapse.watch.torch_products import Weights
from rank_collapse.watch.torch_runs import Runs
from rank_collapse.watch.torch_tokens import Tokens
from tests.oracles import measured_layers
from tests.oracles.torch_models import torch
from tests.oracles.watched_stack import Attention, D, F, Layers, X, measure_row, nn, ratio


class Towers(nn.Module):
    """One network for two inputs."""

    def __init__(self):
        super().__init__()
        self.tower = Layers()

    def forward(self, x):
        return self.tower(x) * self.tower(x.flip(0, 1)[:1])


def test_of_two_inputs_of_one_network_the_first_is_measured():
    model = Towers()
    watched = watch(model, 1)
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    reason = "of calls on different tokens the first is measured"
    assert watched.describe().count(reason) == 2
    assert watched.rows[0]["residual_ratio"][0] == pytest.approx(ratio(*X), 1e-4)
    assert len(watched.rows[0]["residual_ratio"]) == 2


def test_texts_of_one_token_are_left_out():
    model = Layers()
    watched = watch(model, 1)
    model(X[:, :1]).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    assert watched.describe().count("no tokens: 2 examples of 1 token") == 2
    assert watched.describe().count("no weights: 2 examples of 1 key") == 2
    assert watched.rows[0].keys() == {"step", *(f"{p}_gradient" for p in ("query", "key", "value"))}


@pytest.mark.parametrize(
    "layers, numbers",
    [
        (0, [0]),
        ([0, 2], [0, 2]),
        (range(1, 3), [1, 2]),
        ("h.1", [1]),
        (("h.0", "h.2"), [0, 2]),
        (lambda name, module: name.endswith("2"), [2]),
    ],
)
def test_layers_are_chosen_by_number_name_or_function(layers, numbers):
    ratios = measure_row(Layers(3), X)["residual_ratio"]
    chosen = measure_row(Layers(3), X, layers=layers)["residual_ratio"]
    assert [v for v in chosen if v == v] == [ratios[i] for i in numbers]


class Core(nn.Module):
    """Attention in a module without parameters, which calls another."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner

    def forward(self, q, k, v, mask):
        if self.inner is not None:
            return self.inner(q, k, v, mask)
        return F.scaled_dot_product_attention(q, k, v)


def test_products_in_modules_without_parameters_are_of_the_module_around_them():
    layers = [measured_layers.Attention(attend=Core(inner)) for inner in (None, Core(), None)]
    model = measured_layers.Stack(measured_layers.add_in_turn, *layers)
    row, watched = measured_layers.watch_step(model, measured_layers.X)
    ratios = [measured_layers.compute_ratio(layer.kept[0]) for layer in layers]
    assert row["residual_ratio"] == pytest.approx(ratios, 1e-4)
    titles = [line.split(":")[0] for line in watched.describe().splitlines()[1:]]
    assert titles == [f"  {i} attentions.{i}" for i in range(3)]


def test_an_empty_batch_stops_no_measure():
    model = Layers()
    watched, optimizer = watch(model, 1), torch.optim.SGD(model.parameters(), 0.0)
    for batch in (X, X[:0], X):
        model(batch).sum().backward()
        optimizer.step()
    watched.close()
    first, last = watched.rows[0], watched.rows[-1]
    assert last["step"] == 2 and last["residual_ratio"] == first["residual_ratio"]


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        for _ in range(3):
            x = x + self.attention(x)
        return x


def test_a_failure_is_tried_again(monkeypatch, caplog):
    """The warning comes once, whatever its text is."""
    choose_rows = torch_products.choose_rows
    is_broken = (True, True, False, True, True, True, True, False)

    def choose_or_raise(*args):
        if is_broken[watched.step]:
            raise MemoryError(f"no memory is left at step {watched.step}")
        return choose_rows(*args)

    monkeypatch.setattr(torch_products, "choose_rows", choose_or_raise)
    model = Loop()
    watched, optimizer = watch(model, 1), torch.optim.SGD(model.parameters(), 0.0)
    for step, fails in enumerate(is_broken):
        model(X).sum().backward()
        optimizer.step()
        assert (f"left at step {step}" in watched.describe()) == fails
    measured = [row["step"] for row in watched.rows if "attention_entropy" in row]
    assert measured == [2, 7] and np.isfinite(watched.rows[0]["attention_entropy"]).all()
    assert caplog.text.count("no memory is left") == 1


class Swapped(Attention):
    """Every product has its factors in the other order."""

    def forward(self, x):
        q = torch.einsum("dk,bnk->bnd", self.a.weight, x)
        scores = torch.einsum("bmd,bnd->bnm", self.b(x), q) / 4
        return torch.einsum("bmd,bnm->bnd", self.c(x), scores.softmax(-1))


def test_products_in_the_other_order():
    model = Swapped()
    row = measure_row(model, X)
    scores = (X @ model.a.weight.T) @ model.b(X).mT / 4
    p = scores.detach().softmax(-1)
    assert row["residual_ratio"] == pytest.approx([ratio(*X)], 1e-4)
    assert row["attention_entropy"][0] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), 1e-4)
    assert row["query_gradient"][0] == pytest.approx(model.a.weight.grad.norm().item(), 1e-4)


class Features(nn.Module):
    """Attention among features, as in XCiT."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q.mT @ k).softmax(-1) @ v.mT


def test_attention_among_features_is_left_out():
    model = Features()
    watched = watch(model, 1)
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    assert "softmax is not taken over the keys of tokens" in watched.describe()
    assert not any("entropy" in name or "ratio" in name for row in watched.rows for name in row)


class Output(nn.Module):
    """A layer whose result has its tokens in another layout than its attention reads.

    Args:
        lay_out: lay_out(x) of the result [b, n, d].
        restore: Its inverse, for the layers that follow.
    """

    def __init__(self, lay_out, restore):
        super().__init__()
        self.attention, self.lay_out, self.restore = Attention(), lay_out, restore

    def forward(self, x):
        self.kept = x + self.attention(x)
        return self.lay_out(self.kept)


class Outputs(nn.Module):
    def __init__(self, lay_out, restore):
        super().__init__()
        self.layers = nn.ModuleList(Output(lay_out, restore) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer.restore(layer(x))
        return x


FLAT = lambda x: x.flatten(0, 1), lambda x: x.unflatten(0, X.shape[:2])
SAME = lambda x: x, lambda x: x
POOLED = lambda x: x.mean(1, keepdim=True), lambda x: x + X
TOKENS_FIRST = lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1)


@pytest.mark.parametrize(
    ("form", "count", "reason"),
    [
        (FLAT, None, ""),
        (SAME, 2, ""),  # as many tokens as examples, and examples first in both
        (POOLED, None, "do not have the tokens that it reads"),
        (
            TOKENS_FIRST,
            None,
            "its results have tokens first, and its attention reads examples first",
        ),
    ],
)
def test_raw_tokens_of_a_layer_are_those_of_its_result_in_any_layout(form, count, reason):
    model, x = Outputs(*form), X[:, :count]
    watched = watch(model, 1, tokens="raw")
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    watched.close()
    (row,) = watched.rows
    assert not reason or watched.describe().count(reason) == 2
    if reason:
        assert "residual_ratio" not in row and np.isfinite(row["attention_entropy"]).all()
    else:
        expected = [ratio(*layer.kept.detach()) for layer in model.layers]
        assert row["residual_ratio"] == pytest.approx(expected, rel=1e-4)


class TokensFirst(Attention):
    def forward(self, x):
        q, k, v = (f(x).transpose(0, 1)[:, None] for f in (self.a, self.b, self.c))
        self.kept = x + F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(0, 1)
        return self.kept


@pytest.mark.parametrize(
    ("examples", "count", "is_measured"),
    [(2, 10, True), (2, 3, True), (2, 2, False), (1, 10, True)],
)
def test_raw_tokens_of_layers_that_have_the_tokens_first(examples, count, is_measured):
    """As many examples as tokens leave open which axis is which."""
    x = X[:examples, :count].transpose(0, 1)
    model = nn.Sequential(TokensFirst(), TokensFirst())
    watched = watch(model, 1, tokens="raw")
    model(x.contiguous()).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    watched.close()
    (row,), text = watched.rows, watched.describe()
    reason = "equal numbers of examples and tokens leave the axes ambiguous"
    assert text.count(reason) == (0 if is_measured else 2)
    assert ("residual_ratio" in row) == is_measured, text
    if is_measured:
        expected = [ratio(*layer.kept.detach().transpose(0, 1)) for layer in model]
        assert row["residual_ratio"] == pytest.approx(expected, rel=1e-4)


def test_a_call_that_failed_leaves_no_attention_and_no_piece():
    """Of runs that began before it, the pieces of earlier calls stay; also of their spares."""
    runs = Runs(lambda name, module: True, "read", False, Notes())
    failed, spare = Run("b", False, (1, 4), 0, None), Run("a", False, (1, 2), 0, None)
    kept = Run("a", False, (1, 2), 0, None, spare=spare)
    plain = Run("c", False, (1, 3), 0, None)
    for run in (kept, spare, plain):
        run.pieces = [types.SimpleNamespace(frame=number) for number in (2, 4, 5)]
    runs.attentions = [kept, failed, plain]
    frame = Frame(4, None, "b", (), {})
    assert runs.list_inside(frame) == [failed]
    runs.drop_inside(frame)
    assert runs.attentions == [kept, plain]
    for run in (kept, spare, plain):
        assert [piece.frame for piece in run.pieces] == [2]


def test_where_keys_are_unknown_a_mask_fits_that_leaves_tokens_out_if_keys_are_hidden():
    runs, seen = Runs(lambda name, module: True, "read", False, Notes()), []
    runs.masks = types.SimpleNamespace(find=lambda *call: (seen.append(call[3]), None))
    index = torch.arange(3)[None]
    tokens = Tokens(torch.zeros(3, 2), index, None, torch.arange(1), False, ())
    full, part = torch.ones(1, 3) > 0, torch.tensor([[True, False, True]])
    for allowed, fitting in ((full, (True, False, False)), (part, (True, True, False))):
        weights = Weights(torch.ones(1, 3, 3) / 3, torch.arange(3), allowed.expand(1, 3, 3))
        documents, crossed = runs._find_documents([], tokens, weights, ("a",))
        assert documents.tolist() == [[0, 0, 0]] and crossed is None
        assert tuple(bool(seen[-1](mask)) for mask in (full, part, ~full)) == fitting


M = measured_layers


class Branch(nn.Module):
    """A layer around one attention."""

    def __init__(self):
        super().__init__()
        self.attention = M.Attention()

    def forward(self, x):
        return self.attention(x)


@pytest.mark.parametrize(("make", "count"), [(M.Attention, 11), (Branch, 2)])
def test_attentions_beside_each_other_are_heads_of_one_layer_unless_each_has_its_own(make, count):
    """Whatever their number: the names of the tenth and of the eleventh have two digits."""

    def body(self, x, mask):
        return sum(part(x) for part in self.parts) / count

    model = M.Stack(body, parts=[make() for _ in range(count)])
    row, watched = M.watch_step(model, M.X)
    parts = [getattr(part, "attention", part) for part in model.parts]
    entropies = [M.compute_entropy(part.kept[1]) for part in parts]
    expected = entropies if make is Branch else [np.mean(entropies)]
    assert row["attention_entropy"] == pytest.approx(expected, 1e-4), watched
    assert row["residual_ratio"] == pytest.approx([M.compute_ratio(M.X)] * len(expected), 1e-4)


class Positioned(M.Attention):
    """Scores have a term of positions, with a map of its own, as in Transformer-XL."""

    def __init__(self):
        super().__init__()
        self.r, self.table = nn.Linear(D, D), nn.Embedding(M.N, D)

    def forward(self, x, mask=None):
        q, k, v = (M.heads(part(x)) for part in (self.q, self.k, self.v))
        r = M.heads(self.r(self.table(torch.arange(M.N))[None]))
        p = ((q @ k.mT + q @ r.mT) / 3).softmax(-1)
        self.kept = x.detach(), p.detach()
        return self.o(M.join(p @ v))


def test_keys_of_positions_are_no_keys_of_tokens():
    torch.manual_seed(0)
    model = M.Stack(M.add_in_turn, Positioned(), Positioned())
    watched = M.check_layers(model)
    for part in ("q", "k", "v"):
        name = {"q": "query", "k": "key", "v": "value"}[part]
        maps = [getattr(layer, part) for layer in model.attentions]
        norms = [torch.cat([m.weight.grad, m.bias.grad[:, None]], 1).norm().item() for m in maps]
        assert watched.rows[0][f"{name}_gradient"] == pytest.approx(norms, rel=1e-4, abs=1e-8)


class ByHead(nn.Module):
    """An attention with separate maps for each head."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (
            nn.ModuleList(nn.Linear(D, 4) for _ in range(2)) for _ in range(3)
        )

    def forward(self, x):
        rows = zip(self.q, self.k, self.v, strict=True)
        return torch.cat([(q(x) @ k(x).mT / 2).softmax(-1) @ v(x) for q, k, v in rows], dim=-1)


def test_gradients_are_of_the_maps_of_all_heads():
    torch.manual_seed(0)
    model = ByHead()
    row = measure_row(model, X)
    for name, maps in (("query", model.q), ("key", model.k), ("value", model.v)):
        gradients = [p.grad.flatten() for linear in maps for p in linear.parameters()]
        expected = pytest.approx([torch.cat(gradients).norm().item()], rel=1e-4)
        assert row[f"{name}_gradient"] == expected
