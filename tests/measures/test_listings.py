"""Lists of spikes and of equal tokens, against plants."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from tests.support.refusals import is_refused

STATES = np.random.default_rng(0).uniform(0.5, 1.5, size=(5, 6, 4))


def test_planted_spikes_are_listed_with_place_value_and_ratio():
    states = STATES.copy()
    states[1:4, 2, 3] = -2000.0, 3000.0, -6000.0
    states[4, 5, 0] = 9000.0  # in one layer of five
    rows = rc.spikes(states, threshold=500.0)
    assert [row[:4] for row in rows] == [(3, 2, 3, -6000), (2, 2, 3, 3000), (1, 2, 3, -2000)]
    for row in rows:
        expected = abs(row.value) / np.median(np.abs(states[row.layer]))
        np.testing.assert_allclose(row.ratio, expected, rtol=1e-6)
    assert rc.spikes(states, threshold=500.0, layer_share=0.0)[0][:3] == (4, 5, 0)
    assert rc.spikes(states, threshold=500.0, layer_share=0.6) == rows  # three layers of five
    assert rc.spikes(states, threshold=500.0, layer_share=0.8) == []
    assert rc.spikes(states, threshold=500.0, mask=np.arange(6) != 2) == []
    shifted = rc.spikes(states[:, 1:], threshold=500.0, mask=np.arange(5) > 0)
    assert {row.token for row in shifted} == {1}


def test_layers_may_be_a_list_of_one_example_each():
    """As a model returns them, with or without the axis of the batch."""
    states = STATES.copy()
    states[1:4, 2, 3] = -2000.0, 3000.0, -6000.0
    rows = rc.spikes(states, threshold=500.0)
    for layers in (list(states), [layer[None] for layer in states], tuple(states)):
        assert rc.spikes(layers, threshold=500.0) == rows
    message = "hold several examples: pass one"
    is_refused(message, rc.spikes, [np.stack([layer, layer]) for layer in states])
    is_refused(message, rc.spikes, states[:, None])  # an array, whose axes may be others


def test_by_default_spikes_are_above_1000_medians_in_half_of_the_layers():
    states = np.ones((4, 6, 4))
    states[:, 1, 0] = 1000.0  # at the threshold
    states[:2, 3, 2] = 1001.0, -1200.0
    assert [row[:3] for row in rc.spikes(states)] == [(1, 3, 2), (0, 3, 2)]
    assert rc.spikes(states[1:]) == []  # in one layer of three
    assert [row.token for row in rc.spikes(states, layer_share=0.25)] == [3, 3]
    assert len(rc.spikes(states, threshold=999.0)) == 6


def test_spikes_fall_by_ratio_and_a_layer_of_zeros_has_none():
    states = np.ones((3, 6, 4)) * np.array([1.0, 100.0, 0.0])[:, None, None]
    states[:, 5, 3] = 3000.0, -200_000.0, 1e9
    rows = rc.spikes(states, mask=np.arange(6) > 0)
    assert [tuple(row) for row in rows] == [(0, 5, 3, 3000, 3000), (1, 5, 3, -200_000, 2000)]


def test_tokens_are_equal_to_8_roundings_and_nan_equals_nothing():
    eps = np.finfo(np.float32).eps
    x = np.float32([[1.0], [1 + 7 * eps], [1 + 20 * eps], [np.nan], [-1.0], [1 + 20 * eps]])
    assert rc.duplicates(x) == [[0, 1], [2, 5]]
    exact = np.float32([[1.0], [1.25], [0.75], [2.0]])
    assert rc.duplicates(exact, tolerance=0.25) == [[0, 1, 2]]
    assert rc.duplicates(4 * exact, tolerance=0.25) == [[0, 1, 2]]
    assert rc.duplicates(exact, tolerance=0.2) == [] == rc.duplicates(x[:2], tolerance=0)
    wide = np.float64([[1.0], [1 + 1e-12]])
    assert rc.duplicates(wide) == [] and rc.duplicates(wide.astype(np.float32)) == [[0, 1]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tokens_are_equal_to_none_that_are_infinite_or_of_another_size(dtype):
    """Neither sizes whose squares overflow nor those whose squares underflow."""
    most, least = np.finfo(dtype).max, 4 * np.finfo(dtype).tiny
    x = np.array([[np.inf, 0], [1, 2], [1, 2], [-np.inf, 0], [np.inf, 0]], dtype)
    assert rc.duplicates(x) == [[1, 2]] == rc.duplicates(x[[3, 1, 2]])
    assert rc.duplicates(x[::-1]) == [[2, 3]]
    for size in (most, least):
        rows = size * np.array([[1, -1], [0.5, -1], [0, 0], [1, -1], [0.5, 1], [0.5, -1]], dtype)
        assert rc.duplicates(rows) == [[0, 3], [1, 5]]
        assert rc.duplicates(rows[None], mask=[[1, 1, 1, 0, 1, 1]]) == [[1, 5]]
    assert rc.duplicates(np.array([[0, 0], [least, 0], [0, 0]], dtype)) == [[0, 2]]


def test_states_that_are_not_finite_are_refused_unless_they_are_padding():
    states = STATES.astype(np.float32)
    states[:, 0, 1] = 5000.0
    expected, mask = rc.spikes(states), np.arange(states.shape[1]) != 2
    states[1, 2, 0] = np.nan
    is_refused("1 values of states are not finite", rc.spikes, states)
    listed = rc.spikes(states, mask=mask)
    assert {spike[:3] for spike in listed} == {spike[:3] for spike in expected}
    assert rc.spikes([layer[None] for layer in states], mask=mask[None]) == listed
    is_refused("several examples", rc.spikes, np.stack([states, states], axis=1))


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_spikes_of_a_trace_and_of_other_frameworks(framework):
    convert = jnp.asarray if framework == "jax" else pytest.importorskip("torch").tensor
    states = STATES.astype(np.float32)
    states[:, 0, 1] = 5000.0
    expected = rc.spikes(states)
    assert len(expected) == 5
    trace = SimpleNamespace(hidden=convert(states))
    assert rc.spikes(convert(states)) == rc.spikes(trace) == expected


def test_equal_tokens_are_grouped():
    x = STATES[0][[0, 1, 0, 2, 1, 0]]
    assert rc.duplicates(x) == [[0, 2, 5], [1, 4]]
    assert rc.duplicates(x, mask=[1, 1, 0, 1, 0, 1]) == [[0, 5]]
    assert rc.duplicates(STATES[0]) == []
    single = x.astype(np.float32)
    single[2] *= 1 + np.finfo(np.float32).eps
    assert rc.duplicates(jnp.asarray(single)) == [[0, 2, 5], [1, 4]]
    single[2] *= 1 + 1e-4
    assert rc.duplicates(single) == [[0, 5], [1, 4]]
    assert rc.duplicates(single, tolerance=1e-3) == [[0, 2, 5], [1, 4]]
    assert rc.duplicates(np.zeros((3, 2))) == [[0, 1, 2]]


def test_what_nothing_exceeds_is_refused():
    for name, value in (("threshold", np.nan), ("layer_share", 1.5), ("layer_share", np.nan)):
        is_refused(f"{name}={value}", rc.spikes, STATES, **{name: value})
    is_refused("tolerance=nan", rc.duplicates, STATES[0], tolerance=np.float32("nan"))
    is_refused("tolerance=-1.0", rc.duplicates, STATES[0], tolerance=-1)


def test_other_axes_are_refused():
    is_refused(r"\(6, 4\)", rc.spikes, STATES[0])
    is_refused(r"\(5, 6, 4\)", rc.duplicates, STATES)
    for mask in ([1, 0], np.ones((2, 6), bool), np.ones((6, 1), bool)):
        is_refused("does not fit 6 tokens", rc.duplicates, STATES[0], mask=mask)
    added = np.array([0, 0, 0, 0, -np.inf, -np.inf])  # which would be read the wrong way round
    for call, states in ((rc.spikes, STATES), (rc.duplicates, STATES[0])):
        is_refused("additive mask", call, states, mask=added)
