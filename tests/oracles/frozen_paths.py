"""Every path through a frozen transformer, one at a time, in NumPy of float64: 2^L states.

A layer is a dictionary of arrays: "q", "k", "v" [d, h, e] and "o" [h, e, d]; "norm1", "norm2" of
attention and MLP, each (gain, bias); "in", "b_in", "gate", "out", "b_out" of the MLP. Options say
what the network does with them. Written apart from the library.
"""

import itertools

import numpy as np


def tanh_gelu(u):
    return 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))


def silu(u):
    return u / (1 + np.exp(-u))


def softmax(s, sink=None):
    """Rows that sum to 1, or to less where a sink takes its share."""
    top = s.max(axis=-1, keepdims=True)
    e = np.exp(s - top)
    total = e.sum(axis=-1, keepdims=True)
    return e / (total if sink is None else total + np.exp(sink[:, None, None] - top))


class FrozenNorm:
    """A norm whose scale is that of one state."""

    def __init__(self, x, gain_and_bias, kind, eps):
        self.kind, (self.gain, self.bias) = kind, gain_and_bias
        centred = x - x.mean(-1, keepdims=True) if kind == "layer" else x
        self.scale = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)

    def carry(self, c):
        c = c - c.mean(-1, keepdims=True) if self.kind == "layer" else c
        return c * self.scale * self.gain

    def __call__(self, x):
        return self.carry(x) + self.bias


def rotate(x, theta=100.0):
    """Rotary positions [h, n, e], halves."""
    n, half = x.shape[1], x.shape[2] // 2
    angles = np.arange(n)[:, None] * theta ** (-np.arange(half) / half)
    c, s = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def attention_weights(layer, h, o):
    """Weights [h, n, m] of one layer from the state that it reads."""
    q, k = (np.einsum("nd,dhe->hne", h, layer[name]) for name in "qk")
    k = np.repeat(k, len(q) // len(k), axis=0)
    if o.get("qk_norm"):
        q, k = (
            a / np.sqrt((a**2).mean(-1, keepdims=True) + o["eps"]) * layer[name]
            for a, name in ((q, "q_norm"), (k, "k_norm"))
        )
    if o.get("rotary"):
        q, k = rotate(q), rotate(k)
    s = np.einsum("hne,hme->hnm", q, k) / np.sqrt(q.shape[-1])
    if o.get("cap"):
        s = o["cap"] * np.tanh(s / o["cap"])
    n = s.shape[-1]
    if o.get("alibi"):
        s = s - np.abs(np.arange(n)[:, None] - np.arange(n)) * layer["slopes"][:, None, None]
    if o.get("causal"):
        s = np.where(np.tri(n, dtype=bool), s, -np.inf)
    return softmax(s, layer.get("sink"))


def freeze_mlp(layer, h, o):
    """The MLP at one state as a linear map, with its constant: (carry, value at h)."""
    act, z = o["act"], 0
    if "router" in layer:
        return freeze_experts(layer, h, o)
    z = h @ layer["in"] + layer.get("b_in", 0)
    gate = act(h @ layer["gate"]) if "gate" in layer else act(z) / z

    def carry(c):
        return ((c @ layer["in"]) * gate) @ layer["out"]

    return carry, (z * gate) @ layer["out"] + layer.get("b_out", 0)


def freeze_experts(layer, h, o):
    """Experts [e, d, f], [e, f, d], of which each token takes two, by shares that are frozen."""
    logits = h @ layer["router"]
    p = 1 / (1 + np.exp(-logits)) if o.get("sigmoid_router") else softmax(logits)
    chosen = np.argsort(-p, axis=-1)[:, :2]
    shares = np.zeros_like(p)
    np.put_along_axis(shares, chosen, np.take_along_axis(p, chosen, -1), -1)
    if not o.get("sigmoid_router"):
        shares /= shares.sum(-1, keepdims=True)
    z = np.einsum("nd,edf->nef", h, layer["in"])
    gates = o["act"](z) / z

    def carry(c):
        units = np.einsum("nd,edf->nef", c, layer["in"]) * gates
        return np.einsum("nef,efd,ne->nd", units, layer["out"], shares)

    return carry, carry(h)


def frozen_lengths(layers, x, *, final=None, **o):
    """Sums over all paths of each length [L + 1, n, d], and the output.

    Options: order "pre", "post", "sandwich" or "parallel"; norm "layer" or "rms"; eps; act; causal,
    rotary, qk_norm, alibi, cap; skip False for attention alone, without skips and MLPs.
    """
    o = {"order": "pre", "norm": "layer", "eps": 1e-6, "act": tanh_gelu, "skip": True} | o
    order, state, maps = o["order"], np.asarray(x, np.float64), []
    for layer in layers:

        def norm(name, at, layer=layer, used=True):
            used = used and name in layer
            return FrozenNorm(at, layer[name], o["norm"], o["eps"]) if used else None

        pre = order != "post"
        first = norm("norm1", state, used=pre)
        h = first(state) if first else state
        p = attention_weights(layer, h, o)

        def attend(c, p=p, layer=layer):
            v = np.einsum("nd,dhe->hne", c, layer["v"])
            v = np.repeat(v, len(p) // len(v), axis=0)
            return np.einsum("hnm,hme,hed->nd", p, v, layer["o"])

        branch = attend(h) + layer.get("b_o", 0)
        after1 = norm("after1", branch)
        branch = after1(branch) if after1 else branch
        start = state
        if not o["skip"]:
            maps.append((first, attend, after1, None, None, None, None, None))
            state = branch
            continue
        state = state + branch
        post1 = norm("norm1", state, used=not pre)
        state = post1(state) if post1 else state
        read = start if order == "parallel" else state
        second = norm("norm2", read, used=pre)
        h2 = second(read) if second else read
        carry, value = freeze_mlp(layer, h2, o)
        after2 = norm("after2", value)
        value = after2(value) if after2 else value
        state = state + value
        post2 = norm("norm2", state, used=not pre)
        state = post2(state) if post2 else state
        maps.append((first, attend, after1, post1, second, carry, after2, post2))
    last = None if final is None else FrozenNorm(state, final, o["norm"], o["eps"])
    output = last(state) if last else state

    def through(norm, c):
        return norm.carry(c) if norm is not None else c

    sums = np.zeros((len(layers) + 1, *output.shape))
    for path in itertools.product((False, True), repeat=len(layers)):
        c = np.asarray(x, np.float64)
        for takes, (first, attend, after1, post1, second, carry, after2, post2) in zip(
            path, maps, strict=True
        ):
            branch = through(after1, attend(through(first, c))) if takes else np.zeros_like(c)
            if carry is None:
                c = branch
            elif order == "parallel":
                c = branch if takes else c + carry(through(second, c))
            else:
                c = through(post1, branch if takes else c)
                c = through(post2, c + through(after2, carry(through(second, c))))
        sums[sum(path)] += through(last, c)
    return sums, output
