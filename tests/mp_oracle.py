"""Residual profiles by the plain forward pass with many digits of mpmath: slow and obvious.

The formulas of `rank_collapse.network` on lists of numbers, tokens as they are. Nothing is shared
with the passes under test but the arrays of `make_context` (masks, rotary tables, relative
encodings) and of `layer_gains`, which are data to both.
"""

import jax
import mpmath
import numpy as np
from mpmath import fdot, fsum, mpf

from rank_collapse.network import GATED, layer_gains, prepare_inputs


def profile(params, x, config, digits, **inputs):
    """log10 ‖res(X^l)‖_{1,∞} for l = 0..L in `digits` decimal digits, as mpmath's numbers."""
    params, prepared = prepare_inputs(params, x, config, **inputs)
    gains = layer_gains(config, prepared.x.dtype, params)
    prepared, gains, stack = jax.tree.map(np.asarray, (prepared, gains, params.layers))
    keep = np.ones(len(prepared.x), bool) if prepared.token_mask is None else prepared.token_mask
    with mpmath.workdps(digits):
        state = exact(prepared.x)
        out = [log10_residual(state, keep)]
        for l, row in enumerate(config.layer_map or range(config.depth)):
            p = jax.tree.map(lambda a, row=row: a[row], stack)
            state = layer(
                p, state, config, prepared.context, jax.tree.map(lambda a, l=l: a[l], gains)
            )
            out.append(log10_residual(state, keep))
        return out


def exact(a):
    """Floats as nested lists."""
    a = np.asarray(a, np.float64)
    return [exact(b) for b in a] if a.ndim else mpf(float(a))


def matmul(a, b):
    columns = list(zip(*b, strict=True))
    return [[fdot(row, column) for column in columns] for row in a]


def affine(a, w, b):
    return [[u + v for u, v in zip(row, exact(b), strict=True)] for row in matmul(a, exact(w))]


def plus(a, b):
    return [[u + v for u, v in zip(r, s, strict=True)] for r, s in zip(a, b, strict=True)]


def entrywise(fn, *tables):
    return [
        [fn(*values) for values in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)
    ]


def scaled(gain, a):
    """A gain, scalar or [d], times tokens."""
    each = exact(np.broadcast_to(gain, len(a[0])))
    return [[g * v for g, v in zip(each, row, strict=True)] for row in a]


def layer(p, state, config, context, gains):
    placement, start = config.norm_placement, state
    for kind in ("attention", "mlp") if config.mlp != "none" else ("attention",):
        gain_of_norm = None if gains.norm is None else getattr(gains.norm, kind)

        def norm(name, a, kind=kind, own=gain_of_norm):
            out = unit_norm(a, config.norm, config.norm_eps)
            q = getattr(p, f"{kind}_{name}")
            if q is not None:
                out = scaled(q.gain, out)
                if q.bias is not None:
                    out = [[v + b for v, b in zip(row, exact(q.bias), strict=True)] for row in out]
            return out if own is None or name != "norm" else scaled(own, out)

        seen = start if kind == "mlp" and config.parallel else state
        bare = kind == "attention" and gains.unnormed is not None and gains.unnormed
        if placement in ("pre", "sandwich") and not bare:
            seen = norm("norm", seen)
        if kind == "attention":
            part = attention(p.attention, seen, config, context, gains)
        else:
            part = mlp(p.mlp, seen, config)
        if placement in ("sandwich", "branch", "both"):
            part = norm("branch_norm", part)
        part = scaled(getattr(gains.branch, kind), part)
        if getattr(config, f"{kind}_skip") or (kind == "mlp" and config.parallel):
            part = plus(part, scaled(getattr(gains.skip, kind), state))
        state = norm("norm", part) if placement in ("post", "both") else part
    return state


def unit_norm(a, kind, eps):
    out = []
    for row in a:
        mean = fsum(row) / len(row) if kind == "layer" else mpf(0)
        sigma = mpmath.sqrt(fsum((v - mean) ** 2 for v in row) / len(row) + mpf(eps))
        out.append([(v - mean) / sigma for v in row])
    return out


def attention(p, state, config, context, gains):
    n, heads = len(state), config.num_heads
    mask = np.ones((1, n, n), bool)
    if context.mask is not None:
        mask = context.mask.reshape((1,) * (3 - context.mask.ndim) + context.mask.shape)
    rotary = context.rotary
    if gains.window is not None:
        index = np.arange(n)
        mask = mask & (np.abs(index[:, None] - index[None, :]) <= gains.window)
        if context.local_rotary is not None and gains.window < n:
            rotary = context.local_rotary
    mask = np.broadcast_to(mask, (heads, n, n))
    contents = [matmul(state, exact(w)) for w in p.w_q]
    queries = [affine(state, w, b) for w, b in zip(p.w_q, p.b_q, strict=True)]
    keys = [affine(state, w, b) for w, b in zip(p.w_k, p.b_k, strict=True)]
    queries, keys = (
        head_norm(gain, a, config.norm_eps) for gain, a in ((p.q_norm, queries), (p.k_norm, keys))
    )
    out = [exact(p.b_o) for _ in state]
    for h in range(heads):
        q, k = queries[h], keys[h]
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        scores = head_scores(p, h, contents[h], q, k, config, context)
        scores = entrywise(lambda s: s / mpf(float(gains.temperature)), scores)
        if context.cap is not None:
            cap = mpf(float(context.cap))
            scores = entrywise(lambda s, cap=cap: cap * mpmath.tanh(s / cap), scores)
        if context.bias is not None:
            scores = plus(scores, exact(context.bias[h]))
        weights = [softmax(row, seen) for row, seen in zip(scores, mask[h], strict=True)]
        if gains.mixing is not None:
            alpha, beta, gamma = (
                mpf(float(a[h]))
                for a in (gains.mixing.identity, gains.mixing.weights, gains.mixing.uniform)
            )
            uniform = [softmax([mpf(0)] * n, seen) for seen in mask[h]]
            weights = [
                [beta * weights[i][j] + gamma * uniform[i][j] + alpha * (i == j) for j in range(n)]
                for i in range(n)
            ]
        values = affine(state, p.w_v[h], p.b_v[h])
        out = plus(out, matmul(matmul(weights, values), exact(p.w_o[h])))
    return out


