"""A layer is a step on the sphere."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.theorems import prescribed_networks
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_a_layer_is_a_step_on_the_sphere():
    """Against NumPy, with scores and values of every head, and a mask."""
    rng = np.random.default_rng(0)
    n, d, heads, beta, gain = 5, 3, 2, 2.0, 0.1
    a, v = rng.normal(size=(2, heads, d, d))
    x = rng.normal(size=(n, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    config = prescribed_networks.make_sphere(1, d, beta, gain, num_heads=heads, mask="causal")
    state = prescribed_networks.pass_states(
        prescribed_networks.make_params(config, a, v), jnp.asarray(x), config
    )[1]
    branch = 0
    for head in range(heads):
        weights = np.exp(beta * x @ a[head] @ x.T) * np.tri(n)
        branch = branch + weights / weights.sum(axis=1, keepdims=True) @ x @ v[head]
    expected = x + gain * branch
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert_close(state, expected, rtol=1e-12)
