"""Variants that are edits against NumPy, in loops over heads and tokens, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variant_oracle import DRAWN, D, H, K, L, N, eager as eager, from_rows, network, row_softmax

import rank_collapse as rc


def test_values_of_the_first_layer_in_all_others():
    config, params, x = network("softmax")
    trace = rc.apply(params, x, config, edit=rc.value_residual(params, x, config, 0.3))
    a, first, state = params.layers.attention, None, DRAWN
    for l in range(L):
        v = np.einsum("nd,hdv->hnv", state, a.w_v[l]) + np.asarray(a.b_v[l])[:, None]
        first = v if first is None else first
        v = 0.7 * v + 0.3 * first
        state = np.einsum("hnm,hmv,hvd->nd", trace.attention[l], v, a.w_o[l]) + np.asarray(a.b_o[l])
    np.testing.assert_allclose(trace.output, state, rtol=1e-12)
    sums = rc.path_contributions(params, x, config, edit=rc.value_residual(params, x, config, 0.3))
    np.testing.assert_allclose(sums.total, trace.output, rtol=1e-9)


def row_by_row(params, state, values, edited):
    """The output of two layers of causal attention, in loops over heads and tokens."""
    a, first = jax.tree.map(np.asarray, params.layers.attention), None
    for l in range(L):
        read, out = edited("attention_input", state, l), np.zeros((N, D)) + a.b_o[l]
        v = np.stack([read @ a.w_v[l, h] + a.b_v[l, h] for h in range(H)])
        first = v if first is None else first
        for h in range(H):
            q, k = (read @ w[l, h] + b[l, h] for w, b in ((a.w_q, a.b_q), (a.w_k, a.b_k)))
            _, mixed = from_rows(row_softmax)(q, k, edited("v", v, l)[h], l, h)
            for i in range(N):
                out[i] += (mixed[i] + values(first[h, i], v[h, i])) @ a.w_o[l, h]
        state = out
    return state


def agree(expected, params, x, config, edit):
    """The output and the sums over paths of the edited network."""
    found = rc.apply(params, x, config, edit=edit).output
    assert np.max(np.abs(found - expected)) < 1e-12 * np.max(np.abs(expected))
    sums = rc.path_contributions(params, x, config, edit=edit)
    np.testing.assert_allclose(sums.total, found, rtol=1e-9)


def test_values_of_the_first_layer_less_those_of_this_one_join_the_output():
    config, params, x = network("softmax")
    for share, edit in ((0.4, rc.neutreno(params, x, config)), (0.7, None)):
        edit = rc.neutreno(params, x, config, share) if edit is None else edit
        expected = row_by_row(params, DRAWN, lambda v1, v, s=share: s * (v1 - v), lambda n, a, l: a)
        agree(expected, params, x, config, edit)


@pytest.mark.parametrize("name", ["attention_input", "v"])
def test_a_canon_layer_adds_the_three_tokens_before(name):
    config, params, x = network("softmax")
    weights = rc.init_canon(jax.random.key(5), config, (name,))
    w = np.asarray(weights[name])
    assert w.shape == ((L, 4, D) if name != "v" else (L, 4, H, K)) and np.abs(w).max() < 0.5
    assert 0.2 < w.std() < 0.4

    def convolved(place, h, l):
        if place != name:
            return h
        out = h.copy()
        for t in range(N):
            for i in range(min(4, t + 1)):
                out[..., t, :] += w[l, i] * h[..., t - i, :]
        return out

    agree(row_by_row(params, DRAWN, lambda *v: 0, convolved), params, x, config, rc.canon(weights))

    def size(weights):
        return jnp.sum(jnp.square(rc.apply(params, x, config, edit=rc.canon(weights)).output))

    step = jax.tree.map(lambda a: 1e-5 * jnp.cos(jnp.arange(a.size)).reshape(a.shape), weights)
    _, slope = jax.jvp(size, (weights,), (step,))
    ends = [size(jax.tree.map(lambda a, b, s=s: a + s * b, weights, step)) for s in (1, -1)]
    assert abs(slope - (ends[0] - ends[1]) / 2) < 1e-7 * abs(slope)


@pytest.mark.slow
def test_canon_of_all_four_branches_changes_no_token_before():
    config = rc.transformer(1, H, D, mask="causal", norm_placement="pre", position="rotary")
    params, names = rc.init(jax.random.key(0), config), ("attention_input", "q", "k", "mlp_input")
    edit = rc.canon(rc.init_canon(jax.random.key(1), config, names, width=7))  # n = 5
    found = rc.apply(params, jnp.asarray(DRAWN), config, edit=edit).output
    short = rc.apply(params, jnp.asarray(DRAWN[:3]), config, edit=edit).output
    np.testing.assert_allclose(found[:3], short, rtol=1e-12)
    with pytest.raises(ValueError, match="'cross_input' is not one of the places"):
        rc.init_canon(jax.random.key(1), config, ("cross_input",))


def test_features_of_the_mean_and_of_the_rest_are_scaled():
    config, params, x = network("softmax")
    common, rest = np.random.default_rng(3).normal(size=(2, L, D))
    trace = rc.apply(params, x, config, edit=rc.feat_scale(common, rest))
    plain = np.asarray(rc.apply(params, x, config).hidden[1])
    mean = plain.mean(axis=0)
    expected = (1 + common[0]) * mean + (1 + rest[0]) * (plain - mean)
    np.testing.assert_allclose(trace.hidden[1], expected, rtol=1e-12)
