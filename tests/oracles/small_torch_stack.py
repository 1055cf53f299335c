"""A small model of PyTorch with attention of its own."""

import math

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

D, N = 8, 5


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def weigh(self, scores):
        return (scores / math.sqrt(D)).softmax(-1)

    def forward(self, x):
        return self.weigh(self.q(x) @ self.k(x).transpose(-1, -2)) @ self.v(x)


class Model(nn.Module):
    """Token ids or embeddings, two residual layers, a dict of results."""

    def __init__(self, attention=Attention):
        super().__init__()
        self.embed, self.drop = nn.Embedding(11, D), nn.Dropout(0.1)
        self.layers = nn.ModuleList(attention() for _ in range(2))
        self.norm, self.unused = nn.LayerNorm(D), nn.Linear(D, D)
        self.double().eval()

    def forward(self, ids=None, hidden=None, *, scale=None):
        x = self.drop(self.embed(ids) if hidden is None else hidden)
        x = x if scale is None else x * scale
        for layer in self.layers:
            x = x + layer(x)
        return {"count": torch.tensor(2), "first": x[:, 0], "last_hidden_state": self.norm(x)}


IDS = torch.tensor([[1, 2, 3, 4, 5]])


HIDDEN = torch.randn(1, N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


LAYERS = r"layers\.\d+"


class Linear(Attention):
    def weigh(self, scores):
        return scores
