"""Dropout in training: none of nothing, one for each step, and of the output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.paths.sets import Classifier
from rank_collapse.training.training import (
    batch_forward,
    init_state,
    train_epoch,
    train_step,
)
from tests.oracles.trained_networks import begin, data, hyper, recipe


@pytest.mark.full
def test_no_dropout_is_a_dropout_of_nothing():
    losses = {}
    for rate in (None, 0.0, 0.5):
        run = hyper(learning_rate=0.01, dropout=rate)
        state = init_state(jax.random.key(1), run, recipe())
        epoch = jax.jit(lambda s, h: train_epoch(s, data(), 0, h, recipe()))
        state, first = epoch(state, run)
        losses[rate] = [float(first), float(epoch(state, run)[1])]
    assert losses[None] == pytest.approx(losses[0.0], rel=1e-5)
    assert abs(losses[0.5][0] - losses[None][0]) > 1e-3


@pytest.mark.full
def test_every_step_has_a_dropout_of_its_own():
    chosen, run = recipe(), hyper(learning_rate=0.01, dropout=0.5)
    state, batch = init_state(jax.random.key(0), run, chosen), data(4)
    one_step = jax.jit(
        lambda step: train_step(state, batch, jnp.ones(4, bool), step, 1.0, run, chosen)[1]
    )
    first, second, again = (float(one_step(step)) for step in (0, 1, 0))
    assert first == again and abs(first - second) > 1e-3


@pytest.mark.full
def test_dropout_of_the_output_falls_on_what_the_classifier_reads():
    """A classifier of ones on the diagonal shows the output: each entry is 0 or 1/(1 − p)."""
    chosen = recipe(num_outputs=8)
    model = begin(hyper(), chosen).model
    model = model.replace(classifier=Classifier(jnp.eye(8), jnp.zeros(8)))
    batch = data()
    key, rate = jax.random.key(5), jnp.float32(0.25)

    def compute_states(output_dropout):
        output = batch_forward(
            model,
            batch,
            chosen.config,
            dropout_key=key,
            dropout_rate=rate,
            output_dropout=output_dropout,
        )
        return np.asarray(output)

    before, after = compute_states(False), compute_states(True)
    nonzero = after != 0
    np.testing.assert_allclose(after[nonzero], before[nonzero] / 0.75, rtol=1e-6)
    assert np.all(np.any(nonzero[1:] != nonzero[0], axis=(1, 2)))  # each example has its own
    share = 1 - nonzero.mean()
    assert abs(share - 0.25) < 4 * np.sqrt(0.25 * 0.75 / nonzero.size)
    share = 1 - np.mean(compute_states(2.0) != 0)  # what multiplies the rate
    assert abs(share - 0.5) < 4 * np.sqrt(0.5 * 0.5 / nonzero.size)
    state = init_state(jax.random.key(0), hyper(), recipe())

    def count(chosen):
        """Counts the random words that a training step hashes."""
        step = jax.make_jaxpr(lambda s: train_epoch(s, batch, 0, hyper(), chosen))(state)
        return str(step).count("shift_right_logical")

    assert count(recipe(output_dropout=True)) > count(recipe())  # the recipe passes it on
