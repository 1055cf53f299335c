"""Two points that walk along the two halves of a circle, and the network's own continuation.

Each example is a sequence of two tokens, the current points of the two walkers; the targets are
their next points. Applied to its own output again and again, pure attention lets the two points
fall together.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.training.tasks.examples import Examples

RADIUS = 0.3


def circle_points(num_points: int, radius: float = RADIUS) -> Float[Array, "p 2"]:
    """Points at equal angles, anticlockwise from (radius, 0)."""
    angle = 2 * jnp.pi * jnp.arange(num_points) / num_points
    return radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def make_examples(num_points: int, radius: float = RADIUS) -> Examples:
    """(points t of both halves → points t + 1), t = 0 .. num_points/2 − 2.

    Args:
        num_points: Points on the whole circle; at least 4.
        radius: Its radius.

    Source: Dong et al. 2021, section 4.3.
    """
    half = num_points // 2
    if half < 2:
        raise ValueError(f"num_points={num_points} leaves no step on either half of the circle")
    points = circle_points(num_points, radius)
    # The published code starts the second walker one point early, which keeps both in their half.
    steps = half - 1
    first, second = points[:half], points[steps : steps + half]
    walk = jnp.stack([first, second], axis=1)
    return Examples(inputs=walk[:-1], labels=walk[1:])


def roll_out(
    step: Callable[[Float[Array, "n 2"]], Float[Array, "n 2"]],
    start: Float[Array, "n 2"],
    num_steps: int,
    skip: bool = False,
) -> Float[Array, "t n 2"]:
    """The trajectory [num_steps, n, 2] of a network fed with its own output, start included.

    Args:
        step: The network, from points to points.
        start: The first points.
        num_steps: Points of each trajectory.
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
