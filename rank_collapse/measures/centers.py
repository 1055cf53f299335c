"""The common token x of a residual X − 1xᵀ: mean, median, midrange, minimiser of ‖.‖_{1,∞}."""

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from array_api_compat import is_numpy_array, is_torch_array

from rank_collapse import struct
from rank_collapse.measures.arrays import namespace, where_it_lives
from rank_collapse.measures.norms import as_tokens, divide, num_tokens, total

Center = Literal["mean", "median", "midrange", "composite"]
CENTERS = get_args(Center)


def center_of(x: Any, mask: Any, center: Center) -> Any:
    """The common token [..., d] that `residuals.residual` takes away, of what `as_tokens` made.

    Raises:
        ValueError: Unknown center.
    """
    struct.refuse_if(center not in CENTERS, f"center={center!r} is not one of {CENTERS}")
    xp = namespace(x)
    if center == "composite":
        return composite_center(x, mask=mask).center
    if center == "mean":
        return divide(total(x, -2), num_tokens(x, mask)[..., None])
    there = xp.ones_like(x, dtype=xp.bool) if mask is None else mask[..., None]
    if center == "midrange":
        low = xp.min(xp.where(there, x, xp.inf), axis=-2)
        high = xp.max(xp.where(there, x, -xp.inf), axis=-2)
        return low / 2 + high / 2
    return median(xp.where(there, x, xp.inf), num_tokens(x, mask)[..., None])[..., 0, :]


