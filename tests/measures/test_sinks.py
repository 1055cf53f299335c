"""Attention sinks in closed form, on arrays of any framework, batched and masked."""

import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures import column_means, first_column


def test_closed_forms():
    uniform, own, sunk = np.full((4, 4), 0.25), np.eye(4), np.eye(4)[[0] * 4]
    p = np.stack([uniform, own, sunk])
    np.testing.assert_allclose(rc.largest_column(p), [0.25, 0.25, 1])
    np.testing.assert_allclose(first_column(p), [0.25, 0.25, 1])
    assert float(rc.sink_rate(p)) == pytest.approx(1 / 3)
    assert float(rc.sink_rate(p, sink=0.2)) == 1
    causal = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    harmonic = np.mean(1 / np.arange(1, 5))  # the first key gets 1/i of query i
    np.testing.assert_allclose(rc.largest_column(causal), harmonic)


def test_batches_masks_and_frameworks():
    p = np.random.default_rng(0).dirichlet(np.ones(5), (2, 3, 5))  # [l, h, n, m]
    mask = np.array([False, True, True, True, False])
    np.testing.assert_allclose(column_means(p, mask=mask), p[:, :, 1:4].mean(-2), rtol=1e-12)
    found = first_column(p, mask=mask, key_mask=mask)
    np.testing.assert_allclose(found, p[:, :, 1:4, 1].mean(-1), rtol=1e-12)
    expected = (p[..., 0].mean(-1) > 0.2).mean(-1)
    for found in (rc.sink_rate(p, sink=0.2), rc.sink_rate(jnp.asarray(p), sink=0.2)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_first_key_is_no_guess_from_the_number_of_queries():
    """All queries look at key 0; the first query does not exist, and there are as many keys."""
    p, queries = np.eye(3)[[0] * 3][None], [False, True, True]
    assert float(first_column(p, mask=queries)[0]) == 1
    assert float(rc.sink_rate(p, mask=queries)) == 1
    assert float(first_column(p, mask=queries, key_mask=queries)[0]) == 0  # key 1 is the first
    assert float(rc.sink_rate(p[..., ::-1], key_mask=[False, False, True])) == 1
    wide = np.eye(4)[[1] * 3][None]
    assert float(rc.sink_rate(wide, mask=queries, key_mask=[False, True, True, True])) == 1
    x = np.random.default_rng(0).normal(size=(3, 2))
    assert float(rc.monitor(x, p, mask=queries)["sink_rate"]) == 0  # tokens, thus keys too


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"key_mask of shape \(3,\) does not fit 4 keys"):
        first_column(np.eye(4), key_mask=[1, 1, 0])
    with pytest.raises(ValueError, match=r"shape \(4, 4\) is not \[..., h, n, m\]"):
        rc.sink_rate(np.eye(4))
    with pytest.raises(ValueError, match=r"shape \(4,\) is not \[..., n, m\]"):
        rc.largest_column(np.ones(4))
    with pytest.raises(ValueError, match=r"mask of shape \(3,\) does not fit 4 queries"):
        rc.largest_column(np.eye(4), mask=[1, 1, 0])
