"""Residual profiles by the plain forward pass in ball arithmetic: every printed digit is proved.

Each number is a ball (midpoint and radius) of python-flint's `arb`; the working precision is
doubled until the balls of the profile are narrow. Slow and obvious: the formulas of
`rank_collapse.network` on lists of numbers, nothing shared with the passes under test but the
arrays of `make_context` (masks, rotary tables, relative encodings), which are data to both.
"""

from typing import Any

import flint
import jax
import numpy as np
from flint import arb, arb_mat

from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import make_context
from rank_collapse.network.gains import layer_gains
from rank_collapse.network.parameters import layer_params


def profile(
    params: Any,
    x: Any,
    config: TransformerConfig,
    *,
    mask: Any = None,
    digits: int = 200,
    max_digits: int = 20000,
    **inputs: Any,
) -> np.ndarray:
    """log10 ‖res(X^l)‖_{1,∞}, [L + 1]; NaN where `max_digits` leave a ball wide, −inf for exact 0.

    Args:
        params, x, config, mask, inputs: As for `rc.log_residual_profile`; x [n, d].
        digits: Decimal digits of the first attempt.
        max_digits: Largest number of digits tried.
    """
    dtype = np.asarray(x).dtype
    mask = None if mask is None else np.asarray(mask)
    context = make_context(params, config, len(x), mask=mask, **inputs)
    context = jax.tree.map(np.asarray, context)
    gains = jax.tree.map(np.asarray, layer_gains(config, dtype))
    rows = [jax.tree.map(np.asarray, layer_params(params, config, l)) for l in range(config.depth)]
    keep = mask if mask is not None and mask.ndim == 1 else np.ones(len(x), bool)
    before = flint.ctx.dps
    try:
        while True:
            flint.ctx.dps = digits
            out = _profile(rows, np.asarray(x), config, context, gains, keep)
            if not np.isnan(out).any() or digits >= max_digits:
                return out
            digits = min(2 * digits, max_digits)
    finally:
        flint.ctx.dps = before


def _profile(rows, x, config, context, gains, keep):
    state = exact(x)
    out = [log10_residual(state, keep)]
    for l, p in enumerate(rows):
        own = jax.tree.map(lambda a, l=l: a[l], gains)
        seen = norm(p.attention_norm, state, config, "pre", "sandwich")
        branch = attention(p.attention, seen, config, context, exact(own.temperature))
        branch = norm(p.attention_branch_norm, branch, config, "sandwich", "branch")
        sides = own.skip.attention, own.branch.attention
        state = close(p.attention_norm, state, branch, config, sides, config.attention_skip)
        if config.mlp != "none":
            seen = norm(p.mlp_norm, state, config, "pre", "sandwich")
            branch = norm(
                p.mlp_branch_norm, mlp(p.mlp, seen, config.mlp), config, "sandwich", "branch"
            )
            sides = own.skip.mlp, own.branch.mlp
            state = close(p.mlp_norm, state, branch, config, sides, config.mlp_skip)
        out.append(log10_residual(state, keep))
        if np.isnan(out[-1]):
            return np.array(out + [np.nan] * (len(rows) + 1 - len(out)))
    return np.array(out)


def exact(a):
    """Floats as nested lists of balls without radius."""
    a = np.asarray(a, np.float64)
    return [exact(b) for b in a] if a.ndim else arb(float(a))


def matmul(a, b):
    return (arb_mat(a) * arb_mat(b)).tolist()


def affine(a, w, b):
    b = exact(b)
    return [[u + v for u, v in zip(row, b, strict=True)] for row in matmul(a, exact(w))]


def plus(a, b):
    return [[u + v for u, v in zip(r, s, strict=True)] for r, s in zip(a, b, strict=True)]


def times(c, a):
    return [[c * v for v in row] for row in a]


def scaled(gain, a):
    """A gain, scalar or [d], times tokens."""
    each = exact(np.broadcast_to(gain, len(a[0])))
    return [[g * v for g, v in zip(each, row, strict=True)] for row in a]


def total(values):
    return sum(values[1:], values[0])


def close(p, state, branch, config, gains, skip):
    skip_gain, branch_gain = gains
    out = scaled(branch_gain, branch)
    if skip:
        out = plus(out, scaled(skip_gain, state))
    return norm(p, out, config, "post")


def norm(p, state, config, *placements):
    if config.norm_placement not in placements:
        return state
    out = []
    gain = exact(p.gain)
    bias = exact(p.bias) if p.bias is not None else [arb(0)] * len(gain)
    for row in state:
        mean = total(row) / len(row) if config.norm == "layer" else arb(0)
        centered = [v - mean for v in row]
        sigma = (total([v * v for v in centered]) / len(row) + arb(config.norm_eps)).sqrt()
        out.append([v / sigma * g + b for v, g, b in zip(centered, gain, bias, strict=True)])
    return out


def attention(p, state, config, context, temperature):
    out = [exact(p.b_o) for _ in state]
    n = len(state)
    mask = np.ones((1, n, n), bool)
    queries = normalised(
        p.q_norm, [affine(state, *wb) for wb in zip(p.w_q, p.b_q, strict=True)], config
    )
    keys = normalised(
        p.k_norm, [affine(state, *wb) for wb in zip(p.w_k, p.b_k, strict=True)], config
    )
    if context.mask is not None:
        mask = context.mask.reshape((1,) * (3 - context.mask.ndim) + context.mask.shape)
    for h in range(config.num_heads):
        scores = head_scores(p, h, state, queries[h], keys[h], config, context, temperature)
        allowed = np.broadcast_to(mask[h if len(mask) > 1 else 0], (n, n))
        weights = [softmax(row, seen) for row, seen in zip(scores, allowed, strict=True)]
        values = affine(state, p.w_v[h], p.b_v[h])
        out = plus(out, matmul(matmul(weights, values), exact(p.w_o[h])))
    return out


