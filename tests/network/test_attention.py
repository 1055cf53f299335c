"""Attention against loops in numpy, and its invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import attention as attn, positions
from rank_collapse.network.attention_weights import AttentionContext, equal_weights, softmax
from rank_collapse.network.embedding import sinusoidal_positions
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals


def one_layer(key=0, **fields):
    config = rc.san(1, 3, 12, **({"d_qk": 5, "d_v": 3} | fields))
    params = draws.parameters(config, key, 1.5, 0.4)
    return config, jax.tree.map(lambda a: a[0], params.layers.attention)


def tokens(n, d=12, seed=7):
    return draws.tokens(n, d, seed, shift=0.0)


@pytest.mark.parametrize("score, scale", [("additive", True), ("dot", True), ("dot", False)])
def test_attention_written_out_number_by_number(score, scale):
    """Every sum of the definition as a loop over one index, with padding and biases."""
    _, p = one_layer(3, score=score)
    x, y, mask = tokens(3), tokens(4, seed=9), [True, False, True, True]
    context = AttentionContext(mask=positions.combine_masks(jnp.asarray(mask)))
    options = {"score": score, "scale": scale, "temperature": 1.7, "context": context}
    out, weights = attn.multi_head_attention(p, x, y, **options)
    q, k, v = (
        np.asarray(attn.project_heads(*a), float)
        for a in ((x, p.w_q, p.b_q), (y, p.w_k, p.b_k), (y, p.w_v, p.b_v))
    )
    expected = np.tile(np.asarray(p.b_o, float), (3, 1))
    for h in range(3):
        for i in range(3):
            row = []
            for j in range(4):
                s = 0.0
                for a in range(5):
                    if score == "additive":
                        s += float(p.v_score[h, a]) * np.tanh(q[h, i, a] + k[h, j, a])
                    else:
                        s += q[h, i, a] * k[h, j, a] / (np.sqrt(5) if scale else 1)
                row.append(np.exp(s / 1.7) if mask[j] else 0.0)
            row = [e / sum(row) for e in row]
            np.testing.assert_allclose(weights[h, i], row, rtol=2e-5, atol=1e-7)
            for j in range(4):
                for a in range(3):
                    expected[i] += row[j] * v[h, j, a] * np.asarray(p.w_o, float)[h, a]
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def attend_by_sums(**options):
    """Attends by a function that gives weights and the sum of all values."""

    def mix(q, k, v, context):
        total = jnp.broadcast_to(v.sum(1, keepdims=True), (*q.shape[:2], v.shape[2]))
        return jnp.ones((*q.shape[:2], k.shape[1])), total

    options = {"mix": mix} | options
    return attn.multi_head_attention(one_layer()[1], tokens(3), tokens(4), **options)


def test_edited_weights_mix_the_values_with_and_without_a_mask():
    """Those that a mask excludes stay 0; other edits of the same call count, too."""
    _, p = one_layer(3)
    x, y = tokens(3), tokens(4, seed=9)
    exists = np.array([True, True, False, True])
    edit = {"weights": lambda value, layer: 0 * value + 0.5, "v": lambda value, layer: 3 * value}
    v = np.asarray(attn.project_heads(y, p.w_v, p.b_v))
    for mask, used in ((None, np.ones(4)), (jnp.asarray(exists)[None], exists)):
        context = AttentionContext(mask=mask)
        out, weights = attn.multi_head_attention(p, x, y, context=context, edit=edit)
        np.testing.assert_array_equal(weights, np.broadcast_to(0.5 * used, (3, 3, 4)))
        mixed = np.einsum("hnm,hmv->hnv", np.asarray(weights), 3 * v)
        assert_close(out, np.einsum("hnv,hvd->nd", mixed, p.w_o) + np.asarray(p.b_o), atol=1e-5)


def test_a_function_that_gives_the_output_takes_the_place_of_the_weights():
    _, p = one_layer()
    out, weights = attend_by_sums()
    total = np.asarray(attn.project_heads(tokens(4), p.w_v, p.b_v)).sum(1)
    assert_close(out, np.tile(np.einsum("hv,hvd->d", total, p.w_o) + p.b_o, (3, 1)), atol=1e-5)
    assert weights.shape == (3, 3, 4) and np.all(weights == 1)


@parametrize_refusals(
    [
        (
            lambda: attn.attention_scores(one_layer()[1], tokens(3), tokens(3), score="cosine"),
            "score='cosine'",
        ),
        (
            lambda: attn.multi_head_attention(one_layer()[1], tokens(3)[None], tokens(3)),
            r"x of shape \(1, 3, 12\) is not \[tokens, d\]; use jax.vmap for a batch",
        ),
        (
            lambda: attn.multi_head_attention(one_layer()[1], tokens(3), tokens(3)[0]),
            r"y of shape \(12,\) is not \[tokens, d\]",
        ),
        (
            lambda: attn.multi_head_attention(
                one_layer()[1], tokens(3), tokens(3), edit={"q": abs, "keys": abs}
            ),
            "edit point 'keys' is not one of .* of attention",
        ),
        (lambda: attend_by_sums(dropout_key=jax.random.key(0)), "cannot be edited or dropped"),
        (lambda: attend_by_sums(edit={"weights": abs}), "cannot be edited or dropped"),
        (lambda: attend_by_sums(mix=lambda q, k, v, _: (v, v)), "mix returned the shapes"),
    ]
)
def test_what_is_no_attention_of_one_example(arguments, message):
    is_refused(message, *arguments)


def test_a_row_without_keys_is_uniform_and_finite():
    mask = jnp.array([[True, False, True], [False, False, False]])
    weights = softmax(jnp.array([[5.0, 1.0, 2.0], [5.0, 1.0, 2.0]]), mask)
    assert weights[0, 1] == 0.0
    np.testing.assert_allclose(weights[1], 1 / 3, rtol=1e-6)


def test_softmax_of_bfloat16_is_computed_in_float32():
    scores = jnp.linspace(0, 8, 300).astype(jnp.bfloat16)[None]
    weights = softmax(scores)
    assert weights.dtype == jnp.bfloat16
    expected = jax.nn.softmax(scores.astype(jnp.float32), -1)
    assert_close(weights.astype(jnp.float32), expected, rtol=2**-8)


def test_relative_key_scores_match_loops():
    _, p = one_layer(position="relative_key")
    x = tokens(5)
    n, d = x.shape
    encodings = sinusoidal_positions(jnp.arange(n - 1.0, -n, -1.0), d)
    segments = jnp.array([0, 0, 1, 1, 1])
    context = AttentionContext(relative=encodings, segments=segments)
    scores = attn.attention_scores(p, x, x, context=context)
    r = p.relative
    frequency = 10000.0 ** (-np.arange(0, d, 2) / d)
    for h in range(3):
        for i in range(n):
            for j in range(n):
                q = x[i] @ p.w_q[h]
                angle = (i - j) * frequency
                encoding = np.concatenate([np.sin(angle), np.cos(angle)])
                kind = int(segments[i] != segments[j])
                expected = (
                    (q + p.b_q[h]) @ (x[j] @ p.w_k[h] + p.b_k[h])
                    + (q + r.b_r[h]) @ (encoding @ r.w_r[h])
                    + (q + r.b_s[h]) @ r.segment[kind, h]
                ) / np.sqrt(5.0)
                np.testing.assert_allclose(scores[h, i, j], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_derivatives_of_attention_are_those_of_plain_products(x64, monkeypatch):
    _, params = one_layer()
    params, x = jax.tree.map(lambda a: a.astype(jnp.float64), (params, tokens(4)))

    def loss(p, y):
        out, weights = attn.multi_head_attention(p, y, y)
        return jnp.sum(jnp.sin(out)) + jnp.sum(weights**2)

    args = (params, x)
    tangent = jax.tree.map(jnp.cos, args)

    def compute_derivatives():
        gradient = jax.grad(loss, argnums=(0, 1))
        gradient_tangent = jax.jvp(gradient, args, tangent)
        return (
            gradient_tangent,
            jax.jvp(loss, args, tangent),
            jax.jacrev(jax.grad(loss, 1), 1)(*args),
        )

    derivatives = compute_derivatives()
    monkeypatch.setattr(attn, "matrix_product", jnp.matmul)
    for a, b in zip(
        jax.tree.leaves(derivatives), jax.tree.leaves(compute_derivatives()), strict=True
    ):
        assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_equal_scores_under_a_mask_are_shared_by_the_allowed_keys():
    """Row i of a causal mask is 1/i on the first i tokens."""
    weights = equal_weights(AttentionContext(positions.causal_mask(4)), 4, 4, jnp.float32)
    expected = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    assert_close(weights[0], expected, atol=1e-7)