def median(x: Any, count: Any) -> Any:
    """The median along the axis before the last, kept, of its `count` smallest values [..., 1]."""
    xp = namespace(x)
    rows, count = xp.sort(x, axis=-2), xp.astype(count, xp.arange(0).dtype)[..., None]
    shape = (*x.shape[:-2], 1, x.shape[-1])
    low, high = (
        xp.take_along_axis(rows, xp.broadcast_to(i, shape), axis=-2)
        for i in ((count - 1) // 2, count // 2)
    )
    return low / 2 + high / 2


class CompositeCenter(struct.Struct):
    """A minimiser of ‖X − 1xᵀ‖_{1,∞} and how good it is known to be."""

    center: Any  # x [d]
    value: Any  # ‖X − 1xᵀ‖_{1,∞} there; the minimum lies in [lower_bound, value]
    lower_bound: Any  # √(min ‖.‖_1 · lower bound of min ‖.‖_∞)
    norm_1_minimum: Any  # min_x ‖X − 1xᵀ‖_1, at the columnwise median, exact
    norm_inf_value: Any  # ‖X − 1xᵀ‖_∞ at the best x found for it
    norm_inf_lower: Any  # a lower bound of min_x ‖X − 1xᵀ‖_∞ by duality


@where_it_lives
def composite_center(x: Any, *, mask: Any = None) -> CompositeCenter:
    """argmin_x √(‖X − 1xᵀ‖_1 ‖X − 1xᵀ‖_∞), with a certificate.

    F(x) = ‖X − 1xᵀ‖_1 and G(x) = ‖X − 1xᵀ‖_∞ are convex, their product is not. Where it is F_k G_k,
    the tangent of the logarithm gives log F + log G ≤ log F_k + log G_k + F/F_k + G/G_k − 2: steps
    that lower the convex sum F/F_k + G/G_k, its weights following the iterate, lower the product.
    Descents from several weights, begun at the better of mean and median, look for the least of its
    local minima; one more minimises G. Each is smoothed (|u| as √(u² + μ²), max as log-sum-exp) and
    followed to small smoothing by damped Newton steps. What is returned is evaluated without
    smoothing, so the value is right whether or not the steps converged. min F is the columnwise
    median, in closed form. min G, a linear program, is bounded from below by its dual: for weights
    p on the tokens, Σ_ij p_i |X_ij − x_j| at the weighted medians x_j.

    Works under jit and vmap; outside of them tokens are padded, up to a quarter, to a few numbers
    of them, for which it is compiled. Cost: about 300 steps, each of a product and a factorisation
    of the smaller of n and d. Not for every step's log. Bounds hold up to rounding.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], which of them exist, None for all.

    Raises:
        ValueError: See `norms.composite_norm`.
    """
    x, mask = as_tokens(x, mask)
    struct.refuse_if(
        is_torch_array(x), "center='composite' is of NumPy and JAX: pass x.detach().cpu().numpy()"
    )
    if not is_numpy_array(x):
        return _of_each(x, mask)
    n = x.shape[-2]
    more = -n % max(8, 1 << max(n.bit_length() - 3, 0))
    there = np.ones(x.shape[:-1], bool) if mask is None else mask
    rows = [(0, 0)] * (x.ndim - 2) + [(0, more)]
    with jax.enable_x64(x.dtype == np.float64):
        found = _of_each(np.pad(x, [*rows, (0, 0)]), np.pad(there, rows))
        return jax.tree.map(np.asarray, found)


def _of_each(x, mask):
    """The certified center of each example."""
    return _certified_center(x, mask) if x.ndim == 2 else jax.vmap(_of_each)(x, mask)


@jax.jit
def _certified_center(x, mask):
    x = jax.lax.stop_gradient(x)
    keep = jnp.ones(x.shape[0], bool) if mask is None else mask
    start = center_of(x, mask, "median")
    shifted = jnp.where(keep[:, None], x - start[None, :], 0)
    scale = jnp.max(jnp.sum(jnp.abs(shifted), axis=1))
    scale = jnp.where(scale == 0, 1, scale)
    shifted = shifted / scale
    zero = 0 * (start == 0).astype(x.dtype)  # sharded as x is
    mean = (center_of(x, mask, "mean") - start) / scale
    product = [jnp.prod(jnp.stack(_both_norms(shifted, keep, c))) for c in (zero, mean)]
    begin = jnp.where(product[1] < product[0], mean, zero)
    tolerance = jnp.asarray(_TOLERANCE, x.dtype)

    least_inf, lower = _descend(shifted, keep, begin, jnp.inf, tolerance, follow=False)
    weights = jnp.asarray(_LOG_ODDS, x.dtype)
    found, _ = jax.vmap(lambda t: _descend(shifted, keep, begin, t, tolerance, follow=True))(
        weights
    )
    every = jnp.concatenate([jnp.stack([zero, mean, least_inf]), found])
    norm_1, norm_inf = jax.vmap(lambda c: _both_norms(shifted, keep, c))(every)
    best = jnp.argmin(norm_1 * norm_inf)
    return CompositeCenter(
        center=start + scale * every[best],
        value=scale * jnp.sqrt(norm_1[best] * norm_inf[best]),
        lower_bound=scale * jnp.sqrt(norm_1[0] * lower),
        norm_1_minimum=scale * norm_1[0],
        norm_inf_value=scale * jnp.min(norm_inf),
        norm_inf_lower=scale * lower,
    )


_LOG_ODDS = (-3.0, 0.0, 3.0)  # of G's weight at the start of a descent
_NUM_STEPS = 120
# Descents end where the smoothing and what the last steps gained, of the value, are below it.
_TOLERANCE = 1e-5
_SHRINK = {True: 0.75, False: 0.9}  # of the smoothing, by each step; slower for the bound
_PATIENCE = 16  # steps without gain that end a descent


def _both_norms(x, keep, center):
    size = jnp.where(keep[:, None], jnp.abs(x - center[None, :]), 0)
    return jnp.max(jnp.sum(size, axis=0)), jnp.max(jnp.sum(size, axis=1))


def _smoothed(x, keep, c, weights, sizes, sigma):
    """a F(c) + b G(c) with |u| as √(u² + μ²) and max as a log-sum-exp of width τ, u = c − x.

    x are tokens with columnwise medians at 0, where F is least; weights (a, b); sizes (F(0), G(0)),
    1 where they are 0, μ and τ are `sigma` times a share of them. Returns the value; softmax of the
    row sums, G's [n]; the gradient [d]; and the Hessian diag(D) + Σ_k c_k v_k v_kᵀ as D [d],
    c [n + 1] and v [n + 1, d].
    """
    (n, d), keep, u = x.shape, keep[:, None], c[None, :] - x

    def norm(axis, weight, size):
        mu, tau = sigma * size / (n, d)[axis], sigma * size / jnp.log((d, n)[axis] + 1.0)
        length = jnp.sqrt(jnp.square(u) + mu**2)
        logits = jnp.sum(jnp.where(keep, length, 0), axis=axis) / tau
        logits = logits if axis == 0 else jnp.where(keep[:, 0], logits, -jnp.inf)
        slope, curve = u / length, mu**2 / length**3
        value = weight * tau * jax.nn.logsumexp(logits)
        return value, jax.nn.softmax(logits), weight / tau, slope, curve

    of_f, share_f, steep_f, slope_f, curve_f = norm(0, weights[0], sizes[0])
    of_g, share_g, steep_g, slope_g, curve_g = norm(1, weights[1], sizes[1])
    slope_f, curve_f = (jnp.sum(jnp.where(keep, a, 0), axis=0) for a in (slope_f, curve_f))
    slope_g = jnp.where(keep, slope_g, 0)
    grad_f, grad_g = share_f * slope_f, share_g @ slope_g
    diagonal = share_f * (weights[0] * curve_f + steep_f * slope_f**2)
    diagonal = diagonal + weights[1] * (share_g @ curve_g)
    vectors = jnp.concatenate([slope_g - grad_g[None, :], grad_f[None]])
    gradient = weights[0] * grad_f + weights[1] * grad_g
    factors = jnp.append(steep_g * share_g, -steep_f)
    return of_f + of_g, share_g, (gradient, diagonal, factors, vectors)


def _newton_step(gradient, diagonal, sizes, vectors, damping):
    """(H + shift)⁻¹ ∇ of H = diag(D) + Σ_k c_k v_k v_kᵀ, NaN where it is not positive definite.

    With fewer features than tokens by a factorisation of H. With more by Woodbury's identity, of
    all terms but the last, the only negative one, so that there is a Cholesky factor; the last is
    taken off by the same identity.
    """
    shift = damping * jnp.max(diagonal + sizes @ jnp.square(vectors))
    own = diagonal + shift
    if gradient.shape[0] < vectors.shape[0]:
        hessian = jnp.diag(own) + vectors.T @ (sizes[:, None] * vectors)
        return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(hessian), gradient)
    scaled = jnp.sqrt(sizes[:-1])[:, None] * vectors[:-1]
    middle = jnp.eye(scaled.shape[0], dtype=own.dtype) + (scaled / own[None, :]) @ scaled.T
    factor = jax.scipy.linalg.cho_factor(middle)

    def solved(b):
        return (b - scaled.T @ jax.scipy.linalg.cho_solve(factor, scaled @ (b / own))) / own

    step, last = solved(gradient), solved(vectors[-1])
    rest = 1 + sizes[-1] * (vectors[-1] @ last)
    along = sizes[-1] * (vectors[-1] @ step) / jnp.where(rest > 0, rest, jnp.nan)
    return step - along * last


