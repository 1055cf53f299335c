"""What branches add to the stream, as `agree` compares it with another recording."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.agree.recording import open_recording
from tests.oracles import draws
from tests.support.closeness import assert_close

FORMS = {
    "pre": {},
    "sandwich": {"norm_placement": "sandwich"},
    "branch": {"norm_placement": "branch"},
    "gain": {"branch_gain": 0.3},
    "learned gain": {"branch_gain": 2.0, "learned_branch_gain": 0.5, "learned_per_feature": True},
    "shared": {"norm_placement": "sandwich", "layer_map": (0, 1, 0)},
    "attention alone": {"norm_placement": "sandwich", "mlp": "none"},
}


def make_network(form):
    options = {"norm_placement": "pre", "norm": "rms"} | FORMS[form]
    config = rc.transformer(depth=3, num_heads=2, d_model=8, **options)
    # parameters of NumPy, as those of files are
    return config, jax.tree.map(np.asarray, draws.parameters(config, gain_scale=0.3))


@pytest.mark.parametrize("form", FORMS)
def test_the_stream_grows_by_what_is_added(form):
    config, params = make_network(form)
    trace = rc.apply(params, draws.normal(5, 8), config)
    added = rc.network.compute_added_branches(trace, params, config)
    hidden = np.asarray(trace.hidden)
    assert_close(sum(map(np.asarray, added.values())), hidden[1:] - hidden[:-1], atol=2e-6)
    changes = {"mlp_branch", "attention_branch"} == added.keys() or form == "attention alone"
    assert changes


def test_of_a_decoder_the_branches_of_attention_and_mlp_are_added():
    """Times the gain; that of cross-attention is not recorded."""
    config = rc.transformer(
        2, 2, 8, norm_placement="pre", cross_attention=True, mask="causal", branch_gain=0.3
    )
    params, memory = draws.parameters(config), draws.normal(4, 8, seed=1)
    trace = rc.apply(params, draws.normal(5, 8), config, memory=memory)
    added = rc.network.compute_added_branches(trace, params, config)
    assert added.keys() == {"attention_branch", "mlp_branch"}
    assert_close(added["attention_branch"], 0.3 * trace.attention_branch, atol=1e-6)
    assert_close(added["mlp_branch"], 0.3 * trace.mlp_branch, atol=1e-6)


@pytest.mark.parametrize("layer_axis", [0, 1])
def test_a_batch_has_the_axes_of_its_trace(layer_axis):
    """Layers come first from `apply_batch`, and examples from vmap."""
    config, params = make_network("sandwich")
    x = draws.normal(4, 5, 8)
    if layer_axis == 0:
        trace = rc.network.apply_batch(params, x, config)
    else:
        trace = jax.vmap(lambda x: rc.apply(params, x, config))(x)
    added = rc.network.compute_added_branches(trace, params, config)
    steps = np.diff(np.asarray(trace.hidden), axis=layer_axis)
    assert_close(sum(map(np.asarray, added.values())), steps, atol=2e-6)


def test_a_trace_is_recorded_as_the_function_is(tmp_path):
    config, params = make_network("sandwich")
    x = draws.normal(5, 8)
    trace = rc.apply(params, x, config)
    added = rc.network.compute_added_branches(trace, params, config)
    rc.record(trace, tmp_path / "a.npz", **added)
    fn = rc.paths.name_states(params, config)
    rc.record_function(fn, x, tmp_path / "b.npz", branches={"attention": "attention", "mlp": "mlp"})
    pair = [open_recording(tmp_path / f"{name}.npz").read_layers() for name in "ab"]
    for a, b in zip(*pair, strict=True):
        for name, branch in a.branches.items():
            assert_close(branch, b.branches[name], atol=2e-6)
