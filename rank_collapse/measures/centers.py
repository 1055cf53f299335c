"""The common token x of a residual X − 1xᵀ: mean, median, midrange, minimiser of ‖.‖_{1,∞}.

Axis letters: n tokens, d width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from rank_collapse.measures.norms import as_tokens, num_tokens

CENTERS = ("mean", "median", "midrange", "composite")


def center_token(x: Any, center: str = "mean", mask: Any = None) -> Float[Array, "d"]:
    """The token x that `residual` takes away.

    Args:
        x: Tokens [n, d].
        center: "mean", "median", "midrange" or "composite"; see `residuals.residual`.
        mask: Bool [n], True for tokens that exist; None for all.

    Raises:
        ValueError: Unknown center; see also `norms.composite_norm`.
    """
    if center not in CENTERS:
        raise ValueError(f"center={center!r} is not one of {CENTERS}")
    x, mask = as_tokens(x, mask)
    if center == "composite":
        return composite_center(x, mask).center
    if center == "mean":
        return jnp.sum(x, axis=0) / num_tokens(x, mask)
    if mask is None:
        mask = jnp.ones(x.shape[0], bool)
    if center == "midrange":
        low = jnp.min(jnp.where(mask[:, None], x, jnp.inf), axis=0)
        high = jnp.max(jnp.where(mask[:, None], x, -jnp.inf), axis=0)
        return low / 2 + high / 2
    rows = jnp.sort(jnp.where(mask[:, None], x, jnp.inf), axis=0)  # masked rows last
    count = jnp.sum(mask)
    return rows[(count - 1) // 2] / 2 + rows[count // 2] / 2


@struct.dataclass
class CompositeCenter:
    """A minimiser of ‖X − 1xᵀ‖_{1,∞} and how good it is known to be.

    Attributes:
        center: x [d].
        value: ‖X − 1xᵀ‖_{1,∞} there; the minimum lies in [lower_bound, value].
        lower_bound: √(min ‖.‖_1 · lower bound of min ‖.‖_∞).
        norm_1_minimum: min_x ‖X − 1xᵀ‖_1, at the columnwise median, exact.
        norm_inf_value: ‖X − 1xᵀ‖_∞ at the best x found for it.
        norm_inf_lower: A lower bound of min_x ‖X − 1xᵀ‖_∞ by duality.
    """

    center: Any
    value: Any
    lower_bound: Any
    norm_1_minimum: Any
    norm_inf_value: Any
    norm_inf_lower: Any


def composite_center(x: Any, mask: Any = None) -> CompositeCenter:
    """argmin_x √(‖X − 1xᵀ‖_1 ‖X − 1xᵀ‖_∞), with a certificate.

    F(x) = ‖X − 1xᵀ‖_1 and G(x) = ‖X − 1xᵀ‖_∞ are convex, their product is not. Its minimum lies on
    the boundary of what (F, G) can be, whose corners minimise (1 − w) F/F_0 + w G/G_0 for some w: a
    grid of w is solved, then a finer one around the best. Each problem is smoothed (|u| as
    √(u² + μ²), max as log-sum-exp) and followed to small smoothing by damped Newton steps. What is
    returned is evaluated without smoothing, so the value is right whether or not the steps
    converged. min F is the columnwise median, in closed form. min G, a linear program, is bounded
    from below by its dual: for weights p on the tokens, Σ_ij p_i |X_ij − x_j| at the weighted
    medians x_j.

    Works under jit and vmap, at the cost of a few thousand d×d factorisations. Bounds hold up to
    rounding.

    Args:
        x: Tokens [n, d].
        mask: Bool [n], True for tokens that exist; None for all.

    Raises:
        ValueError: See `norms.composite_norm`.
    """
    x, mask = as_tokens(x, mask)
    x = jax.lax.stop_gradient(x)
    keep = jnp.ones(x.shape[0], bool) if mask is None else mask
    start = center_token(x, "median", mask)
    shifted = jnp.where(keep[:, None], x - start[None, :], 0)
    scale = jnp.max(jnp.sum(jnp.abs(shifted), axis=1))
    scale = jnp.where(scale == 0, 1, scale)
    shifted = shifted / scale

    # log of w / (1 − w); the last is w = 1, the minimiser of ‖.‖_∞
    coarse = jnp.append(jnp.linspace(-6, 6, _NUM_WEIGHTS - 1, dtype=x.dtype), jnp.inf)
    centers, lowers = jax.vmap(lambda t: _weighted_center(shifted, keep, t))(coarse)
    values = jax.vmap(lambda c: _both_norms(shifted, keep, c))(centers)
    best = jnp.argmin(values[0] * values[1])
    near = jnp.clip(coarse[jnp.minimum(best, _NUM_WEIGHTS - 2)], -6, 6)
    step = 12 / (_NUM_WEIGHTS - 2)
    fine = near + jnp.linspace(-step, step, _NUM_WEIGHTS, dtype=x.dtype)
    finer, _ = jax.vmap(lambda t: _weighted_center(shifted, keep, t))(fine)

    zero = jnp.zeros_like(centers[:1])
    mean = (center_token(x, "mean", mask) - start)[None, :] / scale
    every = jnp.concatenate([zero, mean, centers, finer])
    norm_1, norm_inf = jax.vmap(lambda c: _both_norms(shifted, keep, c))(every)
    best = jnp.argmin(norm_1 * norm_inf)
    lower = jnp.max(lowers)
    return CompositeCenter(
        center=start + scale * every[best],
        value=scale * jnp.sqrt(norm_1[best] * norm_inf[best]),
        lower_bound=scale * jnp.sqrt(norm_1[0] * lower),
        norm_1_minimum=scale * norm_1[0],
        norm_inf_value=scale * jnp.min(norm_inf),
        norm_inf_lower=scale * lower,
    )


_NUM_WEIGHTS = 16
_NUM_STEPS = 120


def _both_norms(x, keep, center):
    size = jnp.where(keep[:, None], jnp.abs(x - center[None, :]), 0)
    return jnp.max(jnp.sum(size, axis=0)), jnp.max(jnp.sum(size, axis=1))


def _weighted_center(x, keep, log_odds):
    """Minimiser of (1 − w) F/F(0) + w G/G(0), w = sigmoid(log_odds), and a lower bound of min G.

    x has its columnwise medians at 0, where F is least.
    """
    n, d = x.shape
    w = jax.nn.sigmoid(log_odds)
    f0, g0 = _both_norms(x, keep, jnp.zeros(d, x.dtype))
    f0, g0 = jnp.where(f0 == 0, 1, f0), jnp.where(g0 == 0, 1, g0)
    order = jnp.argsort(x, axis=0)
    last = jnp.log(50 * jnp.finfo(x.dtype).eps)

    def smoothed(c, sigma, derivatives):
        """Value of the smoothed sum; with `derivatives` also gradient, Hessian and p."""
        u = c[None, :] - x
        parts = []
        for axis, size, weight in ((0, f0, 1 - w), (1, g0, w)):
            mu = sigma * size / (n, d)[axis]
            tau = sigma * size / jnp.log((d, n)[axis] + 1.0)
            length = jnp.sqrt(jnp.square(u) + mu**2)
            sums = jnp.sum(jnp.where(keep[:, None], length, 0), axis=axis)
            logits = sums / tau if axis == 0 else jnp.where(keep, sums / tau, -jnp.inf)
            value = weight / size * tau * jax.nn.logsumexp(logits)
            p = jax.nn.softmax(logits)
            parts.append((value, p, mu, tau, length, weight / size))
        total = parts[0][0] + parts[1][0]
        if not derivatives:
            return total
        (_, q, mu_f, tau_f, length_f, weight_f), (_, p, mu_g, tau_g, length_g, weight_g) = parts
        slope_f = jnp.sum(jnp.where(keep[:, None], u / length_f, 0), axis=0)
        bend_f = jnp.sum(jnp.where(keep[:, None], mu_f**2 / length_f**3, 0), axis=0)
        slope_g = jnp.where(keep[:, None], u / length_g, 0)
        grad_f, grad_g = q * slope_f, p @ slope_g
        diagonal = weight_f * q * (bend_f + slope_f**2 / tau_f)
        diagonal = diagonal + weight_g * (p @ (mu_g**2 / length_g**3))
        spread = slope_g - grad_g[None, :]
        hessian = jnp.diag(diagonal) - weight_f / tau_f * jnp.outer(grad_f, grad_f)
        hessian = hessian + weight_g / tau_g * (spread.T @ (p[:, None] * spread))
        return total, weight_f * grad_f + weight_g * grad_g, hessian, p

    def dual(p):
        """Σ_ij p_i |x_ij − weighted median_j|: a lower bound of min G for weights that sum to 1."""
        sums = jnp.cumsum(p[order], axis=0)
        index = jnp.argmax(sums >= sums[-1:] / 2, axis=0)
        rows = jnp.take_along_axis(order, index[None, :], axis=0)
        median = jnp.take_along_axis(x, rows, axis=0)
        return jnp.sum(p[:, None] * jnp.abs(x - median)) / jnp.sum(p)

    def step(carry, k):
        c, damping, best, best_value, lower = carry
        sigma = jnp.exp(last * jnp.minimum(k / (0.9 * _NUM_STEPS), 1.0)).astype(x.dtype)
        value, gradient, hessian, p = smoothed(c, sigma, True)
        lower = jnp.maximum(lower, dual(p))
        shift = damping * jnp.max(jnp.diagonal(hessian))
        factor = jax.scipy.linalg.cho_factor(hessian + shift * jnp.eye(d, dtype=x.dtype))
        trial = c - jax.scipy.linalg.cho_solve(factor, gradient)
        better = smoothed(trial, sigma, False) <= value  # False where the factorisation failed
        c = jnp.where(better, trial, c)
        damping = jnp.clip(jnp.where(better, damping / 4, damping * 8), 1e-7, 1e3)
        f, g = _both_norms(x, keep, c)
        exact = (1 - w) * f / f0 + w * g / g0
        best = jnp.where(exact < best_value, c, best)
        return (c, damping, best, jnp.minimum(exact, best_value), lower), None

    start = jnp.zeros(d, x.dtype)
    one, none = jnp.ones((), x.dtype), jnp.zeros((), x.dtype)
    carry = (start, 1e-3 * one, start, one * jnp.inf, none)
    (_, _, best, _, lower), _ = jax.lax.scan(step, carry, jnp.arange(_NUM_STEPS, dtype=x.dtype))
    return best, lower
