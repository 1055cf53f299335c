"""Shapley values and covariance shares; next tokens from parts of an output: against numpy."""

from itertools import permutations

import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused


def average_over_orders(value, num_parts):
    """Computes the mean change when a part joins, over every order in which parts may join."""
    totals, orders = np.zeros(num_parts), list(permutations(range(num_parts)))
    for order in orders:
        present = np.zeros(num_parts)
        before = float(value(present))
        for part in order:
            present[part] = 1
            after = float(value(present))
            totals[part] += (after - before) / len(orders)
            before = after
    return totals


def test_shapley_values_are_means_over_all_orders(x64):
    parts = draws.normal(4, 6, 3)  # lengths 0 .. 3

    def value(present):  # neither additive nor symmetric
        z = jnp.tensordot(jnp.asarray(present), parts, 1)
        return jnp.mean(jnp.max(z, axis=-1) ** 2) + 3 * present[0] * present[2]

    shapley = rc.shapley_values(rc.paths.coalition_values(value, 4), 4)
    assert_close(shapley, average_over_orders(value, 4), rtol=1e-12)
    for dtype, wide in ((np.float32, np.float32), (np.int32, np.float64)):
        values = np.asarray([2, 7], dtype)
        assert_close(rc.shapley_values(values, 1), np.asarray([5], wide))
        assert rc.shapley_values(values, 1).dtype == wide
    everything, nothing = (value(f(4)) for f in (jnp.ones, jnp.zeros))
    assert float(shapley.sum()) == pytest.approx(float(everything - nothing), rel=1e-12)


def test_coalitions_are_numbered_by_their_bits():
    members = rc.paths.coalition_values(lambda present: present, 3)
    expected = [[i & 1, i >> 1 & 1, i >> 2] for i in range(8)]
    np.testing.assert_array_equal(members, expected)


def test_shapley_axioms_and_pytrees():
    """A part that changes nothing has 0, and equal parts have equal shares, of 1 and 7 parts."""

    def value(present):
        return {"a": present[0] * present[2] * 6, "b": jnp.stack([present.sum(), present[1]])}

    shapley = rc.shapley_values(rc.paths.coalition_values(value, 7), 7)
    assert_close(shapley["a"], [3, 0, 3, 0, 0, 0, 0], atol=1e-5)
    np.testing.assert_allclose(shapley["b"][:, 0], np.ones(7), rtol=1e-5)
    assert_close(shapley["b"][:, 1], np.eye(7)[1], atol=1e-5)
    assert_close(rc.shapley_values(jnp.array([2.0, 7.0]), 1), [5.0])
    for wrong in (0, 21):
        is_refused(f"num_parts={wrong}", rc.paths.coalition_values, lambda p: p.sum(), wrong)
    is_refused(
        r"for each of the 8 subsets",
        rc.shapley_values,
        jnp.zeros(4),
        3,
    )
    parts, mask = jnp.ones((2, 5, 3)), np.ones(1, bool)  # would be taken for all tokens
    is_refused(r"mask of shape \(1,\)", rc.paths.covariance_shares, parts, parts[0], mask)


def test_covariance_shares_of_tokens_that_exist(x64):
    parts = draws.normal(3, 4, 5, 2) + jnp.arange(3.0)[:, None, None, None]
    mask = jnp.arange(5)[None, :] < jnp.array([5, 3, 4, 2])[:, None]
    total = parts.sum(axis=0)
    shares = rc.paths.covariance_shares(parts, total, mask)
    keep = np.asarray(mask).ravel()
    z = np.asarray(total).reshape(-1, 2)[keep]
    expected = [
        sum(np.cov(p[:, c], z[:, c])[0, 1] for c in range(2)) / z.var(axis=0, ddof=1).sum()
        for p in np.asarray(parts).reshape(3, -1, 2)[:, keep]
    ]
    assert_close(shares, expected, rtol=1e-12)
    assert float(shares.sum()) == pytest.approx(1, rel=1e-12)
    cancelling = jnp.stack([3 * total, -2 * total])
    assert_close(rc.paths.covariance_shares(cancelling, total), [3, -2], rtol=1e-12)
