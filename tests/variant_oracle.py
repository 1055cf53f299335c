"""Attention variants written out in NumPy, row by row under a causal mask, and their networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc

L, H, N, D = 2, 2, 5, 8
K = D // H  # width of queries, keys and values
RNG = np.random.default_rng(0)
DECAY, STEP, SINK, SCALE = (RNG.uniform(0.5, 0.9, (L, H)) for _ in range(4))
VECTORS = RNG.normal(size=(L, 4, K // 2))


def softmax(s):
    e = np.exp(s - s.max())
    return e / e.sum()


def sigma(s):
    return 1 / (1 + np.exp(-s))


def row_softmax(s, l, h):
    return softmax(s)


def row_softpick(s, l, h):
    e = np.exp(s) - 1
    return np.maximum(e, 0) / (np.abs(e).sum() + 1e-8)


def row_retention(s, l, h):
    d = DECAY[l, h] ** np.arange(len(s) - 1, -1, -1.0)
    p = s * d / np.sqrt(d.sum())
    return p / max(abs(p.sum()), 1)


def mixed(alpha, beta, gamma):
    def row(s, l, h):
        last = np.eye(len(s))[-1]
        return alpha * last + beta * softmax(s) + gamma * np.ones(len(s)) / len(s)

    return row


def from_rows(row):
    """A head (q, k, v, l, h) → (M, out) of rows of weights."""

    def head(q, k, v, l, h):
        m = np.zeros((N, N))
        for i in range(N):
            m[i, : i + 1] = row(k[: i + 1] @ q[i] / np.sqrt(q.shape[1]), l, h)
        return m, m @ v

    return head


def head_differential(q, k, v, l, h):
    start, (a, b, c, d) = 0.8 - 0.6 * np.exp(-0.3 * l), VECTORS[l]
    lam = np.exp(np.sum(a * b)) - np.exp(np.sum(c * d)) + start
    own = from_rows(row_softmax)
    halves = [own(q[:, s], k[:, s], v, l, h)[0] for s in (slice(0, K // 2), slice(K // 2, K))]
    m = halves[0] - lam * halves[1]
    out = m @ v
    return m, (1 - start) * out / np.sqrt(np.mean(out**2, axis=1, keepdims=True) + 1e-5)


def head_gated(q, k, v, l, h):
    p, out = from_rows(row_softmax)(q[:, :K], k[:, :K], v, l, h)
    return p, out * sigma(q[:, K:])


def head_linear(q, k, v, l, h):
    q, k = (np.where(a > 0, a + 1, np.exp(a)) for a in (q, k))
    m = np.tril(q @ k.T)
    m = m / m.sum(axis=1, keepdims=True)
    return m, m @ v


def head_ssd(q, k, v, l, h):
    """By the recurrence H ← e^(−a Δ) H + Δ B vᵀ, out = C H."""
    state, out, m = np.zeros((K, K)), [], np.zeros((N, N))
    step = np.log1p(np.exp(k[:, -1] + STEP[l, h]))
    for i in range(N):
        state = np.exp(-DECAY[l, h] * step[i]) * state + step[i] * np.outer(k[i, :-1], v[i])
        out.append(q[i, :-1] @ state)
        for j in range(i + 1):
            fall = np.exp(-DECAY[l, h] * step[j + 1 : i + 1].sum())
            m[i, j] = q[i, :-1] @ k[j, :-1] * fall * step[j]
    return m, np.array(out)


# What one row of weights is of its scores s to the keys 0 .. i, in layer l and head h.
ROWS = {
    "softmax": row_softmax,
    "softpick": row_softpick,
    "retention": row_retention,
    "sigmoid": lambda s, l, h: 1 / (1 + N * np.exp(-s)),
    "off_by_one": lambda s, l, h: np.exp(s) / (1 + np.exp(s).sum()),
    "sinks": lambda s, l, h: np.exp(s) / (np.exp(s).sum() + np.exp(SINK[l, h])),
    "ssmax": lambda s, l, h: softmax(SCALE[l, h] * np.log(len(s)) * s),
    "√log n": lambda s, l, h: softmax(0.7 * np.sqrt(np.log(len(s))) * s),
}
# {case: (variant, values, the head)}
CASES = {
    "softmax": ("softmax", {}, from_rows(ROWS["softmax"])),
    "centred": ("centred", {}, from_rows(mixed(0, 1, -1))),
    "a_perp": ("a_perp", {"num_tokens": N}, from_rows(mixed(0, N**0.5, -(N**0.5)))),
    "value_skipinit": ("value_skipinit", {"beta": 0.3}, from_rows(mixed(1, 0.3, 0))),
    "shaped": ("shaped", {"beta": 0.4, "gamma": 0.2}, from_rows(mixed(1, 0.4, -0.2))),
    "attn_scale": ("attn_scale", {"excess": 0.5}, from_rows(mixed(0, 1.5, -0.5))),
    "sigmoid": ("sigmoid", {}, from_rows(ROWS["sigmoid"])),
    "softpick": ("softpick", {}, from_rows(ROWS["softpick"])),
    "off_by_one": ("off_by_one", {}, from_rows(ROWS["off_by_one"])),
    "sinks": ("sinks", {"sink": SINK}, from_rows(ROWS["sinks"])),
    "ssmax": ("ssmax", {"scale": SCALE}, from_rows(ROWS["ssmax"])),
    "√log n": ("ssmax", {"scale": 0.7, "power": 0.5}, from_rows(ROWS["√log n"])),
    "retention": ("retention", {"decay": DECAY}, from_rows(ROWS["retention"])),
    "differential": ("differential", {"vectors": VECTORS}, head_differential),
    "gated": ("gated", {}, head_gated),
    "linear": ("linear", {}, head_linear),
    "ssd": ("ssd", {"decay": DECAY, "step_bias": STEP}, head_ssd),
}
DRAWN = np.random.default_rng(1).normal(size=(N, D))


def network(name, **values):
    """(config, parameters, tokens) of two layers of attention alone, in float64."""
    config = rc.variant(rc.san(L, H, D, mask="causal"), name, **values)
    return config, rc.init(jax.random.key(2), config, 1.3, 0.4), jnp.asarray(DRAWN)


@pytest.fixture(autouse=True)
def eager():
    """Eagerly: a program of each variant would take a second to compile."""
    with jax.enable_x64(True), jax.disable_jit():
        yield
