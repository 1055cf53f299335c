"""Two points that walk along the two halves of a circle, and the network's own continuation.

Each example is a sequence of two tokens, the current points of the two walkers; the targets are
their next points. Applied to its own output again and again, a network may let the two points fall
together: `experiments.paper.circle.recurrence` says how fast.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.training.tasks.examples import Examples

RADIUS = 0.3


def make_examples(num_points: int, radius: float = RADIUS) -> Examples:
    """(points t of both halves → points t + 1), t = 0 .. num_points/2 − 2, anticlockwise.

    Source: Dong et al. 2021, section 4.3.
    """
    half = num_points // 2
    if half < 2:
        raise ValueError(f"num_points={num_points} leaves no step on either half of the circle")
    angle = 2 * jnp.pi * jnp.arange(num_points) / num_points
    points = radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    # The published code starts the second walker one point early, which keeps both in their half.
    steps = half - 1
    first, second = points[:half], points[steps : steps + half]
    walk = jnp.stack([first, second], axis=1)
    return Examples(inputs=walk[:-1], labels=walk[1:])


def with_batch_before(examples: Examples, batch_size: int) -> Examples:
    """Inputs X_b + X_{b−1} of each batch b, zeros before the first; labels as they are.

    What the published code's circle_skip is trained on: a skip around the recurrence, of the true
    points in place of its own output.
    """
    x = examples.inputs
    before = jnp.concatenate([jnp.zeros_like(x[:batch_size]), x])[: len(x)]
    return examples.replace(inputs=x + before)


def roll_out(
    step: Callable[[Float[Array, "n 2"]], Float[Array, "n 2"]],
    start: Float[Array, "n 2"],
    num_steps: int,
    skip: bool = False,
) -> Float[Array, "t n 2"]:
    """The trajectory [num_steps, n, 2] of a network fed with its own output, start included.

    Args:
        skip: Feed the network the sum of its input and its output (a skip connection around the
            recurrence) and record its outputs, as the published code's circle_skip does.
    """

    def advance(state: Any, _: Any):
        out = step(state)
        return (state + out if skip else out), out

    _, later = jax.lax.scan(advance, start, None, length=num_steps - 1)
    return jnp.concatenate([start[None], later])


def distance(trajectory: Float[Array, "t 2 2"]) -> Float[Array, "t"]:
    """Distance between the two points at each step."""
    return jnp.linalg.norm(trajectory[:, 0] - trajectory[:, 1], axis=-1)


def head_gap(attention: Float[Array, "*s 2 2"]) -> Float[Array, "*s"]:
    """τ = P_11 − P_21 of attention weights: how much more than the other a walker sees the first.

    The difference of two tokens, δ, leaves attention as Σ_h τ_h δ W_h.
    """
    return attention[..., 0, 0] - attention[..., 1, 0]
