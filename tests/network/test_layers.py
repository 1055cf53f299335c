"""Norms, activations and MLPs against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from rank_collapse.network import layers


def tokens(n=5, d=8, seed=3):
    return 2.0 + 3.0 * jax.random.normal(jax.random.key(seed), (n, d))


def test_layer_norm_matches_numpy():
    x = np.asarray(tokens())
    gain, bias = np.linspace(0.5, 2, 8), np.linspace(-1, 1, 8)
    params = layers.NormParams(gain=jnp.asarray(gain), bias=jnp.asarray(bias))
    centred = x - x.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt(x.var(axis=1, keepdims=True) + 0.3) * gain + bias
    np.testing.assert_allclose(
        layers.norm(params, jnp.asarray(x), "layer", 0.3), expected, rtol=1e-5, atol=1e-6
    )


def test_rms_norm_matches_numpy():
    x = np.asarray(tokens())
    gain = np.linspace(0.5, 2, 8)
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 0.3) * gain
    got = layers.norm(layers.NormParams(gain=jnp.asarray(gain)), jnp.asarray(x), "rms", 0.3)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_norm_without_parameters_standardises(x64):
    y = layers.norm(None, tokens(), "layer", 0.0)
    np.testing.assert_allclose(y.mean(axis=1), 0, atol=1e-14)
    np.testing.assert_allclose(y.var(axis=1), 1, rtol=1e-13)


def test_layer_norm_ignores_scale_and_shift(x64):
    x = tokens()
    np.testing.assert_allclose(
        layers.norm(None, x, "layer", 0.0), layers.norm(None, 7 * x - 2, "layer", 0.0), rtol=1e-9
    )


def test_unknown_norm_names_the_value():
    with pytest.raises(ValueError, match="norm='batch'"):
        layers.norm(None, tokens(), "batch")


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
def test_an_activation_is_its_argument_times_its_gate(name, x64):
    z = jnp.concatenate([jnp.linspace(-6, 6, 101), jnp.zeros(1)])
    fn, gate = layers.ACTIVATIONS[name]
    np.testing.assert_allclose(fn(z), z * gate(z), rtol=1e-12, atol=1e-14)
    assert np.isfinite(jax.vmap(jax.grad(lambda t: gate(t[None])[0]))(z)).all()


@pytest.mark.parametrize("kind", [k for k in layers.MLP_KINDS if k != "none"])
def test_mlp_matches_numpy(kind, x64):
    keys = jax.random.split(jax.random.key(0), 7)
    draw = [jax.random.normal(k, s) for k, s in zip(keys[:6], SHAPES, strict=True)]
    names = ("w_in", "b_in", "w_out", "b_out", "w_gate", "b_gate")
    p = layers.MLPParams(**dict(zip(names, draw, strict=True)))
    x = jax.random.normal(keys[6], (3, 4))
    linear, gate = x @ p.w_in + p.b_in[None], x @ p.w_gate + p.b_gate[None]
    if kind in layers.GATED:
        hidden = NUMPY_PHI[layers.GATED[kind]](np.asarray(gate)) * linear
    else:
        hidden = NUMPY_PHI[kind](np.asarray(linear))
    expected = hidden @ p.w_out + p.b_out[None]
    np.testing.assert_allclose(layers.mlp(p, x, kind), expected, rtol=1e-10)


SHAPES = ((4, 6), (6,), (6, 4), (4,), (4, 6), (6,))
NUMPY_PHI = {
    "identity": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z * special.ndtr(z),
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "quick_gelu": lambda z: z * special.expit(1.702 * z),
    "silu": lambda z: z * special.expit(z),
    "tanh": np.tanh,
}


def test_unknown_mlp_names_the_value():
    with pytest.raises(ValueError, match="mlp='maxout'"):
        layers.activation_of("maxout")


def test_kinds_of_mlps_are_those_that_there_are():
    assert ("none", *layers.ACTIVATIONS, *layers.GATED) == layers.MLP_KINDS
