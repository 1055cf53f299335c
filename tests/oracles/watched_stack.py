"""A small stack of attention layers, and a row of what is watched of a model."""

import numpy as np
import pytest

pytest.importorskip("torch")

import rank_collapse as rc
from rank_collapse.torch import watch
from tests.oracles.torch_models import torch

nn, F = torch.nn, torch.nn.functional


D, N = 16, 10


X = torch.randn(2, N, D, generator=torch.Generator().manual_seed(0))


def measure_row(model, *inputs, **options):
    watched = watch(model, 1, **options)
    model(*inputs).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    watched.close()
    return watched.rows[0]


def ratio(*texts):
    return np.mean([rc.residual_ratio(text.numpy()) for text in texts])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x, mask=None):
        q, k, v = (f(x)[:, None] for f in (self.a, self.b, self.c))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]


class Layers(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(Attention() for _ in range(depth))

    def forward(self, x):
        for layer in self.h:
            x = x + layer(x)
        return x
