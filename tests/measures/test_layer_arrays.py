"""Layers as one array: lists, batches on either side, traces, and what is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures.layer_arrays import has_head_axis, stack_layers
from tests.oracles import draws
from tests.support.refusals import is_refused

STATES = np.arange(24.0).reshape(3, 2, 4)  # three layers, two tokens
BATCH = np.arange(120.0).reshape(3, 5, 2, 4)


def test_lists_and_arrays_have_the_layers_first():
    np.testing.assert_array_equal(stack_layers(list(STATES), None, "tokens"), STATES)
    np.testing.assert_array_equal(stack_layers(tuple(BATCH), None, "tokens"), BATCH)
    np.testing.assert_array_equal(stack_layers(BATCH, 1, "tokens"), BATCH)
    np.testing.assert_array_equal(stack_layers(BATCH.swapaxes(0, 1), 0, "tokens"), BATCH)


def test_one_layer_of_jax_makes_all_of_jax():
    layers = [STATES[0], jnp.asarray(STATES[1]), STATES[2]]
    assert isinstance(stack_layers(layers, None, "tokens"), jax.Array)


def test_a_trace_of_a_batch_says_where_its_layers_are():
    config = rc.san(2, 2, 4)
    params, x = draws.parameters(config), draws.normal(5, 3, 4)
    trace = jax.vmap(lambda x: rc.apply(params, x, config))(x)
    hidden = stack_layers(trace, None, "tokens")
    np.testing.assert_array_equal(hidden, np.moveaxis(trace.hidden, 0, 1))
    assert stack_layers(trace, None, "attention").shape == (2, 5, 2, 3, 3)


@pytest.mark.parametrize(
    ("shape", "batch_axis", "expected"),
    [
        ((3, 2, 5, 5), None, True),
        ((3, 2, 5, 4), None, False),
        ((3, 5, 5, 5), 1, False),
        ((3, 5, 2, 4, 4), 1, True),
        ((3, 5, 4), None, False),
    ],
)
def test_attention_has_an_axis_of_heads(shape, batch_axis, expected):
    assert has_head_axis(np.zeros(shape), batch_axis) is expected


@pytest.mark.parametrize(
    ("hidden", "batch_axis", "message"),
    [
        ({"hidden_states": 1}, None, "hidden states are a dict with hidden_states"),
        (None, None, "hidden states are None"),
        ([STATES[0], None], None, "hidden states are None"),
        ([STATES[0], STATES[0][:1]], None, "have different shapes"),
        (STATES[0], None, r"of shape \(2, 4\) are not \[l, n, d\]"),
        (BATCH, None, "batch_axis=None"),
        (STATES, 1, "batch_axis=1"),
    ],
)
def test_what_is_no_stack_of_layers_is_refused(hidden, batch_axis, message):
    is_refused(message, stack_layers, hidden, batch_axis, "tokens")
