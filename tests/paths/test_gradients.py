"""Gradients by path length in closed form; of whole networks they are in tests/test_algebras.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from path_examples import config_of, example, relative

import rank_collapse as rc
from rank_collapse import pretrained
from rank_collapse.network.passes import States
from rank_collapse.paths.gradients import gradient_effects


def length_gradients(params, x, config, cotangent):
    """Of one example of a network in memory."""
    source = pretrained.InMemory(params, config)
    inputs = {"x": x[None]}
    groups = {"": pretrained.Group((("states", States()),))}
    states = pretrained.stream(source, inputs, groups)[""]["states"]
    return pretrained.stream_gradients(source, inputs, states, cotangent[None])[0]


def test_two_layers_of_attention_in_closed_form(x64):
    config = config_of(depth=2, attention_skip=True, mlp="none", skip_gain=0.7)
    params, x, _ = example(config)
    v = jax.random.normal(jax.random.key(1), x.shape)
    attention = np.asarray(rc.apply(params, x, config).attention)
    maps = np.asarray(
        jnp.einsum(
            "lhdv,lhve->lhde", *(getattr(params.layers.attention, n) for n in ("w_v", "w_o"))
        )
    )

    def back(l, g):
        return sum(attention[l, h].T @ g @ maps[l, h].T for h in range(config.num_heads))

    v, s = np.asarray(v), 0.7
    expected = [s * s * v, s * (back(0, v) + back(1, v)), back(0, back(1, v))]
    gradients = length_gradients(params, x, config, jnp.asarray(v))
    assert relative(gradients, np.stack(expected)) < 1e-12
    effects = gradient_effects(gradients)
    sizes = np.array([np.linalg.norm(g) for g in expected])
    assert relative(effects["gradient_share"], sizes / sizes.sum()) < 1e-12
    assert relative(effects["gradient_size"], sizes / np.linalg.norm(sum(expected))) < 1e-12


def test_refusals():
    config = config_of(attention_skip=True, mlp="none")
    params, x, _ = example(config)
    with pytest.raises(ValueError, match=r"cotangents of shape \(1, 2, 8\) is not \(1, 5, 8\)"):
        length_gradients(params, x, config, x[:2])
