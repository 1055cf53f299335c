"""Hidden states of a network by its equations, head by head: slow and obvious.

The numbers are those of the state: float64, or mpmath's numbers with any count of digits (arrays
of objects). `states` makes its own masks, angles and gains. `profile` takes those of `make_context`
and `layer_gains`, as the passes under test do.
"""

from types import SimpleNamespace

import jax
import mpmath
import numpy as np
from scipy import special

from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.layers import GATED
from rank_collapse.network.residual import layer_gains

FLOATS = SimpleNamespace(sqrt=np.sqrt, exp=np.exp, tanh=np.tanh, erfc=special.erfc)
KINDS = ("attention", "cross", "mlp")
NOTHING = SimpleNamespace(mask=None, rotary=None, cap=None, bias=None)  # of cross-attention


def exact(a):
    """Converts floats to mpmath's numbers; other values stay as they are."""
    a = np.asarray(a)
    if not np.issubdtype(a.dtype, np.floating) and a.dtype.kind != "V":  # bfloat16 is of kind V
        return a
    return np.array(np.frompyfunc(mpmath.mpf, 1, 1)(a.astype(np.float64)), object)


def apply(name, a):
    """Applies a function of NumPy or mpmath to every entry."""
    a = np.asarray(a)
    if a.dtype != object:
        return getattr(FLOATS, name)(a)
    return np.frompyfunc(getattr(mpmath, name), 1, 1)(a)


def profile(params, x, config, digits, **inputs):
    """Computes log10 ‖res(X^l)‖_{1,∞} for l = 0..L, as mpmath's numbers of `digits` digits."""
    with mpmath.workdps(digits):
        hidden, keep = exact_states(params, x, config, **inputs)
        return [log10_residual(state, keep) for state in hidden]


def exact_states(params, x, config, **inputs):
    """Computes (X^0 .. X^L, which tokens exist [n]) in the digits of mpmath's context."""
    params, prepared = prepare_inputs(params, x, config, **inputs)
    gains = layer_gains(config, prepared.x.dtype, params)
    stack, gains, prepared = jax.tree.map(exact, (params.layers, gains, prepared))
    keep = np.ones(len(prepared.x), bool) if prepared.token_mask is None else prepared.token_mask
    hidden = [prepared.x]
    for l, row in enumerate(config.layer_map or range(config.depth)):
        layer_params, gains_at_layer = row_of(stack, row), row_of(gains, l)
        hidden.append(layer(layer_params, hidden[-1], config, prepared.context, gains_at_layer))
    return hidden, keep


def states(params, x, config, memory=None):
    """Computes (X^0 .. X^L, the output) in float64; every head has its own keys and all biases."""
    params, x, memory = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x, memory))
    i, j = np.indices((len(x), len(x)))
    allowed = {"none": i == i, "causal": j <= i, "local": abs(i - j) <= config.window}[config.mask]
    context = SimpleNamespace(mask=allowed, rotary=None, cap=None, bias=None, local_rotary=None)
    if params.position_bias is not None:  # of the first distances back, in T5
        context.bias = np.moveaxis(params.position_bias[np.maximum(i - j, 0)], 2, 0)
    if config.position == "rotary":  # components i and i + k/2 of token t by t · theta^(-2i/k)
        half = params.layers.attention.w_q.shape[-1] // 2
        angles = np.tile(i[:, :1] * config.rotary_theta ** (-np.arange(half) / half)[None], 2)
        context.rotary = np.cos(angles), np.sin(angles)
    hidden = [x]
    for l, row in enumerate(config.layer_map or range(config.depth)):
        p = row_of(params.layers, row)
        hidden.append(layer(p, hidden[-1], config, context, compute_gains(config, p, l), memory))
    last = norm(params.final_norm, hidden[-1], config) if config.final_norm else hidden[-1]
    return np.array(hidden), last


def row_of(tree, index):
    return jax.tree.map(lambda a: a[index], tree)


