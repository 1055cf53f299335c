"""Largest weights and saturated rows against closed forms and plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.measures import largest_weight, saturated_share


def test_closed_forms():
    uniform, one_hot = np.full((3, 5), 0.2), np.eye(3, 5)
    both = np.stack([uniform, one_hot])
    np.testing.assert_allclose(largest_weight(both), [0.2, 1])
    np.testing.assert_array_equal(saturated_share(both), [0, 1])
    rows, mask = np.concatenate([uniform, one_hot]), [1, 1, 1, 1, 0, 0]
    assert float(largest_weight(rows, mask=mask)) == pytest.approx(0.4)
    assert float(saturated_share(rows, mask=mask)) == 0.25


def test_any_leading_axes_against_loops():
    p = np.random.default_rng(0).dirichlet(0.1 * np.ones(6), (2, 3, 4))
    found = np.asarray(saturated_share(p, 0.7))
    largest = np.asarray(largest_weight(p))
    counts = np.zeros((2, 3))
    for i in range(2):
        for j in range(3):
            tops = [max(row) for row in p[i, j]]
            assert largest[i, j] == pytest.approx(sum(tops) / 4, rel=1e-12)
            counts[i, j] = sum(top > 0.7 for top in tops) / 4
    np.testing.assert_array_equal(found, counts)
    assert 0 < counts.mean() < 1
    swept = jax.vmap(lambda t: saturated_share(jnp.asarray(p), t))(jnp.array([0.7, 1.0]))
    np.testing.assert_array_equal(swept, [counts, 0 * counts])


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"shape \(5,\) is not"):
        largest_weight(np.ones(5))
    with pytest.raises(ValueError, match=r"mask of shape \(2,\) does not fit 3 queries"):
        saturated_share(np.eye(3), mask=[True, False])
