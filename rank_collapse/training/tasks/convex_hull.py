"""Which points lie on the hull: points in the plane, each labelled 1 if it is on the boundary.

A point on an edge between two corners counts as on the hull, and so does every copy of a repeated
point: the label is a property of the place, and does not depend on the order of the points.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rank_collapse.training.tasks.examples import Examples

SIDE = 10.0  # of the square the points are drawn from
SHIFT = 3.3  # standard deviation of the shift shared by an example's points
CELLS = 2**14  # of the grid per side: differences and their cross products fit an int32


def hull_labels(points: Int[Array, "n 2"] | Float[Array, "n 2"]) -> Int[Array, "n"]:
    """1 for points on the boundary of the convex hull (edges included), else 0. Exact.

    p is on the boundary iff all points lie on one side of a line through p and another point q:
    min_r (q − p) × (r − p) ≥ 0 for some q ≠ p, or all points are p. Integers may differ by at most
    2¹⁵ − 1 in a coordinate; the sign of a float32 cross product is taken from its exact expansion
    (Shewchuk 1997), short of overflow and underflow.

    Args:
        points: Coordinates; all integer or all floating point.
    """
    if jnp.issubdtype(points.dtype, jnp.integer):
        points = points.astype(jnp.int32)
        sign = _integer_orientation
    else:
        sign = _float_orientation
    p, q, r = points[:, None, None, :], points[None, :, None, :], points[None, None, :, :]
    p, q, r = jnp.broadcast_arrays(p, q, r)
    one_side = jnp.all(sign(p, q, r) >= 0, axis=2)
    same = jnp.all(points[:, None, :] == points[None, :, :], axis=-1)
    on_boundary = jnp.any(one_side & ~same, axis=1) | jnp.all(same, axis=1)
    return on_boundary.astype(jnp.int32)


def make_examples(key: Any, num_examples: int, num_points: int) -> Examples:
    """Points uniform on [0, 10]², shifted together by N(0, 3.3²), with their hull labels.

    The points lie on a grid of 2¹⁴ cells a side, on which the labels are exact integers' ones;
    ties and points in a line occur, rarely.

    Args:
        key: Random key.
        num_examples: Point sets.
        num_points: Points in each.

    Source: Dong et al. 2021, section 4.2.
    """
    key_points, key_shift = jax.random.split(key)
    shape = (num_examples, num_points, 2)
    grid = jax.random.randint(key_points, shape, 0, CELLS + 1)
    shift = SHIFT * jax.random.normal(key_shift, (num_examples, 1, 2))
    labels = jax.lax.map(hull_labels, grid, batch_size=min(num_examples, 256))
    return Examples(inputs=grid * (SIDE / CELLS) + shift, labels=labels)


def _integer_orientation(p, q, r):
    a, b = q - p, r - p
    return jnp.sign(a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0])


def _float_orientation(p, q, r):
    """Sign of (q − p) × (r − p), exactly: a sum of 16 products' parts as an expansion."""
    (ax, ay), (bx, by) = ([_two_sum(u[..., i], -p[..., i]) for i in range(2)] for u in (q, r))
    terms = [t for u in ax for v in by for t in _two_product(u, v)]
    terms += [t for u in ay for v in bx for t in _two_product(-u, v)]
    # Grow an expansion one term at a time; its largest part that is not zero has its sign.
    expansion = []
    for term in terms:
        grown = []
        for part in expansion:
            term, error = _two_sum(term, part)
            grown.append(error)
        expansion = [*grown, term]
    sign = jnp.zeros_like(terms[0])
    for part in expansion:
        sign = jnp.where(part != 0, jnp.sign(part), sign)
    return sign


def _two_sum(a, b):
    """(s, e) with s = fl(a + b) and s + e = a + b (Knuth)."""
    s = a + b
    other = s - a
    return s, (a - (s - other)) + (b - other)


def _two_product(a, b):
    """(p, e) with p = fl(a b) and p + e = a b (Dekker)."""
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    p = a * b
    error = a_low * b_low - (((p - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return p, error


def _split(a):
    """a as a sum of two numbers of half its precision (Veltkamp)."""
    bits = jnp.finfo(a.dtype).nmant + 1
    c = a * (2.0 ** ((bits + 1) // 2) + 1)
    high = c - (c - a)
    return high, a - high