def compute_gains(config, p, l):
    """Computes the gains of layer l, the learned ones included."""

    def collect_kinds(name):
        gain, by_kind = getattr(config, f"{name}_gain"), SimpleNamespace()
        for kind in KINDS:
            value = np.asarray(1.0 if gain is None else getattr(gain, kind, gain), np.float64)
            learned = getattr(getattr(p, f"{kind}_gains"), name, None)
            value = value[l % len(value)] if value.ndim else value  # [L], [L or 1, d] or a number
            setattr(by_kind, kind, value if learned is None else value * learned)
        return by_kind

    temperature = getattr(config.temperature, "attention", config.temperature)
    temperature = np.broadcast_to(temperature, config.depth)[l]
    named = {name: collect_kinds(name) for name in ("skip", "branch", "norm")}
    return SimpleNamespace(
        **named, temperature=temperature, mixing=None, window=None, unnormed=None
    )


def layer(p, x, config, context, gains, memory=None):
    """Applies x ↦ N(λ x + γ N'(branch(N(x)))) for each kind of branch in turn."""
    placement, start = config.norm_placement, x
    branches = {
        "attention": lambda a: attention(p.attention, a, a, config, context, gains),
        "cross": lambda a: attention(p.cross, a, memory, config, NOTHING, gains),
        "mlp": lambda a: mlp(p.mlp, a, config),
    }
    exists = {"attention": True, "cross": memory is not None, "mlp": config.mlp != "none"}
    for kind in (kind for kind in KINDS if exists[kind]):
        norm_gain = 1 if gains.norm is None else getattr(gains.norm, kind)
        is_parallel = kind == "mlp" and config.parallel
        branch_input = start if is_parallel else x
        bare = kind == "attention" and gains.unnormed is not None and gains.unnormed
        if placement in ("pre", "sandwich") and not bare:
            branch_input = norm(getattr(p, f"{kind}_norm"), branch_input, config) * norm_gain
        branch_output = branches[kind](branch_input)
        if placement in ("sandwich", "branch", "both"):
            branch_output = norm(getattr(p, f"{kind}_branch_norm"), branch_output, config)
        branch_output = branch_output * getattr(gains.branch, kind)
        if getattr(config, f"{kind}_skip") or is_parallel:
            branch_output = branch_output + x * getattr(gains.skip, kind)
        x = branch_output
        if placement in ("post", "both"):
            x = norm(getattr(p, f"{kind}_norm"), branch_output, config) * norm_gain
    return x


def norm(p, x, config):
    return unit_norm(x, config.norm, config.norm_eps) * p.gain + (0 if p.bias is None else p.bias)


def unit_norm(x, kind, eps):
    x = x - x.mean(axis=1, keepdims=True) if kind == "layer" else x
    return x / apply("sqrt", (x**2).mean(axis=1, keepdims=True) + eps)


def attention(p, x, y, config, context, gains):
    """Computes Σ_h softmax(q kᵀ/√k) v W_o, with queries of x, and keys and values of y."""
    heads = range(config.num_heads)
    mask, rotary = np.ones((len(heads), len(x), len(y)), bool), context.rotary
    mask = mask if context.mask is None else mask & context.mask
    if gains.window is not None:
        i, j = np.indices(mask.shape[1:])
        mask = mask & (np.abs(i - j) <= gains.window)
        if context.local_rotary is not None and gains.window < len(x):
            rotary = context.local_rotary
    queries, keys = (
        head_norm(gain, [z @ w[h] + b[h] for h in heads], config.norm_eps)
        for z, w, b, gain in ((x, p.w_q, p.b_q, p.q_norm), (y, p.w_k, p.b_k, p.k_norm))
    )
    out = np.tile(p.b_o, (len(x), 1))
    for h in heads:
        q, k = queries[h], keys[h]
        if rotary is not None:
            q, k = rotated(q, *rotary), rotated(k, *rotary)
        s = scores(p, h, x @ p.w_q[h], q, k, config, context) / gains.temperature
        s = s if context.cap is None else apply("tanh", s / context.cap) * context.cap
        s = s if context.bias is None else s + context.bias[h]
        m = softmax(s, mask[h])
        if gains.mixing is not None:
            alpha, beta, gamma = (
                a[h] for a in (gains.mixing.identity, gains.mixing.weights, gains.mixing.uniform)
            )
            m = np.eye(len(x)) * alpha + m * beta + softmax(0 * s, mask[h]) * gamma
        out = out + m @ (y @ p.w_v[h] + p.b_v[h]) @ p.w_o[h]
    return out


def head_norm(gain, heads, eps):
    """Divides queries or keys by the root mean square of each head, or of all heads together."""
    if gain is None:
        return heads
    if gain.ndim == 1:
        return [unit_norm(a, "rms", eps) * gain for a in heads]
    together = unit_norm(np.concatenate(heads, axis=1), "rms", eps) * gain.ravel()
    return np.split(together, len(heads), axis=1)


def scores(p, h, content, q, k, config, context):
    if config.score == "additive":
        return (apply("tanh", q[:, None] + k[None]) * p.v_score[h]).sum(axis=-1)
    s = q @ k.T
    if p.relative is not None:
        s = s + relative(p.relative, h, content, context)
    return s / apply("sqrt", np.asarray(q.shape[1], s.dtype)) if config.scale_scores else s


def relative(p, h, content, context):
    """Computes scores by distance, and by whether two tokens share a segment."""
    i, j = np.indices((len(content), len(content)))
    s = ((content + p.b_r[h]) @ (context.relative @ p.w_r[h]).T)[i, len(i) - 1 - (i - j)]
    if context.segments is None:
        return s
    differ = (context.segments[i] != context.segments[j]).astype(int)
    return s + ((content + p.b_s[h]) @ p.segment[:, h].T)[i, differ]


def rotated(q, cos, sin):
    width, half = cos.shape[1], cos.shape[1] // 2
    across = np.concatenate([-q[:, half:width], q[:, :half]], axis=1)
    return np.concatenate([q[:, :width] * cos + across * sin, q[:, width:]], axis=1)


def softmax(s, allowed):
    """Computes the softmax of each row; a token that may see nothing sees all tokens equally."""
    nothing = ~allowed.any(axis=1, keepdims=True)
    s, allowed = np.where(nothing, 0 * s, s), allowed | nothing
    top = np.where(allowed, s, -np.inf).max(axis=1, keepdims=True)
    e = np.where(allowed, apply("exp", np.where(allowed, s - top, 0 * s)), 0)
    return e / e.sum(axis=1, keepdims=True)


def mlp(p, x, config):
    phi, z = activation(GATED.get(config.mlp, config.mlp)), x @ p.w_in + p.b_in
    z = phi(x @ p.w_gate + p.b_gate) * z if config.mlp in GATED else phi(z)
    return (z if config.routing is None else z * shares(p, x, config)) @ p.w_out + p.b_out


def shares(p, x, config):
    """Computes the factor of each hidden unit of a mixture of experts, token by token."""
    logits = x @ p.w_router
    order = np.argsort(-logits.astype(float), axis=1)[:, : config.experts_per_token]
    chosen = (order[:, :, None] == np.arange(logits.shape[1])).any(axis=1)
    competing = chosen if config.router == "chosen" else np.ones_like(chosen)
    units = (config.ff_width - config.d_shared) // config.num_experts
    out = np.repeat(softmax(logits, competing) * chosen.astype(int), units, axis=1)
    if not config.d_shared:
        return out
    return np.hstack([out, np.repeat(sigmoid(x @ p.w_shared), config.d_shared, axis=1)])


def sigmoid(z):
    return 1 / (1 + apply("exp", -z))


def activation(name):
    def tanh_argument(z):
        pi = +mpmath.pi if np.asarray(z).dtype == object else np.pi
        return 2 * apply("sqrt", 2 / pi) * (z + 0.044715 * z**3)

    return {
        "identity": lambda z: z,
        "relu": lambda z: np.maximum(z, 0),
        "gelu": lambda z: (
            z * apply("erfc", -z / apply("sqrt", np.asarray(2, np.asarray(z).dtype))) / 2
        ),
        "gelu_tanh": lambda z: z * sigmoid(tanh_argument(z)),
        "quick_gelu": lambda z: z * sigmoid(1.702 * z),
        "silu": lambda z: z * sigmoid(z),
        "tanh": lambda z: apply("tanh", z),
    }[name]


def log10_residual(state, keep):
    residual = abs(state[keep] - state[keep].mean(axis=0))
    size = residual.sum(axis=1).max() * residual.sum(axis=0).max()
    return mpmath.log10(size) / 2 if size else -mpmath.inf
