"""Dropout's hashed decisions: their rate, their independence, and what they depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.network import dropout

KEYS, SHAPE = 1500, (30, 48)


def dropped(rate):
    """Decisions [keys, entries] as 0 and 1."""
    keys = jax.random.split(jax.random.key(0), KEYS)
    out = jax.jit(jax.vmap(lambda k, r: dropout.dropout(k, jnp.ones(SHAPE), r), (0, None)))
    return np.asarray(out(keys, rate) == 0).reshape(KEYS, -1).astype(float)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_and_independence_within_statistics(rate):
    centred = dropped(rate) - rate
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
    kept = out != 0
    np.testing.assert_allclose(out[kept], np.asarray(x)[kept] / 0.75, rtol=1e-6)
    np.testing.assert_array_equal(dropout.dropout(jax.random.key(1), x, 0.0), x)
    np.testing.assert_array_equal(dropout.dropout(jax.random.key(1), x, 1.0), 0)


def test_a_key_decides_alike_alone_and_under_vmap_and_in_any_dtype():
    keys = jax.random.split(jax.random.key(2), 4)
    x = jnp.ones((5, 7))
    together = jax.vmap(lambda k: dropout.dropout(k, x, 0.5))(keys)
    for key, row in zip(keys, together, strict=True):
        np.testing.assert_array_equal(dropout.dropout(key, x, 0.5), row)
        half = dropout.dropout(key, x.astype(jnp.bfloat16), 0.5)
        assert half.dtype == jnp.bfloat16
        np.testing.assert_array_equal(half.astype(jnp.float32), row)
    assert (together[0] != together[1]).any()


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
    own = np.asarray(dropout.dropout(trunk, jnp.ones(SHAPE), 0.5) == 0).ravel() - 0.5
    assert abs((centred * own / 0.25).mean()) < 4.5 / np.sqrt(centred.size)


def test_a_key_and_its_words_decide_alike():
    key, x = jax.random.key(5), jnp.ones((4, 3))
    words = dropout.dropout_words(key)
    np.testing.assert_array_equal(dropout.dropout(key, x, 0.5), dropout.dropout(words, x, 0.5))
    np.testing.assert_array_equal(dropout.dropout_words(words), words)


def test_the_rate_is_traced():
    traces = []

    @jax.jit
    def drop(key, rate):
        traces.append(1)
        return dropout.dropout(key, jnp.ones(64), rate)

    sums = [float(drop(jax.random.key(0), r).sum()) for r in (0.0, 0.3, 0.6)]
    assert len(traces) == 1 and sums[0] == 64 and len(set(sums)) == 3
