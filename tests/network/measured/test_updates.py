"""The change of the output that an update makes."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments.stability.design_measures import move_weights
from experiments.train.weight_matrices import get_weight_matrices
from rank_collapse.network.measured import updates
from tests.oracles.updated_networks import FIELDS, make_network

RMS = {"norm": "rms", "norm_eps": 0.1, "norm_placement": "pre"}


@pytest.mark.parametrize(
    ("keep", "fields"),
    [(np.tri(5, dtype=bool), RMS), (np.array([True, True, False, True, False]), FIELDS[1])],
)
def test_output_change_is_between_normalised_states_of_tokens_that_exist(keep, fields):
    """Of a mask [n, n], which says what is attended to, all tokens exist."""
    params, x, config = make_network(fields)
    direction = jax.tree.map(lambda w: np.cos(40 * np.asarray(w)), get_weight_matrices(params))
    other = jax.jit(move_weights)(params, direction, 0.1)
    change = updates.output_change(params, other, x, config, mask=keep)
    exists = slice(None) if keep.ndim == 2 else keep

    def unit(params):
        h = np.asarray(rc.apply(params, x, config, mask=keep).hidden, np.float64)[:, exists]
        if fields == RMS:
            return h / np.sqrt(np.square(h).mean(-1, keepdims=True) + 0.1)
        return (h - h.mean(-1, keepdims=True)) / h.std(-1, keepdims=True)

    expected = ((unit(params) - unit(other)) ** 2).mean(axis=(1, 2))
    np.testing.assert_allclose(change, expected, rtol=1e-3)
    assert change[0] == 0 and np.all(change[1:] > 1e-4)


def test_matrices_are_all_those_of_a_layer():
    """But for the router and the gate of shared units, which are no part of the published rule."""
    config = rc.transformer(1, 2, 4, mlp="swiglu", cross_attention=True)
    layers = jax.eval_shape(lambda: rc.init(jax.random.key(0), config)).layers
    for part, names in updates.MATRICES.items():
        fields = vars(getattr(layers, part))
        assert sorted(names) == sorted(n for n in fields if n[:2] == "w_" and fields[n] is not None)
