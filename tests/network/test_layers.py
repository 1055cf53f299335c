"""Norms, activations, MLPs, embeddings and dropout: against numpy, and within statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from scipy.special import softmax

import rank_collapse as rc
from rank_collapse.network import layers
from rank_collapse.network.embedding import init_embedding
from tests.oracles import draws
from tests.oracles.attention_forms import FORM
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals


def tokens(n=5, d=8, seed=3):
    return draws.normal(n, d, seed=seed) * 3.0 + 2.0


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_match_numpy(kind):
    x, gain, bias = np.asarray(tokens()), np.linspace(0.5, 2, 8), np.linspace(-1, 1, 8)
    centred = x - x.mean(axis=1, keepdims=True) if kind == "layer" else x
    size = np.sqrt((centred**2).mean(axis=1, keepdims=True) + 0.3)
    for shift in (bias, None):
        params = layers.NormParams(gain=jnp.asarray(gain), bias=shift)
        expected = centred / size * gain + (0 if shift is None else shift)
        normed = layers.apply_norm(params, jnp.asarray(x), kind, 0.3)
        np.testing.assert_allclose(normed, expected, rtol=1e-5, atol=1e-6)
    plain = layers.apply_norm(None, jnp.asarray(x), kind, 0.3)
    np.testing.assert_allclose(plain, centred / size, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
def test_an_activation_is_its_argument_times_its_gate(name, x64):
    z = np.append(np.linspace(-6, 6, 101), [1.0, -1.0, 0.0])
    fn, gate = layers.ACTIVATIONS[name]
    slope = jax.vmap(jax.grad(lambda t: gate(t[None])[0]))
    values, gates, slopes = jax.jit(lambda z: (fn(z), gate(z), slope(z)))(z)
    assert_close(values, z * gates, rtol=1e-12, atol=1e-14)
    assert np.isfinite(slopes).all()
    assert_close(gates[-1], jax.grad(fn)(0.0), rtol=1e-12, atol=1e-14)


def test_a_function_of_the_caller_has_its_quotient_as_gate_and_its_slope_at_zero(x64):
    """Where it is not 0 at 0 there is no gate."""
    z = jnp.array([-2.0, 0.0, 3.0])
    fn, gate = layers.get_activation(lambda z: jnp.expm1(2 * z))
    assert_close(gate(z), [np.expm1(-4) / -2, 2, np.expm1(6) / 3])
    assert_close(fn(z), np.expm1(2 * np.asarray(z)))
    assert np.isfinite(jax.grad(lambda z: gate(z).sum())(z)).all()
    shifted = layers.get_activation(lambda z: jnp.exp(z)).gate(z)
    assert np.isnan(shifted).tolist() == [False, True, False]


@pytest.mark.parametrize("kind", [k for k in layers.MLP_KINDS if k != "none"])
def test_mlp_matches_numpy(kind, x64):
    assert ("none", *layers.ACTIVATIONS, *layers.GATED) == layers.MLP_KINDS
    p = {n: draws.normal(*shape, seed=i) for i, (n, shape) in enumerate(SHAPES.items())}
    p, x = jax.device_get((layers.MLPParams(**p), draws.normal(3, 4, seed=6)))
    linear, gate = x @ p.w_in + p.b_in[None], x @ p.w_gate + p.b_gate[None]
    gated = kind in layers.GATED
    hidden = NUMPY_PHI[layers.GATED.get(kind, kind)](np.asarray(gate if gated else linear))
    hidden = hidden * linear if gated else hidden
    expected = hidden @ p.w_out + p.b_out[None]
    output = jax.jit(layers.apply_mlp, static_argnums=2)(p, x, kind)
    assert_close(output, expected, rtol=1e-10)


SHAPES = {"w_in": (4, 6), "b_in": (6,), "w_out": (6, 4), "b_out": (4,)}
SHAPES |= {"w_gate": (4, 6), "b_gate": (6,)}
NUMPY_PHI = {
    "identity": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z * special.ndtr(z),
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "quick_gelu": lambda z: z * special.expit(1.702 * z),
    "silu": lambda z: z * special.expit(z),
    "tanh": np.tanh,
}


TABLES = {"vocab_size": 3, "d_embed": 4, "positions": "learned", "num_positions": 2}
FEW = rc.EmbeddingConfig(**TABLES)


def embed(x):
    return rc.network.embed(init_embedding(jax.random.key(0), FEW, 4), x, FEW)


@parametrize_refusals(
    [
        (lambda: layers.apply_norm(None, tokens(), "batch"), "norm='batch'"),
        (lambda: layers.get_activation("maxout"), "mlp='maxout'"),
        (lambda: rc.EmbeddingConfig(vocab_size=3, d_input=2), "vocab_size=3 and d_input=2"),
        (lambda: rc.EmbeddingConfig(), "one of vocab_size=0 and d_input=0 must be positive"),
        (lambda: rc.EmbeddingConfig(vocab_size=3, projection="twice"), "projection='twice'"),
        (lambda: init_embedding(jax.random.key(0), FEW, 5), "d_embed=4 is not d_model=5"),
        (lambda: embed(jnp.array([0, 1, 2])), "3 tokens are more than num_positions=2"),
        (lambda: embed(jnp.zeros((2, 4))), r"shape \(2, 4\)"),
    ]
)
def test_errors_name_the_value(arguments, message):
    is_refused(message, *arguments)


def test_a_map_without_a_bias_adds_none():
    x, w = tokens(), np.asarray(draws.normal(8, 6, seed=1))
    params = layers.MLPParams(w_in=w, w_out=w.T)
    expected = np.maximum(np.asarray(x) @ w, 0) @ w.T
    assert_close(layers.apply_mlp(params, x, "relu"), expected, rtol=1e-5, atol=1e-4)


def test_shared_units_have_a_gate_of_their_own(x64):
    experts = {"num_experts": 2, "experts_per_token": 1, "router": "all", "d_shared": 3, "d_ff": 7}
    routing = rc.TransformerConfig(**(FORM | experts)).routing
    rng = np.random.default_rng(0)
    x, router, shared = (rng.standard_normal(s) for s in ((4, 5), (5, 2), (5, 1)))
    params = layers.MLPParams(w_in=np.zeros((5, 7)), w_out=None, w_router=router, w_shared=shared)
    shares = np.asarray(jax.jit(lambda x: layers.unit_shares(params, x, routing))(x))
    p = softmax(x @ router, axis=-1)
    for i in range(4):
        best = int(p[i].argmax())
        expected = np.zeros(7)
        expected[2 * best : 2 * best + 2] = p[i, best]
        expected[4:] = 1 / (1 + np.exp(-(x[i] @ shared)))
        assert_close(shares[i], expected, atol=1e-12)
