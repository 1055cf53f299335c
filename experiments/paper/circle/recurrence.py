"""A network fed with its own output: whether its tokens fall together, how fast, by which law.

With all tokens equal to x, the Jacobian of a step F that treats tokens alike splits into what moves
them together and J_diff(x) = ∂y_1/∂x_1 − ∂y_1/∂x_2, what becomes of their differences. Its spectral
radius μ is the multiplier across the diagonal: d_{t+1} → μ d_t, so that equal tokens attract where
μ < 1. Pure attention has μ = 0 and a cubic law, d_{t+1} ~ c d_t³; a skip makes μ > 0. Whether two
tokens get near enough to fall is another question, of the basin, and no multiplier answers it.

Axis letters: n tokens, i width of a token, t steps, s seeds.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.network import covers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.residual import lone_norm
from rank_collapse.network.transformer import walk_network
from rank_collapse.theory import log_operations as ops
from rank_collapse.theory.logdomain import LogScaled

Step = Callable[[Any], Any]  # [n, i] → [n, i]

# Networks that treat tokens alike.
COVERS = covers.Covers(
    "a recurrence",
    covers.SIZES | covers.STREAM | covers.PARALLEL | covers.SCORES | covers.MLPS,
    also=LogScaled.covers.also,
)


def transverse_jacobian(
    step: Step, point: Float[Array, "i"], num_tokens: int = 2
) -> Float[Array, "i i"]:
    """J_diff = ∂y_1/∂x_1 − ∂y_1/∂x_2 of a step where all tokens are `point`.

    Exact for steps that treat tokens alike (no positions, no mask in which they differ): then it
    acts on every difference of two tokens.

    Args:
        point: What all tokens are.
        num_tokens: At least 2.
    """
    tokens = jnp.tile(point, (num_tokens, 1))
    with jax.default_matmul_precision("highest"):
        jacobian = jax.jacfwd(step)(tokens)  # [n, i, n, i]
    return jacobian[0, :, 0] - jacobian[0, :, 1]


def jacobian_matrix(step: Step, tokens: Float[Array, "n i"]) -> Float[Array, "ni ni"]:
    """The whole Jacobian of a step at any tokens, as a square matrix."""
    with jax.default_matmul_precision("highest"):
        jacobian = jax.jacfwd(step)(tokens)
    return jacobian.reshape(tokens.size, tokens.size)


def spectral_radius(matrix: Any) -> np.ndarray:
    """Largest |eigenvalue| of square matrices [..., k, k], on the host; NaN where not finite."""
    matrix = np.asarray(matrix, np.float64)
    finite = np.isfinite(matrix).all(axis=(-2, -1))
    eigenvalues = np.linalg.eigvals(np.where(finite[..., None, None], matrix, 0))
    return np.where(finite, np.abs(eigenvalues).max(axis=-1), np.nan)


def equal_tokens(
    step: Step, point: Float[Array, "i"], num_steps: int
) -> tuple[Float[Array, "i"], Float[Array, ""]]:
    """(the point that equal tokens reach, the length of the last step: 0 at a fixed point)."""

    def advance(point, _):
        # The mean: rounding must not make tokens differ.
        after = jnp.mean(step(jnp.tile(point, (2, 1))), axis=0)
        return after, jnp.linalg.norm(after - point)

    point, moved = jax.lax.scan(advance, point, None, length=num_steps)
    return point, moved[-1]


def predicted_steps(multiplier: Any, high: float = 1e-2, low: float = 1e-6) -> np.ndarray:
    """ln(low/high)/ln μ steps from a distance `high` to `low`; inf where μ ≥ 1, 0 where μ = 0."""
    mu = np.asarray(multiplier, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.log(low / high) / np.log(mu)
    return np.where(mu >= 1, np.inf, steps)


def measured_steps(distance: Any, high: float = 1e-2, low: float = 1e-6) -> np.ndarray:
    """Steps from the first distance [..., t] below `high` to the first below `low`, else NaN."""
    distance = np.asarray(distance)
    steps = np.argmax(distance < low, axis=-1) - np.argmax(distance < high, axis=-1)
    return np.where((distance < low).any(axis=-1), steps.astype(float), np.nan)


def fall_order(log10_distance: Any) -> np.ndarray:
    """The order p of the law d_{t+1} ~ c d_t^p: least squares in logarithms.

    Over the first 12 steps that begin and end below 1e-6, where two walkers at d feel terms of the
    next order d²; NaN with fewer than three.

    Args:
        log10_distance: Logarithms by step [..., t], such as `log_roll_out`'s.
    """
    logs = np.asarray(log10_distance, np.float64)

    def one(row):
        x, y = row[:-1], row[1:]
        fits = np.flatnonzero(np.isfinite(x) & np.isfinite(y) & (x < -6) & (y < -6))[:12]
        if len(fits) < 3 or np.ptp(x[fits]) == 0:
            return np.nan
        return np.polyfit(x[fits], y[fits], 1)[0]

    return np.apply_along_axis(one, -1, logs)


def log_roll_out(
    params: Any,
    classifier: tuple[Any, Any],
    start: Float[Array, "2 i"],
    config: TransformerConfig,
    num_steps: int,
    *,
    skip: bool = False,
) -> Float[Array, "t"]:
    """log10 of the distance of two tokens by step, however small.

    Each step is classifier(network(embedding(tokens))), carried as 1x̄ᵀ + e^s R̂ (see
    `log_residual_profile`), where ordinary arithmetic stops at the last digit of the coordinates.

    Args:
        params: As in `apply`.
        classifier: Weights [d, i] and bias [i].
        start: The first two tokens.
        config: The network: vectors through one linear map and a LayerNorm, no mask, no positions.
        num_steps: Distances returned, that of the start included.
        skip: As in `training.tasks.circle.roll_out`: the step's input is added to its output to
            give the next input; distances are those of outputs.

    Raises:
        ValueError: An embedding of another kind, or a network in which tokens differ: with a mask,
            windows or positions.
    """
    made = config.embedding
    plain = made is not None and made.d_input and made.norm and made.positions == "none"
    if not plain or made.hidden_layer or made.class_token or made.projection != "none":
        raise ValueError(f"embedding={made} is not a linear map of vectors with a norm")
    COVERS.check(config)
    start = jnp.asarray(start, jnp.result_type(start, *jax.tree.leaves((params, classifier))))
    (params, prepared), keep = prepare_inputs(params, start, config), jnp.ones(2, bool)
    algebra = LogScaled(keep)
    first_norm = lone_norm(params.embedding.norm, "layer", made.norm_eps)

    def linear(state, w, b):
        return ops.renormalise(
            state.mean @ w + b, (state.rest @ w)[None], state.log_scale[None], keep
        )

    def network(state):
        state = linear(state, params.embedding.w_in, params.embedding.b_in)
        state = ops.norm(first_norm, state, keep)
        return linear(walk_network(algebra, state, params, prepared, config), *classifier)

    def advance(state, _):
        out = network(state)
        after = out
        if skip:
            parts = jnp.stack([out.rest, state.rest])
            scales = jnp.stack([out.log_scale, state.log_scale])
            after = ops.renormalise(out.mean + state.mean, parts, scales, keep)
        return after, _log10_distance(out)

    with jax.default_matmul_precision("highest"):
        begin = ops.around_mean(start, keep)
        _, later = jax.lax.scan(advance, begin, None, length=num_steps - 1)
    return jnp.concatenate([_log10_distance(begin)[None], later])


def _log10_distance(state):
    apart = jnp.linalg.norm(state.rest[0] - state.rest[1])
    return (state.log_scale + jnp.log(apart)) / math.log(10)
