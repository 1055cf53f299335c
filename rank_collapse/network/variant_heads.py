"""Attention variants as functions: normalisations of scores, and functions for whole heads.

`variants` gives them by name, with the values that their authors start from.

Axis letters: h heads, n queries, m keys, k and v their widths.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from rank_collapse.network.attention import softmax

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
