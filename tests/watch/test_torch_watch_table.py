"""`watch` on a table of model codes, with their masks and their products.

Codes differ in the names of projections, in what holds layers and in how tokens are laid out. The
expected scalars come from formulas here, on the same parameters.
"""

import itertools

import numpy as np
import pytest

pytest.importorskip("torch")

from rank_collapse.torch import watch
from tests.oracles.torch_models import torch
from tests.oracles.watched_scalars import compute_ratio

nn, F = torch.nn, torch.nn.functional
D, H, N, B, DEPTH = 16, 2, 10, 3, 3
SPELLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("c_q", "c_k", "c_v"),
    ("W_query", "W_key", "W_value"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("query_layer", "key_layer", "value_layer"),
    ("linears_0", "linears_1", "linears_2"),
    ("Q", "K", "V"),
    ("first", "second", "third"),
    ("qkv",),
    ("c_attn",),
    ("in_projection",),
)
LENGTHS = torch.tensor([N, 6, 4])
EXISTS = {
    "no": torch.ones(B, N, dtype=torch.bool),
    "right": torch.arange(N) < LENGTHS[:, None],
    "left": torch.arange(N) >= N - LENGTHS[:, None],
    "packed": torch.ones(B, N, dtype=torch.bool),
}
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 6, [0] * 10, [0] * 2 + [1] * 3 + [2] * 5])


def make_allowed(masking):
    """Makes the mask [b, n, n] of which token attends to which."""
    all_pairs = torch.ones(B, N, N, dtype=torch.bool)
    if masking == "packed":
        return DOCUMENTS[:, :, None] == DOCUMENTS[:, None]
    return all_pairs & EXISTS[masking][:, None]


