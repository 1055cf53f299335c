"""A network fed with its own output: whether its tokens meet, how fast, and by which law.

With all tokens equal to x, the Jacobian of a step F that treats tokens alike has two parts: one
moves the tokens together, and J_diff(x) = ∂y_1/∂x_1 − ∂y_1/∂x_2 maps their differences. Its
spectral radius μ is the multiplier across the diagonal: d_{t+1} → μ d_t, so equal tokens attract if
μ < 1. Pure attention has μ = 0 and a cubic law, d_{t+1} ~ c d_t³; a skip makes μ > 0. Whether two
tokens get close enough to collapse is another question, about the basin, and no multiplier answers
it.

Axis letters: n tokens, i width of a token, t steps, s seeds.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import lone_norm
from rank_collapse.network.walk import walk_network
from rank_collapse.paths.sets import Classifier
from rank_collapse.theory import log_operations as ops
from rank_collapse.theory.logdomain import LogScaled

Step = Callable[[Array], Array]  # [n, i] → [n, i]


def transverse_jacobian(step: Step, point: Float[Array, "i"]) -> Float[Array, "i i"]:
    """Computes J_diff = ∂y_1/∂x_1 − ∂y_1/∂x_2 of a step where both tokens are `point`.

    Exact for steps that treat tokens alike (no positions, no mask that differs between them); it
    then acts on every difference of two tokens.
    """
    with jax.default_matmul_precision("highest"):
        jacobian = jax.jacfwd(step)(jnp.tile(point, (2, 1)))  # [n, i, n, i]
    return jacobian[0, :, 0] - jacobian[0, :, 1]


def spectral_radius(matrix: ArrayLike) -> np.ndarray:
    """Computes the largest |eigenvalue| of matrices [..., k, k], on the host; NaN if not finite."""
    matrix = np.asarray(matrix, np.float64)
    is_finite = np.isfinite(matrix).all(axis=(-2, -1))
    eigenvalues = np.linalg.eigvals(np.where(is_finite[..., None, None], matrix, 0))
    return np.where(is_finite, np.abs(eigenvalues).max(axis=-1), np.nan)


def equal_tokens(
    step: Step, point: Float[Array, "i"], num_steps: int
) -> tuple[Float[Array, "i"], Float[Array, ""]]:
    """Iterates a step on two equal tokens.

    Args:
        step: [2, i] → [2, i].
        point: Point at which both tokens begin.
        num_steps: Steps.

    Returns:
        The point that they reach, and the length of the last step: 0 at a fixed point.
    """

    def advance(point, _):
        # The mean: rounding must not make tokens differ.
        new_point = jnp.mean(step(jnp.tile(point, (2, 1))), axis=0)
        return new_point, jnp.linalg.norm(new_point - point)

    point, step_lengths = jax.lax.scan(advance, point, None, length=num_steps)
    return point, step_lengths[-1]


def predicted_steps(multiplier: ArrayLike, high: float = 1e-2, low: float = 1e-6) -> np.ndarray:
    """Predicts ln(low/high)/ln μ steps from a distance `high` to `low`; inf where μ ≥ 1."""
    mu = np.asarray(multiplier, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.log(low / high) / np.log(mu)
    return np.where(mu >= 1, np.inf, steps)


def measured_steps(distance: ArrayLike, high: float = 1e-2, low: float = 1e-6) -> np.ndarray:
    """Counts steps from the first distance [..., t] below `high` to the first below `low`."""
    distance = np.asarray(distance)
    steps = np.argmax(distance < low, axis=-1) - np.argmax(distance < high, axis=-1)
    return np.where((distance < low).any(axis=-1), steps.astype(float), np.nan)


def fall_order(log10_distance: ArrayLike) -> np.ndarray:
    """Fits the order p of the law d_{t+1} ~ c d_t^p: least squares in logarithms.

    Over the first 12 steps that begin and end below 1e-6, where two walkers at d feel terms of the
    next order d²; NaN with fewer than three.

    Args:
        log10_distance: Logarithms by step [..., t], such as `log_roll_out`'s.
    """
    logs = np.asarray(log10_distance, np.float64)

    def fit_row(row):
        """Fits the order of one seed."""
        x, y = row[:-1], row[1:]
        steps = np.flatnonzero(np.isfinite(x) & np.isfinite(y) & (x < -6) & (y < -6))[:12]
        if len(steps) < 3 or np.ptp(x[steps]) == 0:
            return np.nan
        return np.polyfit(x[steps], y[steps], 1)[0]

    return np.apply_along_axis(fit_row, -1, logs)


def log_roll_out(
    params: TransformerParams,
    classifier: Classifier,
    start: Float[Array, "2 i"],
    config: TransformerConfig,
    num_steps: int,
    *,
    skip: bool = False,
) -> Float[Array, "t"]:
    """Computes log10 of the distance of two tokens by step, however small.

    Each step is classifier(network(embedding(tokens))), carried as 1x̄ᵀ + e^s R̂ (see
    `log_residual_profile`), where ordinary arithmetic stops at the last digit of the coordinates.

    Args:
        params: Parameters, as in `apply`.
        classifier: Weights [d, i] and bias [i].
        start: The first two tokens.
        config: The network: vectors through one linear map and a LayerNorm, no mask, no positions.
        num_steps: Number of distances to return, including the start.
        skip: See `walks.roll_out`: the step's input is added to its output to give the next input;
            distances are measured between outputs.
    """
    start = jnp.asarray(start, jnp.result_type(start, *jax.tree.leaves((params, classifier))))
    params, prepared = prepare_inputs(params, start, config)
    token_mask = jnp.ones(2, bool)
    algebra = LogScaled(token_mask)
    first_norm = lone_norm(params.embedding.norm, "layer", config.embedding.norm_eps)

    def apply_linear(state, w, b):
        """Applies x ↦ x w + b to tokens that are kept as a mean and a residual with the logarithm
        of its scale."""
        residual = (state.residual @ w)[None]
        return ops.renormalise_parts(
            state.mean @ w + b, residual, state.log_scale[None], token_mask
        )

    def apply_network(state):
        state = apply_linear(state, params.embedding.w_in, params.embedding.b_in)
        state = ops.apply_norm(first_norm, state, token_mask)
        return apply_linear(walk_network(algebra, state, params, prepared, config), *classifier)

    def advance(state, _):
        """Makes one step of the recurrence, with the skip around it if there is one.

        Returns:
            (the next input, log10 of the distance of the walkers in the output).
        """
        output = apply_network(state)
        next_input = output
        if skip:
            residuals = jnp.stack([output.residual, state.residual])
            scales = jnp.stack([output.log_scale, state.log_scale])
            next_input = ops.renormalise_parts(
                output.mean + state.mean, residuals, scales, token_mask
            )
        return next_input, _log10_distance(output)

    with jax.default_matmul_precision("highest"):
        state = ops.around_mean(start, token_mask)
        _, distances = jax.lax.scan(advance, state, None, length=num_steps - 1)
    return jnp.concatenate([_log10_distance(state)[None], distances])


def _log10_distance(state):
    distance = jnp.linalg.norm(state.residual[0] - state.residual[1])
    return (state.log_scale + jnp.log(distance)) / math.log(10)
