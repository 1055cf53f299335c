"""A key that is excluded: hidden, dropped or thinned, after it and from a layer on."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.trained.excluded_keys import EXCLUDED, Condition, make_edit
from tests.support.closeness import assert_close

P = np.random.default_rng(0).dirichlet(np.ones(4), (2, 4)).astype(np.float32)
LATER = np.arange(4) > 1  # queries after key 1


def edit(name, layer, is_hidden=False, is_thinned=False):
    """Edits weights (or scores) of a layer; key 1 is excluded from layer 2 on."""
    condition = Condition(1, 2, jnp.array(is_hidden), jnp.array(is_thinned))
    return np.asarray(make_edit(condition)[name](jnp.asarray(P), jnp.array(layer)))


@pytest.mark.parametrize("name", ["scores", "weights"])
@pytest.mark.parametrize("way", [{}, {"is_hidden": True}, {"is_thinned": True}])
def test_before_the_layer_nothing_changes(name, way):
    np.testing.assert_array_equal(edit(name, 1, **way), P)


def test_a_hidden_key_has_no_score_in_the_rows_after_it():
    expected = P.copy()
    expected[:, LATER, 1] = EXCLUDED
    np.testing.assert_array_equal(edit("scores", 2, is_hidden=True), expected)
    np.testing.assert_array_equal(edit("weights", 2, is_hidden=True), P)


def test_a_dropped_weight_is_lost():
    expected = P.copy()
    expected[:, LATER, 1] = 0
    np.testing.assert_array_equal(edit("weights", 3), expected)
    np.testing.assert_array_equal(edit("scores", 3), P)


def test_thinned_rows_lose_as_much_in_proportion():
    thinned = edit("weights", 2, is_thinned=True)
    assert_close(thinned[:, ~LATER], P[:, ~LATER])
    lost = P[:, LATER, 1]
    np.testing.assert_allclose(thinned[:, LATER].sum(-1), 1 - lost, rtol=1e-6)
    np.testing.assert_allclose(thinned[:, LATER], P[:, LATER] * (1 - lost)[..., None], rtol=1e-6)
