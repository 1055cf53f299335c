"""Attention variants against NumPy written out row by row, in float64 under a causal mask."""

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from variant_oracle import (
    CASES,
    DRAWN,
    D,
    H,
    K,
    L,
    N,
    eager as eager,
    from_rows,
    network,
    row_softmax,
    softmax,
)

import rank_collapse as rc
from rank_collapse.network.attention import AttentionContext, normalised
from rank_collapse.network.covers import EVERYTHING


def largest_error(case):
    """Of mixing matrices and states over their size, against NumPy."""
    name, values, head = CASES[case]
    config, params, x = network(name, **values)
    trace, a = rc.apply(params, x, config), jax.tree.map(np.asarray, params.layers.attention)
    state, errors = np.asarray(x), []
    for l in range(L):
        out = np.zeros((N, D)) + a.b_o[l]
        for h in range(H):
            q, k, v = (
                state @ w[l, h] + b[l, h]
                for w, b in ((a.w_q, a.b_q), (a.w_k, a.b_k), (a.w_v, a.b_v))
            )
            m, mixed = head(q, k, v, l, h)
            errors.append(np.max(np.abs(m - trace.attention[l, h])) / np.max(np.abs(m)))
            out = out + mixed @ a.w_o[l, h]
        state = out
        errors.append(np.max(np.abs(state - trace.hidden[l + 1])) / np.max(np.abs(state)))
    return max(errors)


@pytest.mark.parametrize("case", CASES)
def test_a_variant_is_what_its_paper_says(case):
    assert largest_error(case) < 1e-12


def test_every_variant_has_a_case():
    assert {name for name, *_ in CASES.values()} | {"critical", "dyt"} == rc.network.VARIANTS.keys()


@pytest.mark.parametrize("name", ["softpick", "sinks", "differential", "ssd"])
def test_gradients_are_slopes(name):
    """Of the output's size, by values of the variant and tokens, along one direction."""
    values = {"softpick": {"eps": 0.1}}.get(name, CASES[name][1])

    def loss(scale, values):
        config, params, x = network(name, **values)
        return jnp.log(jnp.sum(jnp.square(rc.apply(params, scale * x, config).output)))

    at, step = (jnp.asarray(1.0), jax.tree.map(jnp.asarray, values)), 1e-5
    _, slope = jax.jvp(loss, at, jax.tree.map(jnp.ones_like, at))
    ends = [loss(*jax.tree.map(lambda a, s=s: a + s, at)) for s in (step, -step)]
    assert abs(slope - (ends[0] - ends[1]) / (2 * step)) < 1e-7 * max(1, abs(slope))


