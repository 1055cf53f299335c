"""Attention variants written out in NumPy, row by row under a causal mask, and their networks."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from tests.oracles import draws
from tests.oracles.frozen_paths import softmax

L, H, N, D = 2, 2, 5, 8
K = D // H  # width of queries, keys and values
RNG = np.random.default_rng(0)
DECAY, SINK = (RNG.uniform(0.5, 0.9, (L, H)) for _ in range(2))


def row_softmax(s, l, h):
    return softmax(s)


def row_retention(s, l, h):
    d = DECAY[l, h] ** np.arange(len(s) - 1, -1, -1.0)
    p = s * d / np.sqrt(d.sum())
    return p / max(abs(p.sum()), 1)


def make_mixed_row(alpha, beta, gamma):
    def row(s, l, h):
        last = np.eye(len(s))[-1]
        return alpha * last + beta * softmax(s) + gamma * np.ones(len(s)) / len(s)

    return row


def from_rows(row):
    """Makes a head (q, k, v, l, h) → (M, out) from a function of one row of weights."""

    def head(q, k, v, l, h):
        m = np.zeros((N, N))
        for i in range(N):
            m[i, : i + 1] = row(k[: i + 1] @ q[i] / np.sqrt(q.shape[1]), l, h)
        return m, m @ v

    return head


def head_linear(q, k, v, l, h):
    q, k = (np.where(a > 0, a + 1, np.exp(a)) for a in (q, k))
    m = np.tril(q @ k.T)
    m = m / m.sum(axis=1, keepdims=True)
    return m, m @ v


# One row of weights as a function of its scores s to the keys 0 .. i, in layer l and head h.
ROWS = {
    "softmax": row_softmax,
    "retention": row_retention,
    "sigmoid": lambda s, l, h: 1 / (1 + N * np.exp(-s)),
    "sinks": lambda s, l, h: np.exp(s) / (np.exp(s).sum() + np.exp(SINK[l, h])),
}
# {case: (variant, values, the head)}
CASES = {
    "softmax": ("softmax", {}, from_rows(ROWS["softmax"])),
    "centred": ("centred", {}, from_rows(make_mixed_row(0, 1, -1))),
    "shaped": ("shaped", {"beta": 0.4, "gamma": 0.2}, from_rows(make_mixed_row(1, 0.4, -0.2))),
    "attn_scale": ("attn_scale", {"excess": 0.5}, from_rows(make_mixed_row(0, 1.5, -0.5))),
    "sigmoid": ("sigmoid", {}, from_rows(ROWS["sigmoid"])),
    "sinks": ("sinks", {"sink": SINK}, from_rows(ROWS["sinks"])),
    "retention": ("retention", {"decay": DECAY}, from_rows(ROWS["retention"])),
    "linear": ("linear", {}, head_linear),
}
DRAWN = np.random.default_rng(1).normal(size=(N, D))


def network(name, **values):
    """Makes (config, parameters, tokens) of two layers of pure attention, in float64."""
    config = rc.variant(rc.san(L, H, D, mask="causal"), name, **values)
    return config, draws.parameters(config, 2, 1.3, 0.4), jax.device_put(DRAWN)


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield
