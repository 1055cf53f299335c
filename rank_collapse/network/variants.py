"""Attention variants by name: what stands in the place of softmax attention, as its authors start.

    config = rc.variant(rc.transformer(depth=12, num_heads=4, d_model=64, mask="causal"), "shaped")
    params = rc.init_variant(key, config, "shaped")

A head is a composition: scores S, weights P = normalise(S), the mixing matrix M = α I + β P + γ C,
a gate. A variant sets `normalise`, `mixing` or, where it has parts of its own, `mix` of the
configuration. Its values (α, β, γ, sinks, decays, temperature laws) are numbers, [L] or [L, H],
leaves of the configuration: traced, swept by `jax.vmap` and trained by a gradient with respect to
the configuration.

Axis letters: h heads, n queries, m keys, k and v their widths.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from rank_collapse.network.attention import Mixing, softmax
from rank_collapse.network.config import DEFAULTS, TransformerConfig
from rank_collapse.network.covers import ANY, Covers
from rank_collapse.network.layers import ACTIVATIONS
from rank_collapse.network.parameters import TransformerParams, init
from rank_collapse.network.transformer import apply

# --- Weights of scores: (values, scores [h, n, m], context) → P [h, n, m]


def allowed(scores: Any, context: Any) -> Any:
    """Bool [1 or h, n, m], which keys a query may attend to."""
    mask = jnp.ones(scores.shape[-2:], bool) if context.mask is None else context.mask
    return mask.reshape((1,) * (3 - mask.ndim) + mask.shape)


def _or_one(total):
    """Sums of rows to divide by, 1 where a row has no key: its weights stay 0."""
    return jnp.where(total == 0, 1, total)


def with_sink(sink, scores, context):
    """exp(S_ij) / (exp(s_h) + Σ_j exp S_ij): a column of score s_h, dropped after the softmax."""
    own = jnp.broadcast_to(context.of_heads(sink, len(scores)), (*scores.shape[:2], 1))
    there = jnp.broadcast_to(allowed(scores, context), scores.shape)
    mask = jnp.concatenate([there, jnp.ones_like(there[..., :1])], axis=-1)
    full = jnp.concatenate([scores, own.astype(scores.dtype)], axis=-1)
    return jnp.where(there, softmax(full, mask)[..., :-1], 0)


def sigmoid(bias, scores, context):
    """σ(S + b), b = −ln m where it is None, m all keys, padding included; rows sum to any value."""
    own = -math.log(scores.shape[-1]) if bias is None else context.of_heads(bias, len(scores))
    return jnp.where(allowed(scores, context), jax.nn.sigmoid(scores + own), 0)


def softpick(eps, scores, context):
    """relu(e^S − 1) / (Σ_j |e^S − 1| + ε), both divided by e^max(S, 0)."""
    there = allowed(scores, context)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))  # float16 has no ε
    top = jax.lax.stop_gradient(
        jnp.max(jnp.where(there, scores, 0), axis=-1, keepdims=True, initial=0)
    )
    small = jnp.where(there, jnp.exp(scores - top) - jnp.exp(-top), 0)
    total = jnp.sum(jnp.abs(small), axis=-1, keepdims=True) + eps * jnp.exp(-top)
    return jax.nn.relu(small) / total


def by_log_n(scale, power, scores, context):
    """softmax(s (ln n_i)^p S), n_i the keys that query i may attend to, at least 2."""
    there = allowed(scores, context)
    keys = jnp.maximum(jnp.sum(there, axis=-1, keepdims=True), 2)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    law = jnp.log(keys.astype(scores.dtype)) ** context.of_heads(power, len(scores))
    return softmax(context.of_heads(scale, len(scores)) * law * scores, context.mask)


def retention(decay, scores, context):
    """S ∘ D / max(|Σ_j (S ∘ D)_ij|, 1), D_ij = γ_h^(i−j) / √(Σ_j γ_h^(i−j)); no gradient of it."""
    h, n, m = scores.shape
    if n != m:
        raise ValueError(f"retention needs as many keys as queries, not scores of {scores.shape}")
    distance = jnp.abs(jnp.arange(n)[:, None] - jnp.arange(n)[None, :])
    d = jnp.where(allowed(scores, context), context.of_heads(decay, h) ** distance[None], 0)
    p = scores * d / jnp.sqrt(_or_one(d.sum(axis=-1, keepdims=True)))
    size = jax.lax.stop_gradient(jnp.abs(p.sum(axis=-1, keepdims=True)))
    return p / jnp.maximum(size, 1)


# --- Heads of their own: (values, q, k, v, context) → (M [h, n, n], out [h, n, v] or None)


def _softmax_of(q, k, context):
    """softmax(q kᵀ/√k), with the context's bias, cap and mask."""
    scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    if context.cap is not None:
        scores = context.cap * jnp.tanh(scores / context.cap)
    return softmax(scores if context.bias is None else scores + context.bias, context.mask)


def differential(lambda_init, vectors, eps, q, k, v, context):
    """M = P₁ − λ P₂ of the halves of queries and keys, out = (1 − λ_init) RMSNorm(M v).

    λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init, vectors [L, 4, k/2] in that order, None for 0.
    """
    (q1, q2), (k1, k2) = jnp.split(q, 2, axis=-1), jnp.split(k, 2, axis=-1)
    start = lam = context.of_heads(lambda_init, len(q))
    if vectors is not None:
        a, b, c, d = vectors[0 if context.layer is None else context.layer]
        lam = jnp.exp(a @ b) - jnp.exp(c @ d) + start
    m = _softmax_of(q1, k1, context) - lam * _softmax_of(q2, k2, context)
    out = m @ v
    size = jax.lax.rsqrt(jnp.mean(jnp.square(out), axis=-1, keepdims=True) + eps)
    return m, (1 - start) * size * out


def gated(q, k, v, context):
    """out = (P v) ∘ σ(g), g the last v features of the queries; those of the keys are unread."""
    width = q.shape[-1] - v.shape[-1]
    p = _softmax_of(q[..., :width], k[..., :width], context)
    return p, jax.nn.sigmoid(q[..., width:]) * (p @ v)


def linear(q, k, v, context):
    """M = φ(q)φ(k)ᵀ over its row sums, φ = elu + 1."""
    m = (jax.nn.elu(q) + 1) @ (jax.nn.elu(k) + 1).swapaxes(1, 2)
    m = jnp.where(allowed(m, context), m, 0)
    return m / _or_one(m.sum(axis=-1, keepdims=True)), None


def ssd(decay, step_bias, q, k, v, context):
    """M_ij = (C_i·B_j) Δ_j exp(−a_h Σ_{j<t≤i} Δ_t), Δ = softplus(δ + b_h).

    C are queries, B keys, δ the last feature of the keys; that of the queries is unread.
    """
    step = jax.nn.softplus(k[..., -1] + context.of_heads(step_bias, len(k))[..., 0])  # [h, n]
    total = jnp.cumsum(context.of_heads(decay, len(k))[..., 0] * step, axis=-1)
    there = allowed(q @ k.swapaxes(1, 2), context)
    fall = jnp.where(there, total[:, :, None] - total[:, None, :], 0)
    m = q[..., :-1] @ k[..., :-1].swapaxes(1, 2) * jnp.exp(-fall) * step[:, None, :]
    return jnp.where(there, m, 0), None


# --- Values as the authors start them: (config, key or None) → {name: value}


