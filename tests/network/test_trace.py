"""A trace: where its layers are, its states as `transformers` has them, and other arrays."""

import jax
import numpy as np

import rank_collapse as rc
from tests.oracles import draws
from tests.support.refusals import is_refused

CONFIG = rc.transformer(3, 2, 4, norm_placement="pre", final_norm=True)
X = draws.normal(5, 7, 4)
PARAMS = draws.parameters(CONFIG)


def compute(x):
    return rc.apply(PARAMS, x, CONFIG)


def test_the_last_state_is_the_output_and_the_others_stay():
    trace = compute(X[0])
    assert trace.layer_axis == 0 and trace.hidden_states.shape == (4, 7, 4)
    np.testing.assert_array_equal(trace.hidden_states[:-1], trace.hidden[:-1])
    np.testing.assert_array_equal(trace.hidden_states[-1], trace.output)
    assert not np.allclose(trace.hidden[-1], trace.output)


def test_a_batch_of_vmap_has_its_layers_behind():
    trace = jax.vmap(compute)(X)
    assert trace.layer_axis == 1
    np.testing.assert_allclose(trace.hidden_states[2], compute(X[2]).hidden_states, rtol=1e-5)


def test_shapes_are_printed_and_not_numbers():
    text = repr(compute(X[0]))
    assert text.startswith("Trace(hidden [4, 7, 4], attention [3, 2, 7, 7], output [7, 4]; ")


def test_absent_parts_are_none():
    trace = compute(X[0])
    assert trace.cross_attention is None and trace.kept is None
    assert trace.mlp_branch.shape == trace.attention_branch.shape == (3, 7, 4)


def test_states_of_another_pass_are_refused():
    trace = compute(X[0])
    for hidden in (trace.hidden[:3], trace.hidden[..., None]):
        other = trace.replace(hidden=hidden)
        is_refused("do not belong to one pass", lambda other=other: other.layer_axis)
