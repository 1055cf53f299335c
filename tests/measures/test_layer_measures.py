"""Measures of layers by name: NaN where states are not finite or too few, means over heads."""

import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures.layer_measures import measure_states, measure_weights
from tests.support.closeness import assert_close

X = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
NAMES = ("residual_ratio", "effective_rank")


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_states_that_are_not_finite_are_nan_and_the_others_are_measured(make):
    x = X.copy()
    x[1, 2, 3] = np.inf
    values = measure_states(NAMES, make(x))
    for name in NAMES:
        expected = [float(rc.MEASURES[name](X[i])) for i in (0, 2)]
        np.testing.assert_allclose(np.asarray(values[name])[[0, 2]], expected, rtol=1e-5)
        assert np.isnan(values[name][1])
    assert np.asarray(values["spiked"]).tolist() == [False] * 3 and "left_out" not in values


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_one_token_has_a_rank_and_no_ratio(make):
    mask = np.arange(5) < np.array([[5], [1], [0]])
    values = measure_states(NAMES, make(X), make(mask))
    assert np.isnan(values["residual_ratio"]).tolist() == [False, True, True]
    assert np.isnan(values["effective_rank"]).tolist() == [False, False, True]
    np.testing.assert_allclose(values["effective_rank"][1], 1, rtol=1e-5)


def test_tokens_that_are_left_out_are_counted():
    x = X.copy()
    x[0, 0] *= 100
    values = measure_states(NAMES, x, exclude="spikes")
    assert values["left_out"].tolist() == [1, 0, 0]
    expected = rc.residual_ratio(x[0, 1:])
    np.testing.assert_allclose(values["residual_ratio"][0], expected, rtol=1e-5)


def test_weights_are_means_over_heads():
    p = np.random.default_rng(1).dirichlet(np.ones(5), (3, 2, 5))
    mask = np.array([True, True, True, False, False])
    names = ("attention_entropy", "sink_rate")
    values = measure_weights(names, p, mask, np.ones(5, bool))
    entropy = -(p * np.log(p)).sum(-1)[:, :, :3].mean(axis=(1, 2))
    np.testing.assert_allclose(values["attention_entropy"], entropy, rtol=1e-6)
    first = p[:, :, :3, 0].mean(axis=2)
    assert_close(values["sink_rate"], (first > 0.3).mean(axis=1))
