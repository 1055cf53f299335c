"""Operations on tokens written as 1x̄ᵀ + e^s R̂: attention, norms and MLPs.

Each maps (x̄, R̂, s) to a mean token and parts of the new residual, subtracts no nearly equal
numbers, and stays right where ε = e^s underflows to 0. `logdomain` chains them.

Axis letters: n tokens (queries), m keys, d width, h heads, k per-head query/key width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rank_collapse.measures.residuals import composite_norm
from rank_collapse.network import attention as attn
from rank_collapse.network import layers


@struct.dataclass
class LogState:
    """Tokens X = 1·meanᵀ + e^log_scale · rest.

    Attributes:
        mean: Mean token [d].
        rest: Mantissa of the residual [n, d]; columns sum to 0, max |rest| = 1; 0 in masked rows.
        log_scale: Natural logarithm s of its size; −inf where the residual is 0.
    """

    mean: Any
    rest: Any
    log_scale: Any


def log10_norm(state):
    """log10 ‖e^s R̂‖_{1,∞}."""
    return (state.log_scale + jnp.log(composite_norm(state.rest))) / np.log(10.0)


def settle(mean, parts, scales, keep) -> LogState:
    """Tokens 1·meanᵀ + Σ_p e^{s_p} R_p in the form of `LogState`; parts [p, n, d], scales [p]."""
    exists = keep[None, :, None]
    parts = jnp.where(exists, parts, 0)
    centers = jnp.sum(parts, axis=1) / jnp.sum(keep)
    half = jnp.exp(scales / 2)[:, None]  # twice: a large scale may go with tiny parts
    mean = mean + jnp.sum(half * (half * centers), axis=0)
    parts = jnp.where(exists, parts - centers[:, None, :], 0)
    sizes = jnp.max(jnp.abs(parts), axis=(1, 2))
    scales = jnp.where(sizes == 0, -jnp.inf, scales + jnp.log(jnp.where(sizes == 0, 1, sizes)))
    top = jnp.max(scales)
    weights = jnp.exp(scales - jnp.where(top == -jnp.inf, 0, top))
    weights = weights / jnp.where(sizes == 0, 1, sizes)
    rest = jnp.einsum("p,pnd->nd", weights, parts)
    # rounding has left a mean of the order of the dtype's epsilon
    rest = jnp.where(exists[0], rest - (jnp.sum(rest, axis=0) / jnp.sum(keep))[None, :], 0)
    size = jnp.max(jnp.abs(rest))
    safe = jnp.where(size == 0, 1, size)
    return LogState(mean, rest / safe, jnp.where(size == 0, -jnp.inf, top + jnp.log(safe)))


def attention(params, state, config, context, temperature, keep):
    """Mean token of SA(X), and parts (R [h, n, d], p, t [h]) of its residual: e^{ps + t} R.

    Third, the logarithm of what rounding in R̂ may have put into it.
    """
    eps = jnp.exp(state.log_scale)
    factor = jnp.ones((), eps.dtype) / temperature
    if config.score == "additive":
        base, delta = _additive_scores(params, state, eps)
        base, delta = base * factor, delta * factor
        change = eps * (eps * delta)
    else:
        if config.scale_scores:
            factor = factor / jnp.sqrt(params.w_q.shape[-1]).astype(eps.dtype)
        base, delta, change = _dot_scores(params, state, eps, context, factor)
    if context.bias is not None:
        base = base + context.bias.astype(base.dtype)
    mask = three_axes(context.mask)
    if mask is not None and mask.shape[1] > 1:
        base = jnp.broadcast_to(base, jnp.broadcast_shapes(base.shape, mask.shape))
    score_noise = jnp.finfo(delta.dtype).eps * jnp.max(jnp.abs(delta), axis=(1, 2))
    first = jnp.argmax(keep)
    # any row's change may join what the rows share: then that row's E is 0, and rows whose
    # weights all sit on one key are compared with each other rather than with q
    base = base + change[:, first][:, None, :]
    delta, change = (a - a[:, first][:, None, :] for a in (delta, change))

    log_q = _log_softmax(base, mask)  # [h, 1 or n, m]
    q = jnp.exp(log_q)
    # a shift of a row's scores cancels; this one keeps Σ_j q_j exp(ε²δ_ij) ≥ 1
    delta, change = (a - jnp.sum(q * a, axis=-1, keepdims=True) for a in (delta, change))
    if mask is not None:
        delta, change = jnp.where(mask, delta, 0), jnp.where(mask, change, 0)
    large = jnp.max(jnp.abs(change), axis=-1, keepdims=True) > 30
    moderate = jnp.clip(change, -30, 30)
    tiny = jnp.abs(moderate) < 1e-6
    m = delta * jnp.where(tiny, 1, jnp.expm1(moderate) / jnp.where(tiny, 1, moderate))
    mean_m = jnp.sum(q * m, axis=-1, keepdims=True)
    ratio = (m - mean_m) / (1 + eps * (eps * mean_m))  # E_ij / q_j
    log_p = _log_softmax(base + jnp.where(large, change, 0), mask)

    # rows of P − Q sum to 0, so one key's value may be taken from all: the heaviest key's, whose
    # weight near 1 is the one that rounding spoils. The others' weights, which may be below
    # float range, are held as e^top times a mantissa.
    reference = q[:, 0] if q.shape[1] == 1 else q[:, first]
    heaviest = jnp.argmax(reference, axis=-1)
    other = jnp.arange(reference.shape[1])[None, :] != heaviest[:, None]
    rows = keep[None, :, None] if q.shape[1] > 1 else jnp.ones((1, 1, 1), bool)
    top = jnp.max(jnp.where(other[:, None, :] & rows, log_q, -jnp.inf), axis=(1, 2))
    top_p = jnp.where(other[:, None, :] & large & keep[None, :, None], log_p, -jnp.inf)
    top = jnp.maximum(top, jnp.max(top_p, axis=(1, 2)))
    reachable = top > jnp.finfo(top.dtype).min / 2  # else every row sees one and the same key
    safe_top = jnp.where(reachable, top, 0)[:, None, None]
    top = jnp.where(reachable, top, -jnp.inf)
    other = other[:, None, :]
    scaled_q = jnp.where(other, jnp.exp(jnp.minimum(log_q - safe_top, 0)), 0)
    scaled_p = jnp.where(other, jnp.exp(jnp.minimum(log_p - safe_top, 0)), 0)
    safe_eps = jnp.where(eps == 0, 1, eps)
    e = jnp.where(large, (scaled_p - scaled_q) / safe_eps / safe_eps, scaled_q * ratio)

    common = state.mean[None, :] + eps * jnp.einsum("hm,md->hd", reference, state.rest)
    values = jnp.einsum("hd,hdv->hv", common, params.w_v) + params.b_v
    mean = jnp.einsum("hv,hvd->d", values, params.w_o) + params.b_o
    values = jnp.einsum("md,hdv->hmv", state.rest, params.w_v)
    values = values - jnp.take_along_axis(values, heaviest[:, None, None], axis=1)

    def carried(weights):
        mixed = jnp.einsum("hnm,hmv->hnv", weights, values)
        return jnp.einsum("hnv,hvd->hnd", mixed, params.w_o)

    # what rounding in R̂ may contribute, as the entries of its values times the weights they meet
    size = jnp.max(jnp.abs(values), axis=(1, 2)) * jnp.max(jnp.abs(params.w_o), axis=(1, 2))
    size = size * jnp.finfo(values.dtype).eps

    def rounding(weights):
        heaviest_row = jnp.max(jnp.sum(jnp.abs(weights), axis=-1), axis=-1)
        return jnp.log(size) + jnp.log(heaviest_row)

    parts = [(carried(e), 3, top)]
    # e itself holds rounding of the scores' differences, even where these came out as 0
    unsure = jnp.abs(e) + score_noise[:, None, None] * (scaled_q + jnp.where(large, scaled_p, 0))
    unsure = jnp.where(keep[None, :, None], unsure, 0)
    noise = [rounding(unsure) + 3 * state.log_scale + top]
    if q.shape[1] > 1:
        differences = scaled_q - scaled_q[:, first][:, None, :]
        parts.append((carried(differences), 1, top))
        differences = jnp.where(keep[None, :, None], differences, 0)
        noise.append(rounding(differences) + state.log_scale + top)
    return mean, parts, jnp.max(jnp.stack(noise))


def three_axes(mask):
    return None if mask is None else mask.reshape((1,) * (3 - mask.ndim) + mask.shape)


def _log_softmax(scores, mask):
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jax.nn.log_softmax(scores, axis=-1)


def _dot_scores(params, state, eps, context, factor):
    """Scores as base + ε² delta without what is constant along a row; and ε² delta itself.

    base is [h, 1, m] where all rows share it, else [h, n, m]; delta is [h, n, m]. Every factor is
    applied before the products: a compiler that fuses a later one into the softmax, once with the
    rounding of a multiply-add and once without, makes scores of 1e12 differ from their maximum.
    """
    n = state.rest.shape[0]
    query = factor * jnp.einsum("nd,hdk->hnk", state.rest, params.w_q)
    key = jnp.einsum("nd,hdk->hnk", state.rest, params.w_k)
    mean_part = factor * jnp.einsum("d,hdk->hk", state.mean, params.w_q)[:, None, :]
    mean_query = mean_part + factor * params.b_q[:, None, :]
    relative = None
    if params.relative is not None and context.relative is not None:
        terms = params.relative.replace(
            b_r=factor * params.relative.b_r, b_s=factor * params.relative.b_s
        )
        relative = attn.relative_scores(terms, mean_part + eps * query, n, context)
    if context.rotary is None:
        base = jnp.einsum("hnk,hmk->hnm", mean_query, eps * key)
    else:
        mean_key = jnp.einsum("d,hdk->hk", state.mean, params.w_k) + params.b_k
        query, key = attn.rotate(query, context.rotary), attn.rotate(key, context.rotary)
        shape = (params.w_q.shape[0], n, params.w_q.shape[2])
        mean_query = attn.rotate(jnp.broadcast_to(mean_query, shape), context.rotary)
        mean_key = attn.rotate(jnp.broadcast_to(mean_key[:, None, :], shape), context.rotary)
        base = jnp.einsum("hnk,hmk->hnm", mean_query + eps * query, mean_key)
        base = base + jnp.einsum("hnk,hmk->hnm", mean_query, eps * key)
    base = base if relative is None else base + relative
    delta = jnp.einsum("hnk,hmk->hnm", query, key)
    return base, delta, jnp.einsum("hnk,hmk->hnm", eps * query, eps * key)


def _additive_scores(params, state, eps):
    """(base, delta) for v·tanh(z + ε(a_i + c_j)).

    Second differences of tanh have a closed form: tanh(z+a+c) − tanh(z+a) − tanh(z+c) + tanh(z) =
    −sinh(a) sinh(c) sinh(2z+a+c) / (cosh(z+a+c) cosh(z+a) cosh(z+c) cosh(z)).
    """
    mean = jnp.einsum("d,hdk->hk", state.mean, params.w_q + params.w_k)
    z = (mean + params.b_q + params.b_k)[:, None, None, :]
    a = jnp.einsum("nd,hdk->hnk", state.rest, params.w_q)[:, :, None, :]
    c = jnp.einsum("nd,hdk->hnk", state.rest, params.w_k)[:, None, :, :]
    base = jnp.einsum("hnmk,hk->hnm", jnp.tanh(z + eps * c), params.v_score)

    def over_eps(u):  # sinh(εu)/ε
        t = jnp.clip(eps * u, -2, 2)
        tiny = jnp.abs(t) < 1e-3
        return u * jnp.where(tiny, 1 + t * t / 6, jnp.sinh(t) / jnp.where(tiny, 1, t))

    def sech(u):
        return 1 / jnp.cosh(jnp.clip(u, -80, 80))

    za, zc, zac = z + eps * a, z + eps * c, z + eps * (a + c)
    # sinh(2z+a+c)/(cosh(z+a+c) cosh(z)) = tanh(z+a+c) + tanh(z): no overflow
    small = -over_eps(a) * over_eps(c) * (jnp.tanh(zac) + jnp.tanh(z)) * sech(za) * sech(zc)
    safe = jnp.where(eps == 0, 1, eps)
    direct = (jnp.tanh(zac) - jnp.tanh(za) - jnp.tanh(zc) + jnp.tanh(z)) / safe / safe
    large = jnp.maximum(jnp.abs(eps * a), jnp.abs(eps * c)) > 2
    return base, jnp.einsum("hnmk,hk->hnm", jnp.where(large, direct, small), params.v_score)


def norm(params, state, config, keep):
    """A norm: x_i − N(x̄) from the change of σ rather than from a difference of outputs."""
    eps, d = jnp.exp(state.log_scale), state.mean.shape[0]
    u, r = state.mean, state.rest
    if config.norm == "layer":
        u, r = u - jnp.mean(u), r - jnp.mean(r, axis=1, keepdims=True)
    twice = (2 * r @ u + eps * jnp.sum(jnp.square(r), axis=1)) / d  # (σ_i² − σ_0²)/ε
    sigma_0 = jnp.sqrt(jnp.mean(jnp.square(u)) + config.norm_eps)
    sigma = jnp.sqrt(
        jnp.mean(jnp.square(u[None, :] + eps * r), axis=1) + config.norm_eps
    )  # positive where σ_0² + ε·twice could round below 0
    change = twice / (sigma * sigma_0 * (sigma + sigma_0))
    rest = r / sigma[:, None] - change[:, None] * u[None, :]
    mean = u / sigma_0
    if params is not None:
        mean, rest = mean * params.gain, rest * params.gain[None, :]
        if params.bias is not None:
            mean = mean + params.bias
    return settle(mean, rest[None], state.log_scale[None], keep)


def mlp(params, state, kind):
    """Mean token and residual (over e^s) of an MLP, the latter from divided differences of φ."""
    eps = jnp.exp(state.log_scale)
    z, u = state.mean @ params.w_in + params.b_in, state.rest @ params.w_in
    if kind in layers.GATED:
        gate = state.mean @ params.w_gate + params.b_gate
        change = state.rest @ params.w_gate
        phi = layers.activation_of(kind).fn
        factor = phi(gate[None, :] + eps * change)
        difference = factor * u + z[None, :] * _divided_difference(kind, gate, change, eps)
        value = phi(gate) * z
    else:
        difference = _divided_difference(kind, z, u, eps)
        value = layers.activation_of(kind).fn(z)
    return value @ params.w_out + params.b_out, difference @ params.w_out


# Gauss-Legendre nodes and weights on [0, 1]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_NODES, _WEIGHTS = (_NODES + 1) / 2, _WEIGHTS / 2


def _divided_difference(kind, z, u, eps):
    """(φ(z + εu) − φ(z))/ε, right where ε is 0."""
    name, phi = layers.GATED.get(kind, kind), layers.activation_of(kind).fn
    z = z[None, :]
    if name == "identity":
        return u
    if name == "relu":  # piecewise linear: exact by cases
        ratio = jnp.where(eps == 0, jnp.sign(z) * jnp.inf, z / jnp.where(eps == 0, 1, eps))
        ratio = jnp.where(z == 0, 0, ratio)
        near = jnp.clip(ratio, -jnp.abs(u), jnp.abs(u))
        return jnp.where(jnp.abs(ratio) > jnp.abs(u), jnp.where(z > 0, u, 0), jax.nn.relu(
            near + u) - jax.nn.relu(near))  # fmt: skip
    step = eps * u
    large = jnp.abs(step) > 1
    slope = 0.0
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        at = z + jnp.where(large, 0, step) * jnp.asarray(node, u.dtype)
        slope += jnp.asarray(weight, u.dtype) * jax.jvp(phi, (at,), (jnp.ones_like(at),))[1]
    direct = (phi(z + step) - phi(z)) / jnp.where(eps == 0, 1, eps)
    return jnp.where(large, direct, u * slope)