def softmax(row, allowed):
    if not allowed.any():
        return [arb(1) / len(row)] * len(row)
    top = max((v for v, a in zip(row, allowed, strict=True) if a), key=lambda v: float(v.mid()))
    e = [(v - top).exp() if a else arb(0) for v, a in zip(row, allowed, strict=True)]
    z = total(e)
    return [v / z for v in e]


def normalised(gain, heads, config):
    """RMSNorm of queries or keys, a list of tokens for each head; no gain, no norm."""
    if gain is None:
        return heads
    size, together = len(heads[0][0]), gain.ndim == 2
    sigmas = []
    for token in zip(*heads, strict=True):
        squares = [total([v * v for v in part]) for part in token]
        if together:
            squares = [total(squares) / len(heads)] * len(heads)
        sigmas.append([(s / size + arb(config.norm_eps)).sqrt() for s in squares])
    gains = exact(np.broadcast_to(gain, (len(heads), size)))
    return [
        [
            [v / sigma[h] * g for v, g in zip(row, gains[h], strict=True)]
            for row, sigma in zip(rows, sigmas, strict=True)
        ]
        for h, rows in enumerate(heads)
    ]


def head_scores(p, h, state, query, key, config, context, temperature):
    width = p.w_q.shape[-1]
    content = matmul(state, exact(p.w_q[h]))
    if context.rotary is not None:
        query, key = rotate(query, context.rotary), rotate(key, context.rotary)
    if config.score == "additive":
        v = exact(p.v_score[h])
        scores = [
            [total([c * (a + b).tanh() for c, a, b in zip(v, q, k, strict=True)]) for k in key]
            for q in query
        ]
    else:
        scores = (arb_mat(query) * arb_mat(key).transpose()).tolist()
        if p.relative is not None:
            scores = plus(scores, relative(p.relative, h, content, context))
        if config.scale_scores:
            scores = times(1 / arb(width).sqrt(), scores)
    scores = times(1 / temperature, scores)
    return scores if context.bias is None else plus(scores, exact(context.bias[h]))


def relative(p, h, content, context):
    n = len(content)
    keys = matmul(exact(context.relative), exact(p.w_r[h]))
    b_r, b_s = exact(p.b_r[h]), exact(p.b_s[h])
    out = []
    for i in range(n):
        row = []
        for j in range(n):
            by_place = keys[n - 1 - (i - j)]
            value = total([(q + b) * r for q, b, r in zip(content[i], b_r, by_place, strict=True)])
            if context.segments is not None:
                kind = exact(p.segment[int(context.segments[i] != context.segments[j]), h])
                value += total([(q + b) * s for q, b, s in zip(content[i], b_s, kind, strict=True)])
            row.append(value)
        out.append(row)
    return out


def rotate(rows, rotary):
    cos, sin = exact(rotary[0]), exact(rotary[1])
    out = []
    for row, c, s in zip(rows, cos, sin, strict=True):
        half = len(row) // 2
        across = [-v for v in row[half:]] + row[:half]
        out.append([v * a + w * b for v, a, w, b in zip(row, c, across, s, strict=True)])
    return out


def mlp(p, state, kind):
    phi = ACTIVATIONS[layers.GATED.get(kind, kind)]
    z = affine(state, p.w_in, p.b_in)
    if kind in layers.GATED:
        gate = affine(state, p.w_gate, p.b_gate)
        z = [[phi(g) * v for g, v in zip(r, s, strict=True)] for r, s in zip(gate, z, strict=True)]
    else:
        z = [[phi(v) for v in row] for row in z]
    return affine(z, p.w_out, p.b_out)


def sigmoid(z):
    return 1 / (1 + (-z).exp())


def gelu_tanh(z):
    p = (2 / arb.pi()).sqrt() * (z + arb(0.044715) * z**3)
    return z * (1 + p.tanh()) / 2


ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": lambda z: z.max(arb(0)),
    "gelu": lambda z: z * (-z / arb(2).sqrt()).erfc() / 2,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": lambda z: z * sigmoid(arb(1.702) * z),
    "silu": lambda z: z * sigmoid(z),
    "tanh": lambda z: z.tanh(),
}


def log10_residual(state, keep):
    rows = [row for row, k in zip(state, keep, strict=True) if k]
    mean = [total(column) / len(rows) for column in zip(*rows, strict=True)]
    rest = [[abs(v - m) for v, m in zip(row, mean, strict=True)] for row in rows]

    def largest(values):
        best = values[0]
        for v in values[1:]:
            best = best.max(v)
        return best

    one = largest([total(list(column)) for column in zip(*rest, strict=True)])
    size = one * largest([total(row) for row in rest])
    if size == 0:
        return -np.inf
    if not size > 0:
        return np.nan
    log = size.log() / 2 / arb(10).log()
    wide = float(log.rad()) > 1e-6 * max(1.0, abs(float(log.mid())))
    return np.nan if wide else float(log.mid())
