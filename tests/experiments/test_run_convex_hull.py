"""Examples of run_convex_hull: hulls against exact arithmetic."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial import ConvexHull

from experiments import run_convex_hull as convex_hull
from tests.support.closeness import assert_close
from tests.support.on_host import on_host
from tests.support.runs import parsed


def rational_hull(points) -> np.ndarray:
    """Labels points on the boundary, in rational arithmetic: all points on one side of a line."""
    points = [(Fraction(float(x)), Fraction(float(y))) for x, y in points]

    def cross(p, q, r):
        return (q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0])

    return np.array(
        [
            all(r == p for r in points)
            or any(q != p and all(cross(p, q, r) >= 0 for r in points) for q in points)
            for p in points
        ],
        int,
    )


hull = jax.jit(jax.vmap(convex_hull.hull_labels))


def test_hull_with_ties_lines_and_repeats_is_exact():
    points = np.random.default_rng(1).integers(0, 4, (150, 9, 2))
    expected = np.array([rational_hull(x) for x in points])
    np.testing.assert_array_equal(hull(jnp.asarray(points)), expected)


@pytest.mark.parametrize(
    "points", [[[1, 1]] * 4, [[0, 0], [1, 1], [2, 2], [1, 1]], [[0, 0], [3, 1]]]
)
def test_degenerate_hulls_hold_all_their_points(points):
    assert hull(np.array([points])).tolist() == [[1] * len(points)]


def test_hull_examples_are_labelled_before_the_shift_and_fill_the_square():
    data = on_host(convex_hull.make_examples)(jax.random.key(0), 300, 10)
    assert data.inputs.shape == (300, 10, 2) and data.labels.shape == (300, 10)
    extent = np.ptp(np.asarray(data.inputs), axis=1)
    assert 8 < extent.mean() < 9 and extent.max() <= 10.0001  # E = 10 · 9/11
    scipy_labels = np.zeros((300, 10), int)
    for row, x in zip(scipy_labels, np.asarray(data.inputs, float), strict=True):
        row[ConvexHull(x).vertices] = 1
    assert (np.asarray(data.labels) == scipy_labels).mean() > 0.999
    assert 2.5 < np.asarray(data.inputs).mean(axis=1).std() < 4.5  # the shift of 3.3
    key_points, key_shift = jax.random.split(jax.random.key(0))
    places = on_host(jax.random.randint)(
        key_points, (300, 10, 2), 0, 2**14 + 1
    )  # ends belong to it
    shift = 3.3 * np.asarray(on_host(jax.random.normal)(key_shift, (300, 1, 2)))
    assert_close(data.inputs, 10.0 * places / 2**14 + shift, atol=1e-5)


def test_a_point_is_on_the_hull_or_not():
    with pytest.raises(ValueError, match="num_labels=3 is not 2"):
        convex_hull.make_task(parsed(convex_hull, "--num_labels=3"))
    with pytest.raises(ValueError, match="path_len=3 is larger than depth=2"):
        convex_hull.make_task(parsed(convex_hull, "--depth=2", "--path_len=3"))
    task = convex_hull.make_task(parsed(convex_hull, "--num_tokens=4", "--noffn2"))
    assert task.title == "Convex hull of 4 points" and not task.recipe.config.embedding.hidden_layer
