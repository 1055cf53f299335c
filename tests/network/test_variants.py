"""Attention variants against NumPy written out row by row, in float64 under a causal mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import variants
from rank_collapse.network.attention_weights import AttentionContext
from rank_collapse.network.covers import EVERYTHING
from tests.oracles import draws
from tests.oracles.variants import (
    CASES,
    DRAWN,
    D,
    H,
    L,
    N,
    in_float64 as in_float64,
    network,
)
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals


def largest_error(case):
    """Computes the largest relative error of mixing matrices and states, against NumPy."""
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
    assert {name for name, *_ in CASES.values()} == rc.network.VARIANTS.keys()


def test_variants_start_as_their_authors_start_them():
    plain = rc.san(L, H, D, mask="causal")
    shaped = rc.variant(plain, "shaped")
    params = rc.network.init_variant(jax.random.key(0), shaped, "shaped")
    trace = rc.apply(params, jnp.asarray(DRAWN), shaped)
    assert_close(trace.attention, np.tile(np.eye(N), (L, H, 1, 1)), atol=1e-15)
    assert_close(rc.variant(plain, "retention").normalise.args[0], [[1 - 2**-5, 1 - 2**-6]] * L)


@parametrize_refusals(
    [
        ("shapd", {}, {}, "variant 'shapd' is not one of"),
        *(
            (name, {}, {}, rf"'{name}' is a network, .*: use rc.{name}\(")
            for name in ("san", "san_mlp", "san_skip", "transformer")
        ),
        ("shaped", {}, {"delta": 1}, "no value 'delta', only"),
        ("retention", {"mask": "none"}, {}, "does not cover mask='none'"),
        ("linear", {"score": "additive"}, {}, "does not cover score='additive'"),
        ("linear", {"scale_scores": False}, {}, "does not cover scale_scores=False"),
        ("linear", {"temperature": 2.0}, {}, "does not cover temperature=2.0"),
        ("linear", {"qk_norm": "head"}, {}, "does not cover qk_norm='head'"),
        ("linear", {"position": "rotary"}, {}, "does not cover position='rotary'"),
        ("linear", {"score_cap": 5.0}, {}, "does not cover score_cap=5.0"),
        ("centred", {"normalise": np.tanh}, {}, "does not cover normalise="),
        ("shaped", {"mix": np.tanh}, {}, "does not cover mix="),
        ("softmax", {}, {"alpha": 1.0}, "no value 'alpha'"),
        ("sinks", {"mixing": rc.network.Mixing(1.0)}, {}, "does not cover mixing="),
    ]
)
def test_what_is_refused(arguments, message):
    name, fields, values = arguments
    is_refused(
        message,
        lambda: rc.variant(rc.san(1, H, D, **({"mask": "causal"} | fields)), name, **values),
    )


def test_values_start_where_the_authors_have_them():
    config, mixing = rc.san(2, 3, 12, mask="causal"), rc.network.Mixing
    for name, values, expected in (
        ("softmax", {}, None),
        ("centred", {}, mixing(0.0, 1.0, -1.0)),
        ("shaped", {}, mixing(1.0, 1.0, -1.0)),
        ("shaped", {"alpha": 2.0, "gamma": 0.5}, mixing(2.0, 1.0, -0.5)),
        ("shaped", {"beta": 0.25}, mixing(1.0, 0.25, -1.0)),
        ("attn_scale", {}, mixing(0.0, 1.0, 0.0)),
        ("attn_scale", {"excess": 0.5}, mixing(0.0, 1.5, -0.5)),
    ):
        assert rc.variant(config, name, **values) == config.replace(mixing=expected)
    assert not np.any(rc.variant(config, "sinks").normalise.args[0])
    assert rc.variant(config, "sinks").normalise.args[0].shape == (2, 3)
    assert rc.variant(config, "sigmoid").normalise.args == (None,)
    assert rc.variant(config, "sigmoid", bias=0.5).normalise.args == (0.5,)
    assert rc.variant(config, "linear").normalise is None


def test_only_shaped_attention_starts_with_other_parameters():
    config, key = rc.san(1, 2, 4), jax.random.key(0)
    plain, shaped, other = (
        rc.network.init_variant(key, config, name, 3.0, 2.0).layers.attention
        for name in ("softmax", "shaped", "sigmoid")
    )
    drawn = rc.init(key, config, 3.0, 2.0).layers.attention
    assert not shaped.w_q.any() and drawn.w_q.all() and drawn.b_q.all()
    for ours in (plain, other, shaped.replace(w_q=drawn.w_q)):
        jax.tree.map(np.testing.assert_array_equal, ours, drawn)


def test_masks_of_queries_and_of_heads_leave_out_their_keys():
    """Rows without a key are 0; by each head's mask, of all weights of scores and of `linear`."""
    mask = np.array([[[1, 0, 1], [0, 0, 0], [1, 1, 1]], [[1, 1, 1], [0, 1, 0], [1, 0, 0]]], bool)
    scores, sizes = jax.device_put(DRAWN[:2, :3, None] * DRAWN[None, :3, 5:]), (2, 2)
    for allowed in (mask, mask[0]):
        context = AttentionContext(mask=jnp.asarray(allowed), layer=1, sizes=sizes)
        allowed = np.broadcast_to(allowed, (2, 3, 3))
        s, bias = np.asarray(scores), np.array([[7.0, 7.0], [0.3, -0.4]])
        exp = np.exp(s) * allowed
        decay, distance = (
            np.array([0.5, 0.9]),
            np.abs(np.subtract.outer(np.arange(3), np.arange(3))),
        )
        d = decay[:, None, None] ** distance * allowed
        p = s * d / np.sqrt(np.maximum(d.sum(-1, keepdims=True), 1e-30))
        linear_products = exp_plus_one(s) @ exp_plus_one(s).swapaxes(1, 2) * allowed
        total = linear_products.sum(-1, keepdims=True)
        for weights, expected in (
            (
                variants.with_sink(bias, scores, context),
                exp / (exp.sum(-1, keepdims=True) + np.exp(bias[1])[:, None, None]),
            ),
            (
                variants.sigmoid(bias, scores, context),
                allowed / (1 + np.exp(-s - bias[1][:, None, None])),
            ),
            (variants.sigmoid(None, scores, context), allowed / (1 + 3 * np.exp(-s))),
            (
                variants.retention(decay[None].repeat(2, 0), scores, context),
                p / np.maximum(abs(p.sum(-1, keepdims=True)), 1),
            ),
            (
                variants.linear(scores, scores, scores, context)[0],
                linear_products / np.where(total == 0, 1, total),
            ),
        ):
            assert_close(weights, expected, atol=1e-12)
    # of two queries, which are fewer than the keys
    allowed, exp = mask[:, :2], exp_plus_one(s)
    context, scores = AttentionContext(mask=jnp.asarray(allowed)), scores[:, :2]
    weights = variants.sigmoid(None, scores, context)
    assert_close(weights, allowed / (1 + 3 * np.exp(-s[:, :2])), atol=1e-12)
    sums = np.exp(s[:, :2]) * allowed
    weights = variants.with_sink(0.0, scores, context)
    assert_close(weights, sums / (1 + sums.sum(-1, keepdims=True)), atol=1e-12)
    products = exp[:, :2] @ exp.swapaxes(1, 2) * allowed
    weights = variants.linear(scores, s, s, context)[0]
    total = products.sum(-1, keepdims=True)
    assert_close(weights, products / np.where(total == 0, 1, total), atol=1e-12)
    assert variants.allowed_keys(scores, AttentionContext()).shape == (1, 2, 3)