def _dual(x, order, p):
    """Σ_ij p_i |x_ij − weighted median_j|: a lower bound of min G for weights that sum to 1."""
    sums = jnp.cumsum(p[order], axis=0)
    index = jnp.argmax(sums >= sums[-1:] / 2, axis=0)
    rows = jnp.take_along_axis(order, index[None, :], axis=0)
    median = jnp.take_along_axis(x, rows, axis=0)
    return jnp.sum(p[:, None] * jnp.abs(x - median)) / jnp.sum(p)


def _descend(x, keep, start, log_odds, tolerance, *, follow):
    """A minimiser of F G with `follow`, else of the sum with weights fixed; a lower bound of min G.

    Damped Newton steps, the smoothing reduced on the way. The weights are those of log odds w/(1−w)
    for F/F(0) and G/G(0), and with `follow`, once the smoothing is small, 1/F and 1/G of the
    iterate.
    """
    d = x.shape[1]
    f0, g0 = (jnp.where(s == 0, 1, s) for s in _both_norms(x, keep, jnp.zeros(d, x.dtype)))
    w = jax.nn.sigmoid(jnp.asarray(log_odds, x.dtype))
    order = jnp.argsort(x, axis=0)

    def step(carry):
        k, c, damping, sigma, best, best_value, lower, idle = carry
        a, b = (1 - w) / f0, w / g0
        if follow:
            f_here, g_here = (jnp.where(s == 0, 1, s) for s in _both_norms(x, keep, c))
            late = sigma < 0.1
            a, b = jnp.where(late, 0.5 / f_here, a), jnp.where(late, 0.5 / g_here, b)
        smooth = partial(_smoothed, x, keep, weights=(a, b), sizes=(f0, g0), sigma=sigma)
        value, share, derivatives = smooth(c)
        trial = c - _newton_step(*derivatives, damping)
        better = smooth(trial)[0] <= value  # False where the factorisation failed
        c = jnp.where(better, trial, c)
        damping = jnp.clip(jnp.where(better, damping / 4, damping * 8), 1e-7, 1e3)
        f_exact, g_exact = _both_norms(x, keep, c)
        exact = f_exact * g_exact if follow else (1 - w) * f_exact / f0 + w * g_exact / g0
        gained = best_value - exact > 0.1 * tolerance * exact
        if not follow:
            raised = _dual(x, order, share)
            gained = gained | (raised - lower > 0.1 * tolerance * raised)
            lower = jnp.maximum(lower, raised)
        idle = jnp.where(gained | (sigma > tolerance), 0, idle + 1)
        smaller = jnp.maximum(_SHRINK[follow] * sigma, 0.5 * tolerance)
        sigma = jnp.where(better, smaller, sigma) if follow else smaller
        best = jnp.where(exact < best_value, c, best)
        return k + 1, c, damping, sigma, best, jnp.minimum(exact, best_value), lower, idle

    def goes_on(carry):
        k, *_, idle = carry
        return (k < _NUM_STEPS) & (idle < _PATIENCE)

    none = 0 * (x[0, 0] == 0)  # varies over devices as x does, inside shard_map
    one, start = 1 + none.astype(x.dtype), start + none.astype(x.dtype)
    carry = (none, start, 1e-3 * one, one, start, one * jnp.inf, 0 * one, none)
    _, _, _, _, best, _, lower, _ = jax.lax.while_loop(goes_on, step, carry)
    return best, lower
