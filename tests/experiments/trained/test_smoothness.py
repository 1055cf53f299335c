"""Lipschitz constants of attention layers, against exact Jacobians."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments.trained import smoothness
from rank_collapse import pretrained
from tests.oracles import draws
from tests.support.closeness import assert_close


@pytest.mark.full
def test_power_iteration_finds_the_largest_singular_value():
    matrix = draws.normal(12, 20)
    x = draws.normal(5, 4)

    def fn(x):
        return jnp.sin(matrix @ x.ravel()) + 0.1 * x.sum()

    exact = np.linalg.norm(np.asarray(jax.jacfwd(fn)(x)).reshape(12, 20), ord=2)
    largest, change = smoothness.largest_singular_value(fn, x, 200)
    assert largest == pytest.approx(exact, rel=1e-5) and abs(change) < 1e-5
    early, change = smoothness.largest_singular_value(fn, x, 3)
    assert early < exact and change > 0
    before, _ = smoothness.largest_singular_value(fn, x, 2)
    assert float(change) == pytest.approx(float((early - before) / early), rel=1e-3)


def attend(weights, z, causal):
    """Attention of one layer in NumPy-like code, without skip, norm and biases."""
    w_q, w_k, w_v, w_o = weights
    scores = jnp.einsum("nd,hdk,hek,me->hnm", z, w_q, w_k, z) / np.sqrt(w_q.shape[-1])
    mask = np.tri(len(z), dtype=bool) if causal else np.ones((len(z),) * 2, bool)
    rows = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hnm,md,hdv,hvf->nf", rows, z, w_v, w_o)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_constant_is_that_of_attention_alone(mask):
    """At the input of each layer after the norm, against the singular values of the Jacobian."""
    config = rc.transformer(2, 2, 8, norm_placement="pre", mask=mask, mlp="gelu")
    params = draws.parameters(config, bias_scale=0.0, gain_scale=0.0)
    x = draws.normal(3, 6, 8)
    source = pretrained.InMemory(params, config)
    texts = {"x": np.asarray(x), "mask": np.ones((3, 6), bool)}
    measured = smoothness.measure_texts(source, texts, 6)
    jacobian = jax.jit(jax.jacfwd(lambda z, weights: attend(weights, z, mask == "causal")))
    for text in range(3):
        hidden = np.asarray(rc.apply(params, x[text], config).hidden)
        for layer in range(2):
            attention = params.layers.attention
            weights = [getattr(attention, f"w_{name}")[layer] for name in "qkvo"]
            state = hidden[layer]
            spread = np.sqrt(state.var(axis=1, keepdims=True) + config.norm_eps)
            normed = (state - state.mean(axis=1, keepdims=True)) / spread
            exact = np.linalg.norm(np.reshape(jacobian(normed, weights), (48, 48)), ord=2)
            assert measured["largest"][text, layer] == pytest.approx(exact, rel=0.01)
            assert measured["largest"][text, layer] <= exact * 1.00001


def test_texts_are_cut_and_short_ones_have_no_number():
    config = rc.transformer(2, 2, 8, mask="causal")
    source = pretrained.InMemory(draws.parameters(config), config)
    x = draws.normal(2, 6, 8)
    mask = np.arange(6) < np.array([[6], [3]])
    cut = smoothness.measure_texts(source, {"x": x, "mask": mask}, 4)["largest"]
    assert np.isfinite(cut[0]).all() and np.isnan(cut[1]).all()
    alone = smoothness.measure_texts(source, {"x": x[:1, :4], "mask": mask[:1, :4]}, 4)["largest"]
    np.testing.assert_allclose(cut[0], alone[0], rtol=1e-5)
    assert np.isnan(smoothness.measure_texts(source, {"x": x, "mask": mask}, 7)["largest"]).all()


def test_powers_are_slopes_of_logarithms():
    tokens = np.array([8, 16, 32, 64])
    largest = np.stack([3 * tokens**0.25, tokens**0.5, tokens**0.5, tokens**0.5], axis=1)
    largest[3, 2], largest[2:, 3] = np.nan, np.nan
    powers = smoothness.fit_powers(largest, tokens)
    assert_close(powers[:3], [0.25, 0.5, 0.5], rtol=1e-12)
    assert np.isnan(powers[3])  # two numbers
    noisy = largest[:, 0] * np.array([1, 1.1, 0.9, 1.05])
    expected = np.polyfit(np.log(tokens), np.log(noisy), 1)[0]
    assert smoothness.fit_powers(noisy, tokens) == pytest.approx(expected)


def test_two_frames_of_a_spectrogram_are_a_token(monkeypatch):
    """Spectrograms of 9 frames have 4 tokens: of 4 tokens 8 frames are read, of 5 none is."""
    read = []

    def stream(source, inputs, groups, *, chunk):
        assert chunk == 4 and inputs["mask"] is None
        read.append(inputs["x"].shape)
        return {"": {"": {"largest": np.ones((2, 3)), "change": np.zeros((2, 3))}}}

    monkeypatch.setattr(smoothness.pretrained, "stream", stream)
    source = SimpleNamespace(config=SimpleNamespace(depth=3))
    inputs = {"x": np.zeros((2, 9, 5)), "mask": None}
    measured = smoothness.measure_texts(source, inputs, 4)
    assert read == [(2, 8, 5)] and (measured["largest"] == 1).all()
    measured = smoothness.measure_texts(source, inputs, 5)
    assert len(read) == 1 and all(np.isnan(values).all() for values in measured.values())