def head_norm(gain, heads, eps):
    """RMSNorm of queries or keys, a list of tokens for each head; no gain, no norm."""
    if gain is None:
        return heads
    if gain.ndim == 1:
        return [scaled(gain, unit_norm(a, "rms", eps)) for a in heads]
    k = len(heads[0][0])
    together = [[v for part in parts for v in part] for parts in zip(*heads, strict=True)]
    together = scaled(gain.ravel(), unit_norm(together, "rms", eps))
    return [[row[h * k : h * k + k] for row in together] for h in range(len(heads))]


def head_scores(p, h, content, query, key, config, context):
    if config.score == "additive":
        v = exact(p.v_score[h])
        return [
            [fsum(c * mpmath.tanh(a + b) for c, a, b in zip(v, q, k, strict=True)) for k in key]
            for q in query
        ]
    scores = [[fdot(q, k) for k in key] for q in query]
    if p.relative is not None:
        scores = plus(scores, relative(p.relative, h, content, context))
    root = mpmath.sqrt(p.w_q.shape[-1]) if config.scale_scores else mpf(1)
    return entrywise(lambda s: s / root, scores)


def relative(p, h, content, context):
    n = len(content)
    keys = matmul(exact(context.relative), exact(p.w_r[h]))
    b_r, b_s = exact(p.b_r[h]), exact(p.b_s[h])

    def score(i, j):
        value = fdot([q + b for q, b in zip(content[i], b_r, strict=True)], keys[n - 1 - (i - j)])
        if context.segments is not None:
            kind = exact(p.segment[int(context.segments[i] != context.segments[j]), h])
            value += fdot([q + b for q, b in zip(content[i], b_s, strict=True)], kind)
        return value

    return [[score(i, j) for j in range(n)] for i in range(n)]


def rotate(rows, rotary):
    out = []
    for row, c, s in zip(rows, exact(rotary[0]), exact(rotary[1]), strict=True):
        half = len(c) // 2
        across = [-v for v in row[half : len(c)]] + row[:half]
        turned = [v * a + w * b for v, a, w, b in zip(row, c, across, s, strict=False)]
        out.append(turned + row[len(c) :])
    return out


def softmax(row, allowed):
    if not allowed.any():
        return [mpf(1) / len(row)] * len(row)
    top = max(v for v, seen in zip(row, allowed, strict=True) if seen)
    e = [mpmath.exp(v - top) if seen else mpf(0) for v, seen in zip(row, allowed, strict=True)]
    z = fsum(e)
    return [v / z for v in e]


def mlp(p, state, config):
    phi = activation(GATED.get(config.mlp, config.mlp))
    z = affine(state, p.w_in, p.b_in)
    if config.mlp in GATED:
        z = entrywise(lambda g, v: phi(g) * v, affine(state, p.w_gate, p.b_gate), z)
    else:
        z = entrywise(phi, z)
    if config.routing is not None:
        z = entrywise(lambda v, s: v * s, z, [shares(p, row, config) for row in state])
    return affine(z, p.w_out, p.b_out)


def shares(p, row, config):
    (logits,) = affine([row], p.w_router, p.b_router)
    order = sorted(range(len(logits)), key=lambda e: -logits[e])
    chosen = np.isin(np.arange(len(logits)), order[: config.experts_per_token])
    every = chosen if config.router == "chosen" else np.ones_like(chosen)
    weights = [w * int(c) for w, c in zip(softmax(logits, every), chosen, strict=True)]
    units = (config.ff_width - config.d_shared) // config.num_experts
    out = [w for w in weights for _ in range(units)]
    if config.d_shared:
        ((gate,),) = matmul([row], exact(p.w_shared))
        out += [1 / (1 + mpmath.exp(-gate))] * config.d_shared
    return out


def activation(name):
    def sigmoid(z):
        return 1 / (1 + mpmath.exp(-z))

    def tanh_argument(z):
        return 2 * mpmath.sqrt(2 / mpmath.pi) * (z + mpf(0.044715) * z**3)

    return {
        "identity": lambda z: z,
        "relu": lambda z: max(z, mpf(0)),
        "gelu": lambda z: z * mpmath.erfc(-z / mpmath.sqrt(2)) / 2,
        "gelu_tanh": lambda z: z * sigmoid(tanh_argument(z)),
        "quick_gelu": lambda z: z * sigmoid(mpf(1.702) * z),
        "silu": lambda z: z * sigmoid(z),
        "tanh": mpmath.tanh,
    }[name]


def log10_residual(state, keep):
    rows = [row for row, there in zip(state, keep, strict=True) if there]
    mean = [fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    rest = [[abs(v - m) for v, m in zip(row, mean, strict=True)] for row in rows]
    size = max(map(fsum, rest)) * max(map(fsum, zip(*rest, strict=True)))
    return mpmath.log10(size) / 2 if size else -mpmath.inf