def test_variants_start_as_their_authors_start_them():
    plain = rc.san(L, H, D, mask="causal")
    shaped = rc.variant(plain, "shaped")
    params = rc.network.init_variant(jax.random.key(0), shaped, "shaped")
    trace = rc.apply(params, jnp.asarray(DRAWN), shaped)
    np.testing.assert_allclose(trace.attention, np.tile(np.eye(N), (L, H, 1, 1)), atol=1e-15)
    lam, vectors, _ = rc.variant(plain, "differential", key=jax.random.key(0)).mix.args
    np.testing.assert_allclose(lam, [0.2, 0.8 - 0.6 * np.exp(-0.3)])
    assert vectors.shape == (L, 4, K // 2) and 0.05 < np.std(vectors) < 0.2
    np.testing.assert_allclose(
        rc.variant(plain, "retention").normalise.args[0], [[1 - 2**-5, 1 - 2**-6]] * L
    )
    decay, bias = rc.variant(plain, "ssd", key=jax.random.key(0)).mix.args
    assert np.all((decay >= 1) & (decay <= 16))
    step = np.log1p(np.exp(bias))
    assert np.all((step >= 0.001) & (step <= 0.1))


def test_critical_scaling_takes_cosines():
    """softmax(γ ln n cos_ij) of tokens, which the identity mixes."""
    config = rc.variant(rc.san(1, 1, D, attention_skip=False), "critical", gamma=1.7)
    params = rc.network.init_variant(jax.random.key(0), config, "critical")
    x = DRAWN / np.linalg.norm(DRAWN, axis=1, keepdims=True) * np.sqrt(D)
    weights = np.stack([softmax(1.7 * np.log(N) * row) for row in x @ x.T / D])
    np.testing.assert_allclose(rc.apply(params, jnp.asarray(x), config).output, weights @ x)


def test_dynamic_tanh_in_the_place_of_a_norm():
    config = rc.variant(rc.san(1, H, D, norm_placement="post"), "dyt", alpha=0.8)
    plain = config.replace(norm_placement="none")
    params = draws.parameters(config, bias_scale=0.0, gain_scale=0.0)
    x = jnp.asarray(DRAWN).at[0].set(0)
    expected = np.tanh(0.8 * np.asarray(rc.apply(params, x, plain).output))
    np.testing.assert_allclose(rc.apply(params, x, config).output, expected, atol=1e-14)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_another_alpha_of_dynamic_tanh_is_the_same_program(placement):
    """Traced, swept by vmap, with a gradient that is its slope."""
    config = rc.variant(rc.san(1, 1, D, norm_placement=placement, final_norm=True), "dyt")
    params, programs = draws.parameters(config, bias_scale=0.0, gain_scale=0.0), []

    def size(alpha):
        programs.append(alpha)
        own = rc.variant(config.replace(norm="layer", norm_values=None), "dyt", alpha=alpha)
        return jnp.log(jnp.sum(jnp.square(rc.apply(params, jnp.asarray(DRAWN), own).output)))

    with jax.disable_jit(False):
        value = jax.jit(jax.value_and_grad(size))
        (low, _), (_, slope), (high, _) = (value(0.7 + s) for s in (-1e-5, 0.0, 1e-5))
        assert len(programs) == 1
        assert abs(slope - (high - low) / 2e-5) < 1e-7
        swept = jax.jit(jax.vmap(size))(jnp.array([0.7 - 1e-5, 0.7 + 1e-5]))
    np.testing.assert_allclose(swept, [low, high], rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_the_normalised_transformer_stays_on_the_sphere(alpha):
    config = rc.design(rc.san(1, H, D), "ngpt").replace(skip_gain=1 - alpha, branch_gain=alpha)
    params = draws.parameters(config, bias_scale=0.0, gain_scale=0.0)
    trace = rc.apply(params, jnp.asarray(DRAWN), config)

    def on_sphere(a):
        return np.sqrt(D) * a / np.linalg.norm(a, axis=1, keepdims=True)

    branch = on_sphere(np.asarray(trace.attention_branch[0]))
    expected = on_sphere(DRAWN + alpha * (branch - DRAWN))
    np.testing.assert_allclose(trace.output, expected, atol=1e-12)


test_what_is_refused = refused(
    [
        ("shapd", {}, {}, "variant 'shapd' is not one of"),
        ("shaped", {}, {"delta": 1}, "no value 'delta', only"),
        ("a_perp", {}, {}, "give num_tokens"),
        ("ssd", {"mask": "none"}, {}, "does not cover mask='none'"),
        ("gated", {"score": "additive"}, {}, "does not cover score='additive'"),
        ("sinks", {"mixing": rc.network.Mixing(1.0)}, {}, "does not cover mixing="),
        ("differential", {"d_qk": 3}, {}, "d_qk=3 is odd"),
        ("critical", {}, {}, "num_heads=2"),
        ("critical", {"norm_placement": "post"}, {}, "does not cover norm_placement='post'"),
        ("critical", {"d_qk": 3}, {}, "does not cover d_qk=3"),
    ],
    lambda name, fields, values: rc.variant(
        rc.san(1, H, D, **({"mask": "causal"} | fields)), name, **values
    ),
)


def applied(config):
    assert EVERYTHING.refusal(config) is None
    return rc.apply(draws.parameters(config), jnp.asarray(DRAWN), config)


CANON = ("attention_input", "q", "k", "mlp_input")
test_what_is_of_another_shape_or_at_no_place_is_refused = refused(
    [
        (lambda: applied(rc.san(1, H, D, normalise=lambda s, context: s[0])), "normalise gave"),
        (
            lambda: applied(rc.san_skip(2, H, D, mix=lambda q, k, v, context: v)),
            r"mix gave \(\(.*\), None\), which are not the shapes",
        ),
        (
            lambda: rc.network.init_canon(
                jax.random.key(1), rc.transformer(1, H, D), ("cross_input",)
            ),
            "'cross_input' is not one of the places",
        ),
    ]
)


def test_mix_may_return_its_matrix_alone():
    """It is M: the values are mixed by it, in sums of paths too; softmax is then the softmax."""

    def weights(q, k, v, context):
        return jax.nn.softmax(q @ k.swapaxes(1, 2) / jnp.sqrt(q.shape[-1]))

    plain, x = rc.san_skip(2, H, D), jnp.asarray(DRAWN)
    own, params = plain.replace(mix=weights), draws.parameters(plain)
    want, found = (rc.apply(params, x, config) for config in (plain, own))
    np.testing.assert_allclose(found.attention, want.attention, rtol=1e-5)
    np.testing.assert_allclose(found.output, want.output, rtol=1e-5, atol=1e-6)
    sums = rc.path_contributions(params, x, own)
    np.testing.assert_allclose(sums.total, want.output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["retention", "linear"])
def test_padding_on_the_left_changes_no_other_token(name):
    config, params, x = network(name)
    found = rc.apply(params, x, config, mask=jnp.arange(N) >= 2).output[2:]
    np.testing.assert_allclose(found, rc.apply(params, x[2:], config).output, rtol=1e-12)


def test_equal_scores_in_half_precision_and_a_key_that_a_bias_excludes():
    """The first have no weights of softpick, the second keeps ssmax finite."""
    normalise = network("softpick")[0].normalise
    found = normalised(jnp.zeros((H, N, N), jnp.float16), AttentionContext(), normalise)
    assert not found.any()
    scores = jnp.zeros((H, N, N)).at[:, :, 0].set(-jnp.inf)
    found = normalised(scores, AttentionContext(layer=0), network("ssmax")[0].normalise)
    np.testing.assert_allclose(found[:, :, 1:], 1 / (N - 1), rtol=1e-12)


# Variants that are edits against NumPy, in loops over heads and tokens, in float64.


def test_values_of_the_first_layer_in_all_others():
    config, params, x = network("softmax")
    trace = rc.apply(params, x, config, edit=rc.network.value_residual(params, x, config, 0.3))
    a, first, state = params.layers.attention, None, DRAWN
    for l in range(L):
        v = np.einsum("nd,hdv->hnv", state, a.w_v[l]) + np.asarray(a.b_v[l])[:, None]
        first = v if first is None else first
        v = 0.7 * v + 0.3 * first
        state = np.einsum("hnm,hmv,hvd->nd", trace.attention[l], v, a.w_o[l]) + np.asarray(a.b_o[l])
    np.testing.assert_allclose(trace.output, state, rtol=1e-12)
    sums = rc.path_contributions(
        params, x, config, edit=rc.network.value_residual(params, x, config, 0.3)
    )
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


@pytest.mark.parametrize("name", ["attention_input", "v"])
def test_a_canon_layer_adds_the_three_tokens_before(name):
    config, params, x = network("softmax")
    weights = rc.network.init_canon(jax.random.key(5), config, (name,))
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

    agree(
        row_by_row(params, DRAWN, lambda *v: 0, convolved),
        params,
        x,
        config,
        rc.network.canon(weights),
    )

    def size(weights):
        return jnp.sum(
            jnp.square(rc.apply(params, x, config, edit=rc.network.canon(weights)).output)
        )

    step = jax.tree.map(lambda a: 1e-5 * jnp.cos(jnp.arange(a.size)).reshape(a.shape), weights)
    _, slope = jax.jvp(size, (weights,), (step,))
    ends = [size(jax.tree.map(lambda a, b, s=s: a + s * b, weights, step)) for s in (1, -1)]
    assert abs(slope - (ends[0] - ends[1]) / 2) < 1e-7 * abs(slope)


@pytest.mark.full
def test_canon_of_all_four_branches_changes_no_token_before():
    config = rc.transformer(1, H, D, mask="causal", norm_placement="pre", position="rotary")
    params = draws.parameters(config)
    edit = rc.network.canon(
        rc.network.init_canon(jax.random.key(1), config, CANON, width=7)
    )  # n = 5
    found = rc.apply(params, jnp.asarray(DRAWN), config, edit=edit).output
    short = rc.apply(params, jnp.asarray(DRAWN[:3]), config, edit=edit).output
    np.testing.assert_allclose(found[:3], short, rtol=1e-12)
