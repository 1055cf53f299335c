"""Dropout: within statistics, by key, and independent between branches."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.network import dropout
from tests.support.refusals import is_refused

KEYS, SHAPE = 1500, (30, 48)


def draw_decisions(rate):
    """Draws dropout decisions [keys, entries] as 0 and 1."""
    keys = jax.random.split(jax.random.key(0), KEYS)
    out = jax.jit(jax.vmap(lambda k, r: dropout.dropout(k, jnp.ones(SHAPE), r), (0, None)))
    return np.asarray(out(keys, rate) == 0).reshape(KEYS, -1).astype(float)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_and_independence_within_statistics(rate):
    centred = draw_decisions(rate) - rate
    variance = rate * (1 - rate)
    assert abs(centred.mean()) < 4 * np.sqrt(variance / centred.size)
    # Correlations of neighbours, of rows of the array, and of consecutive keys.
    for lag in (1, 2, 3, 8, 16, 48, 64):
        products = centred[:, lag:] * centred[:, :-lag] / variance
        assert abs(products.mean()) < 4.5 / np.sqrt(products.size), lag
    products = centred[1:] * centred[:-1] / variance
    assert abs(products.mean()) < 4.5 / np.sqrt(products.size)
    # Totals per entry and per key vary as binomial counts do.
    for axis in (0, 1):
        totals = centred.sum(axis=axis)
        ratio = totals.var() / (variance * centred.shape[axis])
        assert abs(ratio - 1) < 5 * np.sqrt(2 / len(totals))


def test_kept_entries_are_scaled_and_the_limits_hold():
    x = jnp.arange(1.0, 1001.0)
    out = np.asarray(dropout.dropout(jax.random.key(1), x, 0.25))
    is_nonzero = out != 0
    np.testing.assert_allclose(out[is_nonzero], np.asarray(x)[is_nonzero] / 0.75, rtol=1e-6)
    np.testing.assert_array_equal(dropout.dropout(jax.random.key(1), x, 0.0), x)
    np.testing.assert_array_equal(dropout.dropout(jax.random.key(1), x, 1.0), 0)


def test_low_precision_keeps_the_entries_of_float32_and_its_own_dtype():
    """In bfloat16 a rate of 0.3 is 0.301, which would drop 16 more of 20,000."""
    words, x = np.array([5, 6], np.uint32), jnp.ones(20000)
    full = dropout.dropout(jnp.array(words), x, 0.3)
    half = dropout.dropout(jnp.array(words), x.astype(jnp.bfloat16), 0.3)
    assert half.dtype == jnp.bfloat16 and full.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(half) == 0, np.asarray(full) == 0)


@pytest.mark.full
def test_a_key_decides_alike_alone_and_under_vmap_and_in_any_dtype():
    keys = jax.random.split(jax.random.key(2), 4)
    x = jnp.ones((5, 7))
    together = jax.vmap(lambda k: dropout.dropout(k, x, 0.5))(keys)
    for key, row in zip(keys, together, strict=True):
        np.testing.assert_array_equal(dropout.dropout(key, x, 0.5), row)
        words = dropout.dropout_words(key)
        np.testing.assert_array_equal(dropout.dropout(words, x, 0.5), row)
        np.testing.assert_array_equal(dropout.dropout_words(words), words)
        half = dropout.dropout(key, x.astype(jnp.bfloat16), 0.5)
        assert half.dtype == jnp.bfloat16
        np.testing.assert_array_equal(half.astype(jnp.float32), row)
    assert (together[0] != together[1]).any()


def test_words_of_a_part_do_not_depend_on_how_many_parts_there_are():
    """Nor are they the bits by which the trunk drops its first entries."""
    trunk = dropout.dropout_words(jax.random.key(3))
    branches = np.asarray(dropout.dropout_branches(trunk, 40))
    np.testing.assert_array_equal(dropout.dropout_branches(trunk, 3), branches[:3])
    np.testing.assert_array_equal(dropout.dropout_branches(jax.random.key(3), 3), branches[:3])
    assert len(np.unique(branches, axis=0)) == 40
    from_key, from_words = (
        dropout.dropout(k, jnp.ones(9), 0.5) for k in (jax.random.key(3), trunk)
    )
    np.testing.assert_array_equal(from_key, from_words)
    by_word = (branches.ravel() >> 8) < 2**23  # as the entries of a rate of a half
    dropped = np.asarray(dropout.dropout(trunk, jnp.ones(80), 0.5)) == 0
    assert 0.2 < np.mean(by_word != dropped) < 0.8
    message = r"dropout_key of shape \(3,\) is not a random key"
    is_refused(message, dropout.dropout_words, jnp.ones(3, jnp.uint32))


def test_either_word_of_a_key_decides():
    """Of 2,000 entries two keys that differ in one word drop half alike, to 5 deviations."""
    words = np.array([[1, 2], [1, 3], [2, 2]], np.uint32)
    kept = [np.asarray(dropout.dropout(key, jnp.ones(2000), 0.5)) != 0 for key in words]
    for first, second in itertools.combinations(kept, 2):
        assert abs(np.mean(first == second) - 0.5) < 5 * 0.5 / np.sqrt(2000)


@pytest.mark.full
def test_branches_are_independent_of_each_other_and_of_their_trunk():
    trunk = dropout.dropout_words(jax.random.key(3))
    branches = dropout.dropout_branches(trunk, KEYS)
    np.testing.assert_array_equal(dropout.dropout_branches(trunk, 3), branches[:3])
    assert len(np.unique(np.asarray(branches), axis=0)) == KEYS
    drop = jax.vmap(lambda w: dropout.dropout(w, jnp.ones(SHAPE), 0.5) == 0)
    centred = np.asarray(drop(branches)).reshape(KEYS, -1) - 0.5
    for lag in (1, 2, 7):
        products = centred[lag:] * centred[:-lag] / 0.25
        assert abs(products.mean()) < 4.5 / np.sqrt(products.size), lag
    totals = centred.sum(axis=0)
    assert abs(totals.var() / (0.25 * KEYS) - 1) < 5 * np.sqrt(2 / len(totals))
    trunk_drops = np.asarray(dropout.dropout(trunk, jnp.ones(SHAPE), 0.5) == 0).ravel() - 0.5
    assert abs((centred * trunk_drops / 0.25).mean()) < 4.5 / np.sqrt(centred.size)


def hash_in_numpy(counter, words):
    """Computes the bits of dropout, in one statement for each round."""
    first, second = words
    h = counter * np.uint32(0x9E3779B9) + first
    h = (h ^ (h >> 16)) * np.uint32(0x21F0AAAD) ^ second
    h = (h ^ (h >> 15)) * np.uint32(0x735A2D97)
    h = (h ^ (h >> 15)) * np.uint32(0xED5AD4BB)
    return h ^ (h >> 14)


def test_bits_are_those_of_the_hash_written_out():
    words = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
    bits = hash_in_numpy(np.arange(1000, dtype=np.uint32), words)
    kept = np.asarray(dropout.dropout(jnp.array(words), jnp.ones(1000), 0.25)) != 0
    assert np.array_equal(kept, (bits >> 8) >= 2**22)


@pytest.mark.full
def test_dropout_has_derivatives_of_both_modes_and_of_second_order():
    x, words = jnp.linspace(0.5, 2.0, 50), jnp.array([3, 4], jnp.uint32)

    def total(x):
        return jnp.sum(dropout.dropout(words, x, 0.5) ** 3)

    kept = np.asarray(dropout.dropout(words, x, 0.5)) != 0
    expected = np.where(kept, 3 * 8 * np.asarray(x) ** 2, 0)
    for gradient in (jax.jacfwd(total)(x), jax.grad(total)(x)):
        assert np.allclose(gradient, expected, rtol=1e-6)
    second = np.diag(np.where(kept, 6 * 8 * np.asarray(x), 0))
    assert np.allclose(jax.hessian(total)(x), second, rtol=1e-6)
