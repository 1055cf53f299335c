"""The common token x of a residual X − 1xᵀ: mean, median, midrange, minimiser of ‖.‖_{1,∞}.

Axis letters: n tokens, d width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.measures.norms import as_tokens, in_own_precision, num_tokens

CENTERS = ("mean", "median", "midrange", "composite")


@in_own_precision
def center_token(x: Any, center: str = "mean", *, mask: Any = None) -> Float[Array, "d"]:
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
        return composite_center(x, mask=mask).center
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


@in_own_precision
def composite_center(x: Any, *, mask: Any = None) -> CompositeCenter:
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
    start = center_token(x, "median", mask=mask)
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
    mean = (center_token(x, "mean", mask=mask) - start)[None, :] / scale
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


@struct.dataclass
class _Problem:
    """(1 − w) F(c)/F(0) + w G(c)/G(0), F = ‖X − 1cᵀ‖_1 and G = ‖X − 1cᵀ‖_∞, to be minimised over c.

    Attributes:
        x: [n, d] with columnwise medians at 0, where F is least.
        keep: Bool [n], tokens that exist.
        w: Weight of G.
        f0, g0: F(0) and G(0), 1 where they are 0.
    """

    x: Any
    keep: Any
    w: Any
    f0: Any
    g0: Any

    def exact(self, c):
        """The value at c, without smoothing."""
        f, g = _both_norms(self.x, self.keep, c)
        return (1 - self.w) * f / self.f0 + self.w * g / self.g0


@struct.dataclass
class _Smoothed:
    """One of the two norms with |u| as √(u² + μ²) and max as a log-sum-exp of width τ.

    Attributes:
        value: weight · the smoothed norm / its size at 0.
        share: softmax of the column sums (F, [d]) or row sums (G, [n]).
        mu, tau, weight: Scalars.
        length: √(u² + μ²), [n, d].
    """

    value: Any
    share: Any
    mu: Any
    tau: Any
    weight: Any
    length: Any


def _smooth(problem: _Problem, c, sigma) -> tuple[Any, _Smoothed, _Smoothed]:
    """(u = c − x, F smoothed, G smoothed); sigma is the smoothing relative to the norms at 0."""
    n, d = problem.x.shape
    u = c[None, :] - problem.x
    parts = []
    for axis, size, weight in ((0, problem.f0, 1 - problem.w), (1, problem.g0, problem.w)):
        mu = sigma * size / (n, d)[axis]
        tau = sigma * size / jnp.log((d, n)[axis] + 1.0)
        length = jnp.sqrt(jnp.square(u) + mu**2)
        sums = jnp.sum(jnp.where(problem.keep[:, None], length, 0), axis=axis)
        logits = sums / tau if axis == 0 else jnp.where(problem.keep, sums / tau, -jnp.inf)
        value = weight / size * tau * jax.nn.logsumexp(logits)
        parts.append(_Smoothed(value, jax.nn.softmax(logits), mu, tau, weight / size, length))
    return u, *parts


def _derivatives(problem: _Problem, u, f: _Smoothed, g: _Smoothed):
    """Gradient [d] and Hessian [d, d] of the smoothed sum."""
    keep = problem.keep[:, None]
    slope_f = jnp.sum(jnp.where(keep, u / f.length, 0), axis=0)
    bend_f = jnp.sum(jnp.where(keep, f.mu**2 / f.length**3, 0), axis=0)
    slope_g = jnp.where(keep, u / g.length, 0)
    grad_f, grad_g = f.share * slope_f, g.share @ slope_g
    diagonal = f.weight * f.share * (bend_f + slope_f**2 / f.tau)
    diagonal = diagonal + g.weight * (g.share @ (g.mu**2 / g.length**3))
    spread = slope_g - grad_g[None, :]
    hessian = jnp.diag(diagonal) - f.weight / f.tau * jnp.outer(grad_f, grad_f)
    hessian = hessian + g.weight / g.tau * (spread.T @ (g.share[:, None] * spread))
    return f.weight * grad_f + g.weight * grad_g, hessian


def _dual(x, order, p):
    """Σ_ij p_i |x_ij − weighted median_j|: a lower bound of min G for weights that sum to 1."""
    sums = jnp.cumsum(p[order], axis=0)
    index = jnp.argmax(sums >= sums[-1:] / 2, axis=0)
    rows = jnp.take_along_axis(order, index[None, :], axis=0)
    median = jnp.take_along_axis(x, rows, axis=0)
    return jnp.sum(p[:, None] * jnp.abs(x - median)) / jnp.sum(p)


def _weighted_center(x, keep, log_odds):
    """Minimiser of a `_Problem` with w = sigmoid(log_odds), and a lower bound of min G.

    Damped Newton steps on the smoothed sum, the smoothing reduced on the way.
    """
    d = x.shape[1]
    sizes = (jnp.where(size == 0, 1, size) for size in _both_norms(x, keep, jnp.zeros(d, x.dtype)))
    problem = _Problem(x, keep, jax.nn.sigmoid(log_odds), *sizes)
    order = jnp.argsort(x, axis=0)
    last = jnp.log(50 * jnp.finfo(x.dtype).eps)

    def total(c, sigma):
        _, f, g = _smooth(problem, c, sigma)
        return f.value + g.value

    def step(carry, k):
        c, damping, best, best_value, lower = carry
        sigma = jnp.exp(last * jnp.minimum(k / (0.9 * _NUM_STEPS), 1.0)).astype(x.dtype)
        u, f, g = _smooth(problem, c, sigma)
        gradient, hessian = _derivatives(problem, u, f, g)
        lower = jnp.maximum(lower, _dual(x, order, g.share))
        shift = damping * jnp.max(jnp.diagonal(hessian))
        factor = jax.scipy.linalg.cho_factor(hessian + shift * jnp.eye(d, dtype=x.dtype))
        trial = c - jax.scipy.linalg.cho_solve(factor, gradient)
        better = total(trial, sigma) <= f.value + g.value  # False where the factorisation failed
        c = jnp.where(better, trial, c)
        damping = jnp.clip(jnp.where(better, damping / 4, damping * 8), 1e-7, 1e3)
        exact = problem.exact(c)
        best = jnp.where(exact < best_value, c, best)
        return (c, damping, best, jnp.minimum(exact, best_value), lower), None

    start = jnp.zeros(d, x.dtype)
    one, none = jnp.ones((), x.dtype), jnp.zeros((), x.dtype)
    carry = (start, 1e-3 * one, start, one * jnp.inf, none)
    (_, _, best, _, lower), _ = jax.lax.scan(step, carry, jnp.arange(_NUM_STEPS, dtype=x.dtype))
    return best, lower
