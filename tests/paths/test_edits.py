"""Edits against the same change made in the parameters, in the trace and in sums of paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from path_examples import DEPTH, HEADS, config_of, example

import rank_collapse as rc

CONFIG = config_of(mlp="gelu", norm_placement="post", attention_skip=True, mlp_skip=True)
LAYER = 1


ABLATED = {  # in one layer each: the state, and the parameters that make it 0
    "attention_scores": ("attention", ("w_q", "b_q")),
    "attention_branch": ("attention", ("w_o", "b_o")),
    "mlp_branch": ("mlp", ("w_out", "b_out")),
    "attention": ("attention", ("w_v", "b_v")),
}


def ablation(layer, name, value):
    place = [*ABLATED].index(name) if name in ABLATED else -1
    return jnp.where(layer == place, 0, value)


def test_an_ablation_is_that_of_the_parameters(x64):
    config = CONFIG.replace(depth=len(ABLATED))
    params, x, _ = example(config)
    layers = params.layers
    for layer, (part, fields) in enumerate(ABLATED.values()):
        own = getattr(layers, part)
        own = own.replace(**{f: getattr(own, f).at[layer].set(0) for f in fields})
        layers = layers.replace(**{part: own})
    changed = params.replace(layers=layers)
    trace, want = rc.apply(params, x, config, edit=ablation), rc.apply(changed, x, config)
    np.testing.assert_allclose(trace.hidden, want.hidden, atol=1e-12)
    assert not np.allclose(trace.output, rc.apply(params, x, config).output)
    found = rc.path_contributions(params, x, config, edit=ablation)
    want = rc.path_contributions(changed, x, config)
    np.testing.assert_allclose(found.by_length, want.by_length, atol=1e-12)
    np.testing.assert_allclose(found.offset, want.offset, atol=1e-12)


def bent(layer, name, value):
    """All places, each in its own way."""
    amount = {"attention": 0.5, "cross_attention": 0.25, "attention_scores": 2.0}.get(name, 0.1)
    return value + amount * jnp.sin(value + len(name) + layer)


def test_sums_of_paths_hold_with_any_edit(x64):
    config = config_of(
        mlp="swiglu", norm_placement="pre", cross_attention=True, attention_skip=True,
        mlp_skip=True, final_norm=True,
    )  # fmt: skip
    params, x, extra = example(config)
    want = rc.apply(params, x, config, edit=bent, **extra).output
    found = rc.path_contributions(params, x, config, edit=bent, **extra)
    np.testing.assert_allclose(found.output, want, atol=1e-10)
    np.testing.assert_allclose(found.total, want, atol=1e-10)

    def total(gain):
        return rc.path_contributions(params, x, config, head_gain=gain, edit=bent, **extra).total

    want = jnp.moveaxis(jax.jit(jax.jacfwd(total))(jnp.ones((DEPTH, HEADS))), (0, 1), (2, 3))
    found = rc.head_contributions(params, x, config, edit=bent, **extra)
    np.testing.assert_allclose(found, want, atol=1e-10)


def test_patching_with_another_run_is_traced(x64):
    params, x, _ = example(CONFIG)
    other = rc.apply(params, x[::-1] * 2, CONFIG)
    traces = []

    def patch(states, layer, name, value):
        traces.append(name)
        return jnp.where(layer == LAYER, states, value) if name == "hidden" else value

    for run in (other, rc.apply(params, x + 1, CONFIG)):
        edit = jax.tree_util.Partial(patch, run.hidden[LAYER + 1])
        np.testing.assert_allclose(rc.apply(params, x, CONFIG, edit=edit).output, run.output)
        once = len(traces) if run is other else once
    assert len(traces) == once > 0
    found = rc.path_contributions(params, x, CONFIG, edit=edit)
    # Nothing of the text before the patch is left on paths: all of it is the offset.
    np.testing.assert_allclose(found.offset, found.output, atol=1e-12)
    np.testing.assert_allclose(found.by_length, 0, atol=1e-12)


def test_what_is_refused():
    params, x, _ = example(CONFIG)
    path = np.zeros(DEPTH, int)
    for call in (
        lambda e: rc.log_residual_profile(params, x, CONFIG, edit=e),
        lambda e: rc.path_state(params, x, CONFIG, path, edit=e),
        lambda e: rc.path_set_states(params, x, CONFIG, path[None, None], edit=e),
    ):
        with pytest.raises(ValueError, match="takes no edit: apply, path_contributions"):
            call(bent)
    with pytest.raises(ValueError, match=r"gave NoneType for 'attention_scores' of shape"):
        rc.apply(params, x, CONFIG, edit=lambda layer, name, value: None)
    with pytest.raises(ValueError, match=r"gave \(5,\) for 'hidden' of shape \(5, 8\)"):
        rc.apply(params, x, CONFIG, edit=lambda l, name, v: v[:, 0] if name == "hidden" else v)
    with pytest.raises(ValueError, match="edit=3 is not a function"):
        rc.apply(params, x, CONFIG, edit=3)