def _differential_values(config, key):
    start = jnp.asarray([0.8 - 0.6 * math.exp(-0.3 * l) for l in range(config.depth)])
    shape = (config.depth, 4, config.qk_width // 2)
    vectors = None if key is None else 0.1 * jax.random.normal(key, shape)
    return {"lambda_init": start, "vectors": vectors, "eps": 1e-5}


def _ssd_values(config, key):
    """a_h uniform in 1 .. 16, Δ log-uniform in 1e-3 .. 0.1; spread over heads without a key."""
    shape = (2, config.depth, config.num_heads)
    spread = (jnp.arange(config.num_heads) + 0.5) / config.num_heads
    u = jnp.broadcast_to(spread, shape) if key is None else jax.random.uniform(key, shape)
    step = 0.001 * 100 ** u[1]
    return {"decay": 1 + 15 * u[0], "step_bias": step + jnp.log(-jnp.expm1(-step))}


def _retention_values(config, key):
    power = -5 - jnp.broadcast_to(jnp.arange(config.num_heads), _shape(config))
    return {"decay": 1 - 2.0**power}


def _shape(config):
    return config.depth, config.num_heads


# --- Parameters that the authors start in a way of their own


def _no_queries(attention):
    """W_Q = 0: P = C at first, so that M = α I."""
    return attention.replace(w_q=jnp.zeros_like(attention.w_q))


def _identities(attention):
    """W_Q = W_K = W_V = W_O = I of one head."""
    eye = jnp.broadcast_to(jnp.eye(attention.w_q.shape[-1]), attention.w_q.shape)
    return attention.replace(**dict.fromkeys(("w_q", "w_k", "w_v", "w_o"), eye))


class Variant(NamedTuple):
    """An attention variant.

    Attributes:
        fields: (config, **values) → fields of the configuration that it sets.
        values: Of `fields`, as the authors start them: {name: value}, or (config, key) → those.
            None for one that the caller has to give.
        source: The paper.
        needs: {field: the values that it takes}, of those where it does not take any.
        start: AttentionParams → as the authors start them.
    """

    fields: Callable[..., dict[str, Any]]
    values: Any
    source: str
    needs: Mapping[str, Any] = {}
    start: Callable[[Any], Any] = lambda attention: attention


def _mixing(alpha: Callable | float, beta: Callable | float, gamma: Callable | float) -> Callable:
    """Fields of M = α I + β P + γ C, each a number or a function of the variant's values."""
    own = {"identity": alpha, "weights": beta, "uniform": gamma}

    def fields(config, **values):
        given = {n: a(**values) if callable(a) else a for n, a in own.items()}
        return {"mixing": Mixing(**given)}

    return fields


def _normalise(fn: Callable) -> Callable:
    return lambda config, **values: {"normalise": Partial(fn, *values.values())}


def _mix(fn: Callable, more: Callable[[TransformerConfig], int] = lambda config: 0) -> Callable:
    """Fields of a head of its own, whose queries and keys have `more` features beside their own."""

    def fields(config, **values):
        found = {"mix": Partial(fn, *values.values())}
        if extra := more(config):
            found |= {"d_qk": config.qk_width + extra, "d_v": config.v_width}
            found |= {"rotary_width": config.rotated_width} if config.position == "rotary" else {}
        return found

    return fields


def _differential_fields(config, **values):
    if config.qk_width % 2:
        raise ValueError(f"differential attention halves queries: d_qk={config.qk_width} is odd")
    return {"mix": Partial(differential, *values.values())}


def _critical_fields(config, gamma):
    d = config.d_model
    if config.num_heads != 1:
        raise ValueError(f"critical scaling has W = I: one head, not num_heads={config.num_heads}")
    law = Partial(by_log_n, jnp.asarray(gamma) / math.sqrt(d), 1.0)
    return {"d_qk": d, "d_v": d, "norm_placement": "pre", "norm": "rms", "normalise": law}


class DyT(NamedTuple):
    """tanh(α x)/x, what dynamic tanh multiplies tokens by: a norm of the caller's own; α static."""

    alpha: float = 0.5

    def __call__(self, x: Any) -> Any:
        """[n, d] of tokens [n, d]; α at 0."""
        return self.alpha * ACTIVATIONS["tanh"].gate(self.alpha * x)


# What makes its own scores takes none of these fields of softmax attention.
OWN_SCORES = {n: (DEFAULTS[n],) for n in ("score", "scale_scores", "temperature", "qk_norm")}
OWN_SCORES |= {"position": ("none", "rotary", "relative_bias")}
NO_POSITION = OWN_SCORES | {"position": ("none",)}
NO_CAP = {"score_cap": (0.0,)}
CAUSAL = {"mask": ("causal",)}
ATTENTION = ("normalise", "mixing", "mix")

VARIANTS: dict[str, Variant] = {
    "softmax": Variant(lambda config: {}, {}, "Vaswani et al. 2017"),
    "centred": Variant(_mixing(0.0, 1.0, -1.0), {}, "Ali et al. 2023"),
    "a_perp": Variant(
        _mixing(0.0, lambda num_tokens: num_tokens**0.5, lambda num_tokens: -(num_tokens**0.5)),
        {"num_tokens": None}, "Nait Saada et al. 2024",
    ),
    "value_skipinit": Variant(
        _mixing(lambda alpha, beta: alpha, lambda alpha, beta: beta, 0.0),
        {"alpha": 1.0, "beta": 0.0}, "He et al. 2023",
    ),
    "shaped": Variant(
        _mixing(lambda alpha, **_: alpha, lambda beta, **_: beta, lambda gamma, **_: -gamma),
        {"alpha": 1.0, "beta": 1.0, "gamma": 1.0}, "Noci et al. 2023; He and Hofmann 2023",
        start=_no_queries,
    ),
    "attn_scale": Variant(
        _mixing(0.0, lambda excess: 1 + excess, lambda excess: -excess),
        {"excess": 0.0}, "Wang et al. 2022",
    ),
    "sigmoid": Variant(_normalise(sigmoid), {"bias": None}, "Ramapuram et al. 2024"),
    "softpick": Variant(_normalise(softpick), {"eps": 1e-8}, "Zuhri et al. 2025"),
    "off_by_one": Variant(_normalise(with_sink), {"sink": 0.0}, "Miller 2023"),
    "sinks": Variant(
        _normalise(with_sink), lambda config, key: {"sink": jnp.zeros(_shape(config))},
        "gpt-oss, OpenAI 2025",
    ),
    "ssmax": Variant(
        _normalise(by_log_n),
        lambda config, key: {"scale": jnp.full(_shape(config), 0.168), "power": 1.0},
        "Nakanishi 2025",
    ),
    "critical": Variant(
        _critical_fields, {"gamma": 1.0}, "arXiv 2510.05554", {"scale_scores": (True,)},
        _identities,
    ),
    "differential": Variant(
        _differential_fields, _differential_values, "Ye et al. 2024", NO_POSITION,
    ),
    "gated": Variant(
        _mix(gated, lambda config: config.v_width), {}, "Qiu et al. 2025 (Qwen)", OWN_SCORES,
    ),
    "retention": Variant(
        _normalise(retention), _retention_values, "Sun et al. 2023", CAUSAL,
    ),
    "linear": Variant(_mix(linear), {}, "Katharopoulos et al. 2020", NO_POSITION | NO_CAP),
    "ssd": Variant(
        _mix(ssd, lambda config: 1), _ssd_values, "Dao and Gu 2024 (Mamba-2)",
        NO_POSITION | NO_CAP | CAUSAL,
    ),
    "dyt": Variant(
        lambda config, alpha: {"norm": DyT(alpha)}, {"alpha": 0.5}, "Zhu et al. 2025",
        dict.fromkeys(ATTENTION, ANY),
    ),
}  # fmt: skip


def _known(name):
    if name not in VARIANTS:
        raise ValueError(f"variant {name!r} is not one of {tuple(VARIANTS)}")
    return VARIANTS[name]


def variant(
    config: TransformerConfig, name: str, *, key: Any = None, **values: Any
) -> TransformerConfig:
    """The config of an attention variant; draw its parameters by `init_variant`.

    Args:
        config: The network, of softmax attention.
        name: One of `VARIANTS`.
        key: For values that the authors draw; None for values without chance in their place.
        **values: In the place of the authors', by name: numbers, [L] or [L, H]; may be traced,
            but for the α of "dyt".

    Raises:
        ValueError: An unknown name or value, one that is missing, or a config that has an
            attention of its own already or scores that the variant does not take.
    """
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"variant {name!r} is of one stack, not of {type(config).__name__}")
    known = _known(name)
    start = known.values(config, key) if callable(known.values) else dict(known.values)
    for given in values:
        if given not in start:
            raise ValueError(f"variant {name!r} has no value {given!r}, but {tuple(start)}")
    start |= values
    if name == "dyt" and not isinstance(start["alpha"], int | float):
        raise ValueError(f"alpha={start['alpha']!r} of dyt is not a Python number: it is static")
    if name == "a_perp" and start["num_tokens"] is None:
        raise ValueError("variant 'a_perp' scales by √num_tokens: give num_tokens")
    taken = dict.fromkeys(DEFAULTS, ANY) | dict.fromkeys(ATTENTION, (None,)) | known.needs
    Covers(f"variant {name!r}", taken).check(config)
    return config.replace(**known.fields(config, **start))


