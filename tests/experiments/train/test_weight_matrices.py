"""Updates of all weight matrices, of the size that is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments.stability.design_measures import move_weights
from experiments.train.weight_matrices import compute_matrix_norms, get_weight_matrices
from tests.oracles import draws
from tests.oracles.gradient_norms import gradient_norms
from tests.oracles.updated_networks import FIELDS, make_network


@pytest.mark.full
def test_updates_have_the_asked_size_and_gradients_their_norms():
    params, x, config = make_network(FIELDS[1])
    target = draws.tokens(5, 8, seed=2)

    def loss(params):
        return jnp.sum(target * rc.apply(params, x, config).output)

    matrices = get_weight_matrices(params)
    assert {part: set(m) for part, m in matrices.items()} == {
        "attention": {"w_q", "w_k", "w_v", "w_o"},
        "mlp": {"w_in", "w_gate", "w_out"},
    }

    @jax.jit
    def step(params):
        down = jax.tree.map(jnp.negative, get_weight_matrices(jax.grad(loss)(params)))
        new = move_weights(params, down, 1e-4)
        moved = jax.tree.map(jnp.subtract, get_weight_matrices(new), matrices)
        size, length = compute_matrix_norms(moved), compute_matrix_norms(matrices)
        return size, length, gradient_norms(loss, params), loss(params) - loss(new)

    size, length, gradient, change = jax.device_get(step(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 1e-4 * b, rtol=0.01), size, length)
    # downhill by ε Σ ‖W‖ ‖∂W‖, to first order
    fall = sum(jax.tree.leaves(jax.tree.map(np.vdot, length, gradient)))
    np.testing.assert_allclose(change, 1e-4 * fall, rtol=0.03)
    norms = [np.linalg.norm(w) for w in params.layers.attention.w_k]
    np.testing.assert_allclose(length["attention"]["w_k"], norms, rtol=1e-5)
