"""Shapley values against all orders, and covariance shares against numpy."""

from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc


def over_orders(value, num_parts):
    """The mean change when a part joins, over every order in which the parts may join."""
    found, orders = np.zeros(num_parts), list(permutations(range(num_parts)))
    for order in orders:
        present = np.zeros(num_parts)
        before = float(value(present))
        for part in order:
            present[part] = 1
            after = float(value(present))
            found[part] += (after - before) / len(orders)
            before = after
    return found


def test_shapley_values_are_means_over_all_orders(x64):
    parts = jax.random.normal(jax.random.key(0), (4, 6, 3))  # lengths 0 .. 3

    def value(present):  # neither additive nor symmetric
        z = jnp.tensordot(jnp.asarray(present), parts, 1)
        return jnp.mean(jnp.max(z, axis=-1) ** 2) + 3 * present[0] * present[2]

    found = rc.shapley_values(rc.coalition_values(value, 4), 4)
    np.testing.assert_allclose(found, over_orders(value, 4), rtol=1e-12)
    everything, nothing = (value(f(4)) for f in (jnp.ones, jnp.zeros))
    assert float(found.sum()) == pytest.approx(float(everything - nothing), rel=1e-12)


def test_shapley_axioms_and_pytrees():
    """A part that changes nothing has 0, parts that are alike share alike, sizes of 1 and 7."""

    def value(present):
        return {"a": present[0] * present[2] * 6, "b": jnp.stack([present.sum(), present[1]])}

    found = rc.shapley_values(rc.coalition_values(value, 7), 7)
    np.testing.assert_allclose(found["a"], [3, 0, 3, 0, 0, 0, 0], atol=1e-5)
    np.testing.assert_allclose(found["b"][:, 0], np.ones(7), rtol=1e-5)
    np.testing.assert_allclose(found["b"][:, 1], np.eye(7)[1], atol=1e-5)
    np.testing.assert_allclose(rc.shapley_values(jnp.array([2.0, 7.0]), 1), [5.0])
    for wrong in (0, 21):
        with pytest.raises(ValueError, match=f"num_parts={wrong}"):
            rc.coalition_values(lambda p: p.sum(), wrong)
    with pytest.raises(ValueError, match=r"shape \(4,\) are not of the 8"):
        rc.shapley_values(jnp.zeros(4), 3)


def test_covariance_shares_of_tokens_that_exist(x64):
    parts = (
        jax.random.normal(jax.random.key(1), (3, 4, 5, 2)) + jnp.arange(3.0)[:, None, None, None]
    )
    mask = jnp.arange(5)[None, :] < jnp.array([5, 3, 4, 2])[:, None]
    total = parts.sum(axis=0)
    found = rc.covariance_shares(parts, total, mask)
    keep = np.asarray(mask).ravel()
    z = np.asarray(total).reshape(-1, 2)[keep]
    wanted = [
        sum(np.cov(p[:, c], z[:, c])[0, 1] for c in range(2)) / z.var(axis=0, ddof=1).sum()
        for p in np.asarray(parts).reshape(3, -1, 2)[:, keep]
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert float(found.sum()) == pytest.approx(1, rel=1e-12)
    cancelling = jnp.stack([3 * total, -2 * total])
    np.testing.assert_allclose(rc.covariance_shares(cancelling, total), [3, -2], rtol=1e-12)