class Attention(nn.Module):
    def __init__(self, names, product, layout):
        super().__init__()
        self.names, self.product, self.layout = names, product, layout
        for name in names:
            setattr(self, name, nn.Linear(D, D * 3 // len(names)))

    def project(self, x):
        projections = [getattr(self, name)(x) for name in self.names]
        return projections if len(projections) == 3 else projections[0].chunk(3, -1)

    def forward(self, x, allowed):
        q, k, v = self.project(x)
        if self.layout == "tokens first":
            q, k, v = (
                a.reshape(N, -1, D // H).transpose(0, 1).unflatten(0, (-1, H)) for a in (q, k, v)
            )
        elif self.layout == "heads in examples":
            q, k, v = (a.unflatten(-1, (H, -1)).transpose(1, 2).flatten(0, 1) for a in (q, k, v))
        else:
            q, k, v = (a.unflatten(-1, (H, -1)).transpose(1, 2) for a in (q, k, v))
        mask = allowed[:, None]
        if self.layout == "heads in examples":
            mask = allowed.repeat_interleave(H, dim=0)
        y = PRODUCTS[self.product](q, k, v, mask)
        if self.layout == "tokens first":
            return y.permute(2, 0, 1, 3).flatten(-2)
        if self.layout == "heads in examples":
            y = y.unflatten(0, (-1, H))
        return y.transpose(1, 2).flatten(-2)


def by_softmax(q, k, v, mask, hidden=-torch.inf):
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, hidden).softmax(-1) @ v


def by_hand(q, k, v, mask):
    s = (torch.einsum("...ik,...jk->...ij", q, k) * q.shape[-1] ** -0.5).masked_fill(~mask, -1e9)
    p = (s - s.amax(dim=-1, keepdim=True)).exp()
    return torch.einsum("...ij,...jk->...ik", p / p.sum(-1, keepdim=True), v)


PRODUCTS = {
    "sdpa": F.scaled_dot_product_attention,
    "eager": by_softmax,
    "minus 1000": lambda *args: by_softmax(*args, -1000.0),
    "by hand": by_hand,
}


class Inline(nn.Module):
    """A block without a module of attention."""

    def __init__(self, names, product, layout):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), Attention(names, product, layout)
        self.up = nn.Linear(D, D)

    def forward(self, x, allowed):
        y = Attention.forward(self.attention, self.norm(x), allowed)
        return y + self.up(x + y).relu()


class Heads(nn.Module):
    """A module for each head."""

    def __init__(self, names, product, layout):
        super().__init__()
        self.heads = nn.ModuleList(Attention(names, product, layout) for _ in range(2))

    def forward(self, x, allowed):
        return sum(head(x, allowed) for head in self.heads)


class Chunk(nn.ModuleList):
    def forward(self, x, allowed):
        for block in self:
            x = x + block(x, allowed)
        return x - 1


class UserModel(nn.Module):
    """Layers in a container."""

    def __init__(self, container, make):
        super().__init__()
        torch.manual_seed(0)
        layers = [make() for _ in range(DEPTH)]
        self.container = container
        if container == "attributes":
            self.a, self.b, self.c = layers
        elif container == "dictionary":
            self.layers = nn.ModuleDict({f"layer{i}": layer for i, layer in enumerate(layers)})
        elif container == "with None":
            self.layers = nn.ModuleList([layers[0], None, *layers[1:], None])
        elif container == "chunks":
            self.layers = nn.ModuleList(
                [Chunk(layers[:2]), Chunk([nn.Identity(), nn.Identity(), layers[2]][2:])]
            )
        else:
            self.layers = nn.ModuleList(layers)
        for p in self.parameters():
            if p.ndim > 1:
                p.data *= 3

    def forward(self, x, allowed, attention_mask=None):
        if self.container == "attributes":
            layers = [self.a, self.b, self.c]
        elif self.container == "dictionary":
            layers = list(self.layers.values())
        elif self.container == "with None":
            layers = [layer for layer in self.layers if layer is not None]
        else:
            layers = self.layers
        for layer in layers:
            if self.container == "checkpointed":
                x = x + torch.utils.checkpoint.checkpoint(layer, x, allowed, use_reentrant=False)
            else:
                x = x + layer(x, allowed)
        return x.square().mean()


def list_attentions(model):
    return [module for module in model.modules() if isinstance(module, Attention)]


def compute_expected(model, x, allowed, exists, documents):
    """Computes (residual ratio, entropy, least entropy) of each layer by formulas."""
    reads, rows, hooks = {}, [], []

    def keep(attention, is_norm):
        def hook(module, args, output):
            reads[attention] = output if is_norm else args[0]

        return hook

    for module in model.modules():
        if isinstance(module, Attention):
            hooks.append(module.register_forward_hook(keep(module, False)))
        elif isinstance(module, Inline):
            hooks.append(module.norm.register_forward_hook(keep(module.attention, True)))
    with torch.no_grad():
        model(x, allowed)
    for hook in hooks:
        hook.remove()
    layers = {}
    for attention in list_attentions(model):
        layers.setdefault(id(reads[attention]), []).append(attention)
    for attentions in layers.values():
        y = reads[attentions[0]]
        weights = []
        for attention in attentions:
            q, k, _ = (a.unflatten(-1, (H, -1)) for a in attention.project(y))
            if attention.layout == "tokens first":
                q, k = q.transpose(0, 1), k.transpose(0, 1)
            s = torch.einsum("bnhk,bmhk->bhnm", q, k) * (D // H) ** -0.5
            weights.append(s.masked_fill(~allowed[:, None], -1e9).softmax(-1))
        y = y.transpose(0, 1) if attentions[0].layout == "tokens first" else y
        p = torch.cat(weights, dim=1).detach()
        parts = [(y[b][keep], p[b][:, keep][:, :, keep]) for b in range(B)
                 for d in documents[b].unique()
                 for keep in [(documents[b] == d) & exists[b]]]  # fmt: skip
        ratio = np.mean(
            [compute_ratio(t[None].detach().numpy(), np.ones((1, len(t)), bool)) for t, _ in parts]
        )
        entropies = [-(p * p.clamp(min=1e-30).log()).sum(-1).mean(-1) for _, p in parts]
        heads = torch.stack(entropies).mean(dim=0)
        rows.append((ratio, heads.mean().item(), heads.min().item()))
    return rows


def codes():
    """Yields (name, container, kind of attention, names of projections, layout) of every code."""
    for names in SPELLINGS:
        yield names[0], "list", Attention, names, "plain"
    for container in ("attributes", "dictionary", "with None", "chunks", "checkpointed"):
        for names in SPELLINGS[8:10]:
            yield f"{container}, {names[0]}", container, Attention, names, "plain"
    for kind, layout in itertools.product(
        (Attention, Inline, Heads), ("plain", "tokens first", "heads in examples")
    ):
        for container, names in (
            ("list", SPELLINGS[1]),
            ("dictionary", SPELLINGS[9]),
            ("attributes", SPELLINGS[11]),
        ):
            yield f"{kind.__name__}, {layout}, {container}", container, kind, names, layout
    for container in ("list", "chunks"):
        for kind in (Inline, Heads):
            for names in SPELLINGS[:4]:
                yield f"{kind.__name__}, {container}, {names[0]}", container, kind, names, "plain"


CODES = {name: fields for name, *fields in codes()}
QUICK = {"c_q", "dictionary, first", "Inline, tokens first, list", "Heads, list, q_proj"}


def cases():
    """Yields every code with every mask; each kind and layout with every product.

    Names and containers cannot change a product, so their codes take the products in turn.
    """
    for number, name in enumerate(CODES):
        is_layout = name.endswith(("plain, list", "first, list", "examples, list"))
        for i, masking in enumerate(EXISTS):
            turn = list(PRODUCTS)[(number + i) % len(PRODUCTS)]
            for product in PRODUCTS if is_layout else [turn]:
                is_quick = name in QUICK and product == turn
                marks = () if is_quick else pytest.mark.full
                yield pytest.param(name, masking, product, marks=marks)


@pytest.mark.parametrize("name, masking, product", list(cases()))
def test_every_code_is_measured(name, masking, product):
    container, kind, names, layout = CODES[name]
    allowed, exists = make_allowed(masking), EXISTS[masking]
    model = UserModel(container, lambda: kind(names, product, layout))
    x = torch.randn(B, N, D, generator=torch.Generator().manual_seed(1))
    x = x.transpose(0, 1).contiguous() if layout == "tokens first" else x
    documents = DOCUMENTS if masking == "packed" else torch.zeros(B, N, dtype=torch.long)
    expected = compute_expected(model, x, allowed, exists, documents)
    watched = watch(model, 1)
    model(x, allowed).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    watched.close()
    (row,), text = watched.rows, watched.describe()
    assert len(row["residual_ratio"]) == DEPTH, text
    for layer, (ratio, entropy, least) in enumerate(expected):
        assert row["residual_ratio"][layer] == pytest.approx(ratio, rel=1e-3), text
        assert row["attention_entropy"][layer] == pytest.approx(entropy, rel=1e-3, abs=1e-5)
        assert row["attention_entropy_least"][layer] == pytest.approx(least, rel=1e-3, abs=1e-5)
