"""From scores to weights: softmax under masks, mixing, values by layer and head, local layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.network.attention_config import Mixing
from rank_collapse.network.attention_weights import (
    AttentionContext,
    attention_weights,
    equal_weights,
    mixing_matrix,
    softmax,
)
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

SCORES = np.random.default_rng(0).normal(size=(2, 3, 3)).astype(np.float32)
MASK = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1]], bool)


def test_softmax_is_over_allowed_keys_and_uniform_where_there_are_none():
    p = np.asarray(softmax(SCORES, jnp.asarray(MASK)))
    exponentials = np.exp(SCORES) * MASK
    expected = exponentials / np.maximum(exponentials.sum(-1, keepdims=True), 1e-30)
    np.testing.assert_allclose(p[:, [0, 2]], expected[:, [0, 2]], rtol=1e-6)
    np.testing.assert_allclose(p[:, 1], 1 / 3, rtol=1e-6)


def test_low_precision_is_summed_in_float32():
    scores = jnp.zeros((1, 1, 1000), jnp.bfloat16)
    p = softmax(scores)
    assert p.dtype == jnp.bfloat16 and float(p[0, 0, 0]) == pytest.approx(1e-3, rel=1e-2)


def test_equal_tokens_attend_by_bias_and_mask_alone():
    bias = jnp.asarray(SCORES)
    context = AttentionContext(bias=bias, mask=jnp.asarray(MASK))
    assert_close(equal_weights(context, 3, 3, jnp.float32), softmax(bias, jnp.asarray(MASK)))
    assert equal_weights(AttentionContext(), 3, 4, jnp.float32).shape == (1, 3, 4)


def test_weights_of_the_callers_function_have_the_shape_of_scores():
    context = AttentionContext()
    halves = attention_weights(jnp.asarray(SCORES), context, lambda s, c: 0 * s + 0.5)
    np.testing.assert_array_equal(halves, np.full((2, 3, 3), 0.5))
    low = jnp.asarray(SCORES[..., :1], jnp.bfloat16)  # one key, and weights of another type
    half = attention_weights(low, context, lambda s, c: jnp.full(s.shape, 0.5, jnp.float32))
    assert half.dtype == jnp.bfloat16 and np.all(half == 0.5)
    message = r"normalise returned shape \(3, 3\) for scores of shape \(2, 3, 3\)"
    is_refused(message, attention_weights, jnp.asarray(SCORES), context, lambda s, c: s[0])


def test_mixing_is_its_formula_with_gains_of_each_head():
    p, mask = softmax(SCORES), jnp.asarray(np.tri(3, dtype=bool))
    mixing = Mixing(jnp.array([0.4, 1.0]), 0.7, jnp.array([-0.2, 0.0]))
    m = mixing_matrix(p, mixing, mask)
    prefix = np.tri(3) / np.arange(1, 4)[:, None]
    for head, (alpha, gamma) in enumerate(((0.4, -0.2), (1.0, 0.0))):
        expected = alpha * np.eye(3) + 0.7 * np.asarray(p[head]) + gamma * prefix
        assert_close(m[head], expected, rtol=1e-6, atol=1e-7)
    low = mixing_matrix(p.astype(jnp.bfloat16), mixing, mask)
    assert low.dtype == jnp.bfloat16
    assert_close(low.astype(jnp.float32), m, atol=2**-7)
    assert mixing_matrix(p, None, mask) is p
    is_refused("mixing needs equal numbers of keys and queries", mixing_matrix, p[:, :2], mixing)


def test_a_value_is_that_of_the_layer_and_of_the_head():
    values = np.arange(6.0).reshape(3, 2)
    context = AttentionContext(layer=1, sizes=(3, 2))
    broadcast = context.broadcast_to_heads
    assert broadcast(values, 2).tolist() == [[[2]], [[3]]]
    assert broadcast(values[:, 0], 2).tolist() == [[[2]], [[2]]]
    assert broadcast(7.0, 2).tolist() == [[[7]], [[7]]]
    assert context.replace(head=1).broadcast_to_heads(values, 1).tolist() == [[[3]]]
    is_refused(r"value of shape \(2, 2\) is not a number", broadcast, values[:2], 2)


def test_a_local_layer_sees_near_keys_and_has_its_own_rotation():
    distance = jnp.abs(jnp.arange(3)[:, None] - jnp.arange(3)[None, :])
    rotary, local = ((jnp.full((3, 2), a),) * 2 for a in (0.5, 0.25))
    context = AttentionContext(
        mask=jnp.asarray(np.tri(3, dtype=bool)),
        distance=distance,
        rotary=rotary,
        local_rotary=local,
    )
    near = context.for_layer(1)
    assert near.mask.tolist() == (np.tri(3) * (np.asarray(distance) <= 1)).astype(bool).tolist()
    np.testing.assert_array_equal(near.rotary[0], local[0])
    np.testing.assert_array_equal(context.for_layer(2**30).rotary[0], rotary[0])
    head_masks = np.stack([np.tri(3, dtype=bool), np.eye(3, dtype=bool)])
    near = context.replace(mask=jnp.asarray(head_masks)).for_layer(1)
    np.testing.assert_array_equal(near.mask, head_masks & (np.asarray(distance) <= 1))
    cos, sin = context.for_layer(None, False).rotary
    assert np.all(cos == 1) and np.all(sin == 0)
    assert jax.tree.structure(context.for_layer(None)) == jax.tree.structure(context)
