"""The share of a branch in the output, by hand."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments.stability import dependency
from rank_collapse.network.residual import lone_norm
from tests.oracles.updated_networks import FIELDS, make_network


@pytest.mark.parametrize("fields", FIELDS)
def test_shares_by_hand(fields, x64):
    params, x, config = make_network(fields)
    trace = rc.apply(params, x, config)
    shares = dependency.branch_shares(params, trace, config)
    assert shares.shape == (6,)
    # the second layer's MLP, from the trace
    part, before = trace.mlp_branch[1], trace.layers.after_attention[1]
    if config.norm_placement == "sandwich":
        part = part - part.mean(axis=1, keepdims=True)
        part = part / jnp.sqrt(jnp.mean(part**2, axis=1, keepdims=True))
        norm = params.layers.mlp_branch_norm
        part = part * norm.gain[1][None] + norm.bias[1][None]
    skip, branch = (np.var(a, axis=1).mean() for a in (before, part))
    skip, branch = config.skip_gain**2 * skip, config.branch_gain**2 * branch
    np.testing.assert_allclose(shares[3], branch / (skip + branch), rtol=1e-6)


def test_a_branch_without_a_skip_has_all_of_its_sum_and_one_that_does_not_vary_has_nothing():
    spec = lone_norm(None, "layer", 0.01)
    spec = spec.replace(placement="none", skip_gain=jnp.array(2.0), branch_gain=jnp.array(0.5))
    state = np.random.default_rng(0).normal(size=(3, 4))
    for skip, branch, expected in (
        (True, 3 * state, 1.5**2 / (1.5**2 + 2**2)),
        (True, 0 * state, 0.0),
        (False, 3 * state, 1.0),
        (False, 0 * state + 7, 0.0),
    ):
        passage = SimpleNamespace(
            spec=spec.replace(skip=skip),
            state=jnp.asarray(state),
            branch_output=jnp.asarray(branch),
        )
        np.testing.assert_allclose(dependency._branch_share(passage), expected, rtol=1e-5)


def test_dependency_of_known_shares():
    i = np.arange(1, 9)
    post, spread = dependency.dependency(np.full(8, 0.5)), dependency.dependency(1 / (i + 1))
    np.testing.assert_allclose(post[-1], 0.5 ** np.array([8, *range(8, 0, -1)]), rtol=1e-6)
    np.testing.assert_allclose(spread, np.tril(np.ones((9, 9))) / np.arange(1, 10)[:, None], 1e-6)
