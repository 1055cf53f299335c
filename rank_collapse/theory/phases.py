"""Phases of attention at initialisation in closed form: collapse, frozen attention, and between.

Three theories of which floats of a network decide whether its tokens stay apart: Giorlandino and
Goldt's recursion of (q, p), the mean square and mean product of tokens; critical scaling of the
scores with ln n; and the exponent of the angle between tokens of Cowsik et al. All are functions of
numbers that may be traced and vmapped.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.theory.score_overlap import score_overlap

PLACEMENTS = ("post", "pre", "gain", "gain_pre")
NORMALISED = ("post", "gain")  # whose stream is, after each sum
LEAST = -80.0  # of ln q, where float32 still holds q
# E f(z) over a standard normal z: activations of σ_w z bend within 1/σ_w, where Gauss and Hermite's
# nodes are too far apart.
NODES = np.linspace(-8, 8, 4001)
WEIGHTS = np.exp(-0.5 * NODES**2) / np.exp(-0.5 * NODES**2).sum()


# --- Giorlandino and Goldt 2025


def critical_beta(q: Any, p: Any) -> Array:
    """β_c = √(2/(q (q − p))): scores of standard deviation β √(q (q − p) ln n) freeze above it.

    Source: arXiv 2505.24333; the random energy model's critical temperature.
    """
    return jnp.sqrt(2 / (q * (q - p)))


def frozen_share(beta: Any, q: Any = 1.0, p: Any = 0.0) -> Array:
    """Y = max(0, 1 − β_c/β), the limit of Σ_j P_ij² as n → ∞."""
    return jnp.maximum(0.0, 1 - critical_beta(q, p) / beta)


def attention_step(
    q: Any, p: Any, beta: Any, skip: Any, placement: str = "post", num_tokens: Any = None
) -> tuple[Array, Array]:
    """(q, p) after a sublayer of attention whose scores vary by β² q (q − p) ln n within a row.

    q' = p + (q − p) Y + α² q, p' = p + (q − p) O + α² p, divided by q' where the stream is
    normalised. Y = E Σ_j P_ij², O = E Σ_j P_ij P_kj: `frozen_share` and 0 as n → ∞.

    Args:
        q, p: Mean square and mean product of two tokens, per feature.
        beta, skip: β and the gain α of the skip.
        placement: "post"; "pre", whose branch reads (p/q, 1) of a stream that is not normalised;
            "gain" and "gain_pre", the same without what all tokens share in the branch: without p
            in q' and p', and with Y − 1/n and O − 1/n, for the mean token shares it.
        num_tokens: n, for Y and O of that many tokens (`score_overlap`); None for the limit.

    Source: arXiv 2505.24333, section 3; O of n tokens is derived here.
    """
    q, p, own_q, own_p = _read(q, p, placement)
    if num_tokens is None:
        y, overlap, uniform = frozen_share(beta, own_q, own_p), 0.0, 0.0
    else:
        variance = jnp.square(beta) * own_q * (own_q - own_p) * jnp.log(num_tokens)
        y, overlap = score_overlap(num_tokens, variance, own_p / own_q)
        uniform = 1 / num_tokens
    common, apart = own_p, own_q - own_p
    if placement.startswith("gain"):
        common, y, overlap = 0.0, *(jnp.maximum(a - uniform, 0.0) for a in (y, overlap))
    new_q, new_p = common + apart * y, common + apart * overlap
    return _placed(new_q + skip**2 * q, new_p + skip**2 * p, placement)


def mlp_step(
    q: Any, p: Any, skip: Any, weight: Any = 2.0, bias: Any = 0.0, placement: str = "post"
) -> tuple[Array, Array]:
    """(q, p) after a sublayer of two matrices with a ReLU between them.

    q₁ = σ_w² q + σ_b², q₂ = ½ σ_w² q₁ + σ_b², p₂ = ½ σ_w² q₁ f(p₁/q₁) + σ_b², plus α² of the
    stream,
    f(ρ) = (√(1 − ρ²) + ρ (π − arccos ρ))/π (Cho and Saul 2009).

    Args:
        q, p, placement: As in `attention_step`.
        skip: α.
        weight, bias: σ_w² and σ_b², fan-in · variance of weights, and variance of biases.
    """
    q, p, own_q, own_p = _read(q, p, placement)
    q1, p1 = weight * own_q + bias, weight * own_p + bias
    rho = jnp.clip(p1 / q1, -1, 1)
    f = (jnp.sqrt(1 - rho**2) + rho * (jnp.pi - jnp.arccos(rho))) / jnp.pi
    q2, p2 = 0.5 * weight * q1 + bias, 0.5 * weight * q1 * f + bias
    return _placed(q2 + skip**2 * q, p2 + skip**2 * p, placement)


def phase_profile(
    beta: Any,
    depth: int,
    *,
    attention_skip: Any = 1.0,
    mlp_skip: Any = None,
    weight: Any = 2.0,
    bias: Any = 0.0,
    start: tuple[Any, Any] = (1.0, 0.0),
    placement: str = "post",
    num_tokens: Any = None,
) -> tuple[Float[Array, "l"], Float[Array, "l"]]:
    """(ln q, ρ = p/q) after 0 .. L layers of attention and, with `mlp_skip`, MLP; see the steps.

    √((1 − ρ)(1 − 1/n)) is the residual over the whole in the Frobenius norm. Where a step leaves
    nothing, q = 0, ρ is its limit from above: 1, or 0 of "gain" and "gain_pre".

    Args:
        beta: β, or one per layer [L].
        depth: L, static.
        attention_skip, mlp_skip: α_A and α_M; None for no MLP.
        weight, bias, placement, num_tokens: As in the steps.
        start: (q, p) of the input.
    """

    def through(state, step, skip):
        log_q, rho = state
        if placement in NORMALISED:
            return jnp.zeros_like(rho), step(jnp.exp(log_q), rho * jnp.exp(log_q), skip)[1]
        # Over q, which float32 does not hold after many layers.
        branch, common = step(jnp.ones_like(rho), rho, 0.0)
        grown = branch * jnp.exp(-log_q) + skip**2
        shared = common * jnp.exp(-log_q) + skip**2 * rho
        return jnp.maximum(log_q + jnp.log(grown), LEAST), _ratio(grown, shared, placement)

    def layer(state, beta):
        found = through(state, attend(beta), attention_skip)
        if mlp_skip is not None:
            found = through(found, pass_mlp, mlp_skip)
        return found, found

    def attend(beta):
        return lambda q, p, skip: attention_step(q, p, beta, skip, placement, num_tokens)

    def pass_mlp(q, p, skip):
        return mlp_step(q, p, skip, weight, bias, placement)

    q, p = (jnp.asarray(a, float) for a in start)
    first = jnp.log(q), p / q
    _, found = jax.lax.scan(layer, first, jnp.broadcast_to(jnp.asarray(beta, float), (depth,)))
    return tuple(jnp.concatenate([a[None], b]) for a, b in zip(first, found, strict=True))


def _read(q, p, placement):
    """q and p of the stream, then of what its branches read."""
    if placement not in PLACEMENTS:
        raise ValueError(f"placement={placement!r} is not one of {PLACEMENTS}")
    q, p = jnp.asarray(q, float), jnp.asarray(p, float)
    own = (q, p) if placement in NORMALISED else (jnp.ones_like(q), _ratio(q, p, placement))
    return q, p, *own


def _placed(q, p, placement):
    return (jnp.ones_like(q), _ratio(q, p, placement)) if placement in NORMALISED else (q, p)


def _ratio(q, p, placement):
    """p/q ≤ 1; its limit from above where both are 0."""
    nothing = 0.0 if placement.startswith("gain") else 1.0
    return jnp.where(q == 0, nothing, jnp.minimum(p / jnp.where(q == 0, 1, q), 1))


# --- Cowsik et al. 2024


def angle_exponent(
    attention_gain: Any, mlp_gain: Any, weight_scale: Any, activation: Callable = jnp.tanh
) -> Array:
    """λ_a: 1 − cosine of nearly equal tokens grows by e^{λ_a} a layer; below 0 they collapse.

    Of x ← √(1 − α²) x + α f(N(x)), attention with weights that are nearly uniform over many keys
    and values of unit gain, then MLP(x) = W₂ φ(σ_w W₁ x), W₂ of unit gain:
        e^{λ_a} = (1 − α_A²) V/V' · ((1 − α_M²) V' + α_M² σ_w² E φ'²)/V,
    V and V' = (1 − α_A²) V + α_A² the mean squares before attention and before the MLP, where they
    stay from layer to layer: V = (1 − α_M²) V' + α_M² E φ². φ of σ_w z, z standard normal.

    Args:
        attention_gain, mlp_gain: α_A and α_M in [0, 1].
        weight_scale: σ_w.
        activation: φ, differentiable.

    Source: Cowsik et al. 2024 (arXiv 2403.02579); the slope of the correlation map at 1 is that of
    Poole et al. 2016.
    """
    a, m = jnp.square(attention_gain), jnp.square(mlp_gain)
    z = weight_scale * jnp.asarray(NODES)
    value, slope = jax.jvp(activation, (z,), (jnp.ones_like(z),))
    square, change = (jnp.sum(jnp.asarray(WEIGHTS) * jnp.square(b)) for b in (value, slope))
    before_mlp = (1 - a) * stream_square(attention_gain, mlp_gain, square) + a
    return jnp.log(1 - a) + jnp.log((1 - m) + m * (weight_scale**2 * change) / before_mlp)


def stream_square(attention_gain: Any, mlp_gain: Any, branch_square: Any) -> Array:
    """V of `angle_exponent`, from E φ²; 1 where both gains are 0."""
    a, m = jnp.square(attention_gain), jnp.square(mlp_gain)
    lost = 1 - (1 - m) * (1 - a)
    found = ((1 - m) * a + m * branch_square) / jnp.where(lost == 0, 1.0, lost)
    return jnp.where(lost == 0, 1.0, found)
