"""Which points lie on the hull: points in the plane, each labelled 1 if it is on the boundary.

A point on an edge between two corners counts as on the hull, and so does every copy of a repeated
point: the label is a property of the place, and does not depend on the order of the points.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rank_collapse.training.tasks.examples import Examples

SIDE = 10.0  # of the square the points are drawn from
SHIFT = 3.3  # standard deviation of the shift shared by an example's points
CELLS = 2**14  # of the grid per side: differences and their cross products fit an int32


def hull_labels(points: Int[Array, "n 2"]) -> Int[Array, "n"]:
    """1 for points on the boundary of the convex hull (edges included), else 0. Exact.

    p is on the boundary iff all points lie on one side of a line through p and another point q:
    min_r (q − p) × (r − p) ≥ 0 for some q ≠ p, or all points are p. Coordinates may differ by at
    most 2¹⁵ − 1.
    """
    p, q, r = points[:, None, None, :], points[None, :, None, :], points[None, None, :, :]
    a, b = q - p, r - p
    one_side = jnp.all(a[..., 0] * b[..., 1] >= a[..., 1] * b[..., 0], axis=2)
    same = jnp.all(points[:, None, :] == points[None, :, :], axis=-1)
    on_boundary = jnp.any(one_side & ~same, axis=1) | jnp.all(same, axis=1)
    return on_boundary.astype(jnp.int32)


def make_examples(key: Any, num_examples: int, num_points: int) -> Examples:
    """Points uniform on [0, 10]², shifted together by N(0, 3.3²), with their hull labels.

    The points lie on a grid of 2¹⁴ cells a side, on which the labels are exact integers' ones;
    ties and points in a line occur, rarely.

    Source: Dong et al. 2021, section 4.2.
    """
    key_points, key_shift = jax.random.split(key)
    shape = (num_examples, num_points, 2)
    grid = jax.random.randint(key_points, shape, 0, CELLS + 1)
    shift = SHIFT * jax.random.normal(key_shift, (num_examples, 1, 2))
    labels = jax.lax.map(hull_labels, grid, batch_size=min(num_examples, 256))
    return Examples(inputs=grid * (SIDE / CELLS) + shift, labels=labels)
