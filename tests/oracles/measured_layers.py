"""Layers that keep what their attention reads, and the float64 scalars that `watch` has to give."""

import numpy as np
import pytest

pytest.importorskip("torch")

from rank_collapse.torch import watch
from tests.oracles.torch_models import torch

nn, F = torch.nn, torch.nn.functional
D, H, B, N = 16, 2, 3, 9
X = torch.randn(B, N, D, generator=torch.Generator().manual_seed(1))
RIGHT = (torch.arange(N) < torch.tensor([9, 4, 6])[:, None]).long()
LEFT = RIGHT.flip(1)
EXISTS = RIGHT[:, None, None] > 0
CLUSTERS = (5 * torch.eye(16)[:3])[None, [0] * 3 + [1] * 3 + [2] * 3] + 0.01 * X


def make_maps(*sizes, count=3):
    """Makes linear maps of the same sizes, by one seed."""
    torch.manual_seed(0)
    return [nn.Linear(*sizes) for _ in range(count)]


def pad(mask):
    """Returns tokens whose padding is all the same, and far from the others."""
    return X.masked_fill(mask[..., None] == 0, 4.0)


def compute_ratio(x, mask=None):
    """Computes ‖X − 1x̄ᵀ‖/‖X‖ in ‖·‖_{1,∞}, the mean over examples, in float64."""

    def composite(a):
        return np.sqrt(np.abs(a).sum(axis=0).max() * np.abs(a).sum(axis=1).max())

    masks = np.ones(x.shape[:2], bool) if mask is None else mask.bool().numpy()
    examples = [a[m] for a, m in zip(x.double().numpy(), masks, strict=True)]
    return np.mean([composite(a - a.mean(axis=0)) / composite(a) for a in examples])


def compute_cosine(x, mask=None):
    """Computes the mean of cos(x_i, x_j) over pairs i ≠ j, then over examples, in float64."""
    masks = np.ones(x.shape[:2], bool) if mask is None else mask.bool().numpy()
    cosines = []
    for a, m in zip(x.double().numpy(), masks, strict=True):
        unit = a[m] / np.linalg.norm(a[m], axis=1, keepdims=True)
        cosines.append((unit @ unit.T)[~np.eye(len(unit), dtype=bool)].mean())
    return np.mean(cosines)


def compute_entropy(p, mask=None):
    """Computes the mean entropy over heads and queries, then over examples, in float64."""
    p = p.double().numpy()
    rows = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
    masks = np.ones((len(p), p.shape[2]), bool) if mask is None else mask.bool().numpy()
    return np.mean([r[:, m].mean() for r, m in zip(rows, masks, strict=True)])


def heads(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def join(x):
    return x.transpose(1, 2).flatten(-2)


def norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    """Attention whose weights, or whose result, come from functions of the caller.

    Args:
        weigh: weigh(scores [b, h, n, m], mask) gives weights.
        attend: attend(query, key, value, mask) gives the result in its place.
    """

    def __init__(self, weigh=None, attend=None):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.weigh = weigh or (lambda scores, mask: scores.softmax(-1))
        self.attend, self.kept = attend, None

    def forward(self, x, mask=None, kv=None):
        q = heads(self.q(x))
        self.kv = kv or (heads(self.k(x)), heads(self.v(x)))
        k, v = self.kv
        if self.attend is not None:
            self.kept = x.detach(), None
            return self.o(join(self.attend(q, k, v, mask)))
        p = self.weigh(q @ k.mT * (D // H) ** -0.5, mask)
        self.kept = x.detach(), p.detach()
        return self.o(join(p @ v))


def make_similar():
    """Makes an attention whose tokens attend to those that are alike."""
    attention = Attention()
    for part in (attention.q, attention.k):
        nn.init.eye_(part.weight)
        nn.init.zeros_(part.bias)
    return attention


def write_heads(scores):
    written = torch.empty_like(scores)
    written[:, 0], written[:, 1] = scores[:, 0], scores[:, 1]
    return written


def write_views(scores):
    written = torch.zeros_like(scores)
    written[..., :4].copy_(scores[..., :4])
    written[..., 4:].copy_(scores[..., 4:])
    return written


def join_parts(scores):
    return torch.cat([scores[..., :4], scores[..., 4:]], dim=-1)


class Stack(nn.Module):
    """Attentions one after the other, in a body of the caller.

    Args:
        body: body(self, x, mask) gives the result.
        attentions: Modules with `kept`, what they read and their weights or None.
        **parts: Further modules, and lists of modules or parameters.
    """

    def __init__(self, body, *attentions, **parts):
        super().__init__()
        self.body, self.attentions = body, nn.ModuleList(attentions)
        for name, part in parts.items():
            setattr(self, name, nn.ModuleList(part) if isinstance(part, list) else part)

    def forward(self, x, mask=None):
        return self.body(self, x, mask).square().mean()


def add_in_turn(self, x, mask):
    for attention in self.attentions:
        x = x + attention(norm(x), mask)
    return x


def watch_step(model, *inputs, **options):
    """Measures one step; returns its row, and the watch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    watched = watch(model, 1, **options)
    model(*inputs).backward()
    optimizer.step()
    watched.close()
    return (watched.rows or [{}])[0], watched


def check_layers(model, x=X, mask=None, has_weights=True, **options):
    """Checks residual ratios and entropies of all attentions of a `Stack`; returns the watch."""
    row, watched = watch_step(model, *((x,) if mask is None else (x, mask)), **options)
    kept = [attention.kept for attention in model.attentions]
    text = watched.describe()
    assert row.get("residual_ratio") == pytest.approx(
        [compute_ratio(reads, mask) for reads, _ in kept], rel=1e-4
    ), text
    cosines = [compute_cosine(reads, mask) for reads, _ in kept]
    assert row["token_cosine"] == pytest.approx(cosines, rel=1e-4, abs=1e-5), text
    if has_weights:
        expected = [compute_entropy(p, mask) for _, p in kept]
        assert row["attention_entropy"] == pytest.approx(expected, rel=1e-4, abs=1e-5), text
    else:
        assert "attention_entropy" not in row
    assert not watched.alarms
    return watched
