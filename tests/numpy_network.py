"""Hidden states of a network in numpy: the equations, by loops over layers and heads."""

import jax
import numpy as np
from scipy import special

GATED = {"swiglu": "silu", "geglu_tanh": "gelu_tanh"}
PHI = {
    "gelu": lambda z: z * special.ndtr(z),
    "gelu_tanh": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z * special.expit(z),
    "tanh": np.tanh,
}


def states(params, x, config, memory=None):
    """(X^0 .. X^L, the output), every head with its own keys and all biases there."""
    params, x, memory = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x, memory))
    i, j = np.indices((len(x), len(x)))
    allowed = {"none": i == i, "causal": j <= i, "local": abs(i - j) <= config.window}[config.mask]
    hidden = [x]
    for l, row in enumerate(config.layer_map or range(config.depth)):
        p = jax.tree.map(lambda a, row=row: a[row], params.layers)
        branches = {
            "attention": lambda a, p=p, l=l: attention(
                p.attention, a, a, config, l, allowed, params.position_bias
            ),
            "cross": lambda a, p=p, l=l: attention(p.cross, a, memory, config, l, True, None),
            "mlp": lambda a, p=p: mlp(p.mlp, a, config.mlp),
        }
        there = {"attention": True, "cross": memory is not None, "mlp": config.mlp != "none"}
        for kind in (kind for kind, is_there in there.items() if is_there):
            x = sublayer(p, x, branches[kind], config, kind, l)
        hidden.append(x)
    return np.array(hidden), norm(params.final_norm, x, config) if config.final_norm else x


def sublayer(p, x, branch, config, kind, l):
    """N(λ x + γ N'(branch(N(x)))), with the gain of N and with what is learned of λ and γ."""
    placement, of_norm = config.norm_placement, 1.0
    if config.norm_gain is not None:
        of_norm = gain_of(config.norm_gain, kind, l)
    learned, gains = getattr(p, f"{kind}_gains"), []
    for which in ("skip", "branch"):
        own = getattr(learned, which, None)
        gain = gain_of(getattr(config, f"{which}_gain"), kind, l)
        gains.append(gain if own is None else gain * own)
    own = getattr(p, f"{kind}_norm")
    y = branch(of_norm * norm(own, x, config) if placement in ("pre", "sandwich") else x)
    if placement in ("sandwich", "branch", "both"):
        y = norm(getattr(p, f"{kind}_branch_norm"), y, config)
    y = gains[1] * y + gains[0] * x * getattr(config, f"{kind}_skip")
    return of_norm * norm(own, y, config) if placement in ("post", "both") else y


def gain_of(gain, kind, l):
    """Of one sublayer: of a number, [L], [L, d], or of such values for each kind."""
    gain = np.asarray(getattr(gain, kind, gain), np.float64)
    return gain[l] if gain.ndim else gain


def norm(p, x, config):
    mean = x.mean(axis=1, keepdims=True) if config.norm == "layer" else 0.0
    y = (x - mean) / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + config.norm_eps)
    return y * p.gain + (0 if p.bias is None else p.bias)


def attention(p, x, y, config, l, allowed, table):
    """Σ_h softmax(q kᵀ/√k) v W_o; `table` has T5's bias of each of the first distances."""
    out = np.tile(p.b_o, (len(x), 1))
    for h in range(config.num_heads):
        q, k = (
            normed_head(gain, [z @ u + b for u, b in zip(w, bias, strict=True)], h, config)
            for z, w, bias, gain in ((x, p.w_q, p.b_q, p.q_norm), (y, p.w_k, p.b_k, p.k_norm))
        )
        if config.position == "rotary":
            q, k = (rotated(a, config.rotary_theta) for a in (q, k))
        s = q @ k.T / gain_of(config.temperature, "attention", l)
        s = s / np.sqrt(q.shape[1]) if config.scale_scores else s
        if table is not None:
            i, j = np.indices(s.shape)
            s = s + table[np.maximum(i - j, 0), h]
        e = np.where(allowed, np.exp(s - s.max(axis=1, keepdims=True)), 0)
        out = out + e / e.sum(axis=1, keepdims=True) @ (y @ p.w_v[h] + p.b_v[h]) @ p.w_o[h]
    return out


def normed_head(gain, heads, h, config):
    """Queries or keys of one head, over its root mean square or that of all heads."""
    if gain is None:
        return heads[h]
    over = heads[h] if gain.ndim == 1 else np.concatenate(heads, axis=1)
    size = np.sqrt((over**2).mean(axis=1, keepdims=True) + config.norm_eps)
    return heads[h] / size * (gain if gain.ndim == 1 else gain[h])


def rotated(q, theta):
    """Components i and i + k/2 of token t turned by the angle t · theta^(-2i/k)."""
    half = q.shape[-1] // 2
    angles = np.arange(len(q))[:, None] * theta ** (-np.arange(half) / half)[None, :]
    a, b, cos, sin = q[:, :half], q[:, half:], np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


def mlp(p, x, kind):
    z = x @ p.w_in + p.b_in
    if kind in GATED:
        return (PHI[GATED[kind]](x @ p.w_gate + p.b_gate) * z) @ p.w_out + p.b_out
    return PHI[kind](z) @ p.w_out + p.b_out