def init_variant(
    key: Any, config: TransformerConfig, name: str, weight_scale: Any = 1.0, bias_scale: Any = 0.0
) -> TransformerParams:
    """Parameters of a network, its attention as a variant's authors start it; see `init`.

    Args:
        key: Random key.
        config: From `variant`.
        name: One of `VARIANTS`.
        weight_scale, bias_scale: As of `init`.

    Raises:
        ValueError: An unknown name.
    """
    start = _known(name).start
    params = init(key, config, weight_scale, bias_scale)
    layers = params.layers
    return params.replace(layers=layers.replace(attention=start(layers.attention)))


# --- Variants that are edits of what softmax attention computes: `apply(..., edit=...)`


def value_residual(
    params: TransformerParams, x: Any, config: TransformerConfig, share: Any = 0.5, **inputs: Any
) -> dict[str, Callable[..., Any]]:
    """The edit V_l ← (1 − s) V_l + s V_1 of every layer but the first, on one example.

    Sums over paths count s V_1 as a constant, which joins their offset.

    Args:
        params, x, config, **inputs: As in `apply`.
        share: s; a number or [L], may be traced.

    Source: Zhou et al. 2024 (arXiv 2410.17897).
    """
    first = apply(params, x, config, keep=("v",), **inputs).kept["v"][0]
    shares = jnp.broadcast_to(jnp.asarray(share, first.dtype), (config.depth,)).at[0].set(0)
    return {"v": lambda v, layer: (1 - shares[layer]) * v + shares[layer] * first}


def feat_scale(common: Any, rest: Any) -> dict[str, Callable[..., Any]]:
    """The edit f ← f + λ₁ ∘ f̄ + λ₂ ∘ (f − f̄) of attention's output f, f̄ its mean token.

    The mean is over all tokens of the array: cut padding off.

    Args:
        common, rest: λ₁ and λ₂ [L, d], which the authors start at 0; may be traced.

    Source: Wang et al. 2022 (arXiv 2203.05962), whose code adds the term twice.
    """
    common, rest = jnp.asarray(common), jnp.asarray(rest)

    def scaled(f, layer):
        mean = f.mean(axis=0, keepdims=True)
        return f + common[layer][None] * mean + rest[layer][None] * (f - mean)

    return {"attention_branch": scaled}
