"""Measures of run_stability: Admin's profile, updates and gradient steps."""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.stability import design_measures
from experiments.train.weight_matrices import get_weight_matrices, replace_weight_matrices
from rank_collapse.network.measured import updates
from tests.oracles import draws


def small_network():
    """Draws (config, weights, other weights, tokens)."""
    config = rc.transformer(2, 2, 8, mlp="relu", d_ff=8)
    params, other = (draws.parameters(config, i, 1.0, 0.0, 0.0) for i in (0, 1))
    return config, params, other, draws.normal(5, 8, seed=2)


@jax.jit
def normalise_output(params, x, config):
    return design_measures.normalised_output(rc.apply(params, x, config), config)


def test_the_change_of_an_update_is_the_librarys():
    config, params, other, x = small_network()
    direction, before = get_weight_matrices(other), normalise_output(params, x, config)
    directions = {"there": direction}
    change = jax.jit(design_measures.output_changes)(params, x, config, before, directions, 1e-2)[
        "there"
    ]
    moved = jax.jit(design_measures.move_weights)(params, direction, 1e-2)
    expected = updates.output_change(params, moved, x, config)[-1]
    np.testing.assert_allclose(change, expected, rtol=1e-4)


def test_an_sgd_step_and_its_bound_are_those_of_a_step_taken():
    """To first order: a step of η = 1e-3, its loss, and the loss over ‖u‖ squared."""
    config, params, _, x = small_network()
    target = draws.normal(5, 8, seed=3)

    def loss(params):
        return jnp.sum(target * normalise_output(params, x, config)), "aside"

    eta = e = 1e-3

    @jax.jit
    def step(params):
        gradients, aside = design_measures.matrix_gradients(loss, params)
        assert aside == "aside"
        change = design_measures.sgd_change(params, x, config, gradients)
        matrices = get_weight_matrices(params)
        moved = replace_weight_matrices(
            params, jax.tree.map(lambda w, g: w - eta * g, matrices, gradients)
        )
        stepped = design_measures.move_weights(params, jax.tree.map(jnp.negative, gradients), e)
        return change, moved, design_measures.gradient_bound(params, gradients, target, e), stepped

    change, moved, bound, stepped = step(params)
    before, after, later = (
        np.asarray(normalise_output(p, x, config)) for p in (params, moved, stepped)
    )
    np.testing.assert_allclose(change, np.mean((after - before) ** 2) / eta**2, rtol=0.05)
    # a step of relative size e along each gradient lowers the loss by e Σ‖W‖‖∂W‖
    fall, target = np.sum(target * (before - later)), np.asarray(target)
    np.testing.assert_allclose(bound, fall**2 / np.sum(target**2) / target.size, rtol=0.05)