def exp_plus_one(a):
    """Computes elu + 1."""
    return np.where(a > 0, a + 1, np.exp(np.minimum(a, 0)))


def test_the_divisor_of_retention_has_no_gradient():
    """Of one row of one key the weight is S/|S|: its gradient is that of S alone, 1/|S|."""
    scores = jnp.full((1, 1, 1), 4.0)
    weight = lambda s: variants.retention(0.5, s, AttentionContext()).sum()  # noqa: E731
    assert weight(scores) == 1 and jax.grad(weight)(scores).item() == 0.25


def run_network(config):
    assert EVERYTHING.refusal(config) is None
    return rc.apply(draws.parameters(config), jnp.asarray(DRAWN), config)


def run_sinks(shape):
    return run_network(rc.variant(rc.san(2, H, D, mask="causal"), "sinks", sink=np.zeros(shape)))


def run_with_edit(place):
    config = rc.transformer(1, H, D)
    return rc.apply(draws.parameters(config), jnp.asarray(DRAWN), config, edit={place: abs})


def edit_full_output():
    config = rc.san(1, H, D, mix=lambda q, k, v, context: (q @ k.swapaxes(1, 2), 0 * q))
    edit = {"weights": lambda weights, layer: weights}
    return rc.apply(draws.parameters(config), jnp.asarray(DRAWN), config, edit=edit)


def attend_to_other_tokens():
    scores = jnp.zeros((H, 3, 4))
    return variants.retention(0.5, scores, AttentionContext())


@parametrize_refusals(
    [
        (edit_full_output, "its weights cannot be edited or dropped"),
        (
            attend_to_other_tokens,
            r"equal numbers of keys and queries, not scores of shape \(2, 3, 4\)",
        ),
        (
            lambda: run_network(rc.san(1, H, D, normalise=lambda s, context: s[0])),
            "normalise returned",
        ),
        (
            lambda: run_network(rc.san_skip(2, H, D, mix=lambda q, k, v, context: v)),
            r"mix returned the shapes \(\(.*\), None\), but \(M, out\) must have",
        ),
        (lambda: run_with_edit("cross_input"), "edit point 'cross_input' is not one of"),
        (lambda: run_sinks((3, H)), r"value of shape \(3, 2\) is not a number"),  # 2 layers
        (lambda: run_sinks((1, H)), r"value of shape \(1, 2\) is not a number"),
    ]
)
def test_what_is_of_another_shape_or_at_no_place_is_refused(arguments, message):
    is_refused(message, *arguments)


def test_mix_may_return_its_matrix_alone():
    """The matrix M mixes the values, also in sums of paths. With softmax it is plain attention."""

    def weights(q, k, v, context):
        return jax.nn.softmax(q @ k.swapaxes(1, 2) / jnp.sqrt(q.shape[-1]))

    plain, x = rc.san_skip(2, H, D), jnp.asarray(DRAWN)
    custom, params = plain.replace(mix=weights), draws.parameters(plain)
    expected, custom_trace = (rc.apply(params, x, config) for config in (plain, custom))
    np.testing.assert_allclose(custom_trace.attention, expected.attention, rtol=1e-5)
    np.testing.assert_allclose(custom_trace.output, expected.output, rtol=1e-5, atol=1e-6)
    sums = rc.path_contributions(params, x, custom)
    np.testing.assert_allclose(sums.total, expected.output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["retention", "linear"])
def test_padding_on_the_left_changes_no_other_token(name):
    config, params, x = network(name)
    padded_output = rc.apply(params, x, config, mask=jnp.arange(N) >= 2).output[2:]
    assert_close(padded_output, rc.apply(params, x[2:], config).output, rtol=1e-12)
