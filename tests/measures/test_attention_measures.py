"""Measures of attention against closed forms and plain loops, batched and masked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc


def test_closed_forms_of_the_entropy():
    uniform, one_hot = np.full((3, 5), 0.2), np.eye(3, 5)
    found = rc.attention_entropy(np.stack([uniform, one_hot]))
    np.testing.assert_allclose(found, [np.log(5), 0], rtol=1e-6)
    found = rc.attention_entropy(np.concatenate([uniform, one_hot]), mask=[1, 1, 1, 1, 0, 0])
    np.testing.assert_allclose(found, 0.75 * np.log(5), rtol=1e-6)
    p = np.random.default_rng(0).dirichlet(np.ones(6), (2, 3, 4))
    np.testing.assert_allclose(rc.attention_entropy(p), (-p * np.log(p)).sum(-1).mean(-1))


def test_closed_forms_of_the_largest_weights():
    uniform, one_hot = np.full((3, 5), 0.2), np.eye(3, 5)
    both = np.stack([uniform, one_hot])
    np.testing.assert_allclose(rc.largest_weight(both), [0.2, 1])
    np.testing.assert_array_equal(rc.saturated_share(both), [0, 1])
    rows, mask = np.concatenate([uniform, one_hot]), [1, 1, 1, 1, 0, 0]
    assert float(rc.largest_weight(rows, mask=mask)) == pytest.approx(0.4)
    assert float(rc.saturated_share(rows, mask=mask)) == 0.25


def test_largest_weights_against_loops():
    p = np.random.default_rng(0).dirichlet(0.1 * np.ones(6), (2, 3, 4))
    found = np.asarray(rc.saturated_share(p, 0.7))
    largest = np.asarray(rc.largest_weight(p))
    counts = np.zeros((2, 3))
    for i in range(2):
        for j in range(3):
            tops = [max(row) for row in p[i, j]]
            assert largest[i, j] == pytest.approx(sum(tops) / 4, rel=1e-12)
            counts[i, j] = sum(top > 0.7 for top in tops) / 4
    np.testing.assert_array_equal(found, counts)
    assert 0 < counts.mean() < 1
    swept = jax.vmap(lambda t: rc.saturated_share(jnp.asarray(p), t))(jnp.array([0.7, 1.0]))
    np.testing.assert_array_equal(swept, [counts, 0 * counts])


def test_closed_forms_of_sinks():
    uniform, own, sunk = np.full((4, 4), 0.25), np.eye(4), np.eye(4)[[0] * 4]
    p = np.stack([uniform, own, sunk])
    np.testing.assert_allclose(rc.largest_column(p), [0.25, 0.25, 1])
    np.testing.assert_allclose(rc.first_column(p), [0.25, 0.25, 1])
    assert float(rc.sink_rate(p)) == pytest.approx(1 / 3)
    assert float(rc.sink_rate(p, sink=0.2)) == 1
    causal = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    harmonic = np.mean(1 / np.arange(1, 5))  # the first key gets 1/i of query i
    np.testing.assert_allclose(rc.largest_column(causal), harmonic)


def test_batches_masks_and_frameworks():
    p = np.random.default_rng(0).dirichlet(np.ones(5), (2, 3, 5))  # [l, h, n, m]
    mask = np.array([False, True, True, True, False])
    largest = p[:, :, 1:4].mean(-2).max(-1)
    np.testing.assert_allclose(rc.largest_column(p, mask=mask), largest, rtol=1e-12)
    found = rc.first_column(p, mask=mask, key_mask=mask)
    np.testing.assert_allclose(found, p[:, :, 1:4, 1].mean(-1), rtol=1e-12)
    expected = (p[..., 0].mean(-1) > 0.2).mean(-1)
    for found in (rc.sink_rate(p, sink=0.2), rc.sink_rate(jnp.asarray(p), sink=0.2)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_first_key_is_no_guess_from_the_number_of_queries():
    """All queries look at key 0; the first query does not exist, and there are as many keys."""
    p, queries = np.eye(3)[[0] * 3][None], [False, True, True]
    assert float(rc.first_column(p, mask=queries)[0]) == 1
    assert float(rc.sink_rate(p, mask=queries)) == 1
    assert float(rc.first_column(p, mask=queries, key_mask=queries)[0]) == 0  # key 1 is the first
    assert float(rc.sink_rate(p[..., ::-1], key_mask=[False, False, True])) == 1
    wide = np.eye(4)[[1] * 3][None]
    assert float(rc.sink_rate(wide, mask=queries, key_mask=[False, True, True, True])) == 1
    x = np.random.default_rng(0).normal(size=(3, 2))
    assert float(rc.monitor(x, p, mask=queries)["sink_rate"]) == 0  # tokens, thus keys too


def test_padding_on_the_left_is_not_the_sink():
    """Three tokens after two of padding: the first key that exists is key 2."""
    mask = np.array([0, 0, 1, 1, 1])
    scores = np.where(mask, np.random.default_rng(0).normal(size=(4, 5, 5)), -np.inf)
    p = np.asarray(jax.nn.softmax(jnp.asarray(scores), axis=-1))
    expected = (p[:, 2:, 2].mean(-1) > 0.3).mean()
    assert 0 < expected < 1
    for found in (
        rc.sink_rate(p, mask=mask),
        rc.sink_rate(p, mask=mask, key_mask=mask),
        jax.jit(lambda p: rc.sink_rate(p, mask=mask))(p),
    ):
        assert float(found) == expected


def test_the_largest_logit_of_each_head_is_of_pairs_that_exist():
    s, exists = np.random.default_rng(0).normal(size=(2, 3, 4, 4)), np.array([1, 0, 1, 1], bool)
    causal = np.tril(np.ones((4, 4), bool))
    for mask, pairs in (
        (None, causal | True),
        (causal, causal),
        (exists, exists[:, None] & exists),
    ):
        expected = [[max(h[pairs]) for h in layer] for layer in s]
        np.testing.assert_array_equal(rc.largest_logit(s, mask=mask), expected)
        found = jax.jit(lambda s, mask=mask: rc.largest_logit(s, mask=mask))(s)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"mask of shape \(3, 3\) does not fit scores"):
        rc.largest_logit(s, mask=causal[:3, :3])


WEIGHTS = [name for name, measure in rc.MEASURES.items() if measure.needs == "attention"]


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_is_not_weights_is_refused_and_nan_stays(name):
    measure, p = rc.MEASURES[name], np.full((2, 3, 4), 0.25, np.float32)
    refused = {
        "logits": (p - 0.5, {}, "has the weight -0.25"),
        "sums": (2 * p, {}, "has a row whose sum is 1 off 1"),
        "a vector": (p[0, 0], {}, r"shape \(4,\) is not \[..., n, m\]"),
        "a mask": (p, {"mask": [True, False]}, r"mask of shape \(2,\) does not fit 3 queries"),
    }
    for given, options, message in refused.values():
        with pytest.raises(ValueError, match=message):
            measure(given, **options)
    padded = np.concatenate([p, 0 * p[:, :1]], axis=1)  # a row that does not exist
    np.testing.assert_allclose(measure(padded, mask=[1, 1, 1, 0]), measure(p), rtol=1e-6)
    assert np.isfinite(jax.jit(measure)(p - 0.5)).all()  # no value is known
    for fn in (measure, jax.jit(measure)):
        broken = np.asarray(fn(np.where(np.arange(4) == 0, np.nan, p).astype(np.float32)))
        assert np.isnan(broken).all()
        assert np.isnan(fn(p, mask=np.zeros(3, bool)) if fn is measure else np.nan).all()


def test_what_sinks_refuse():
    with pytest.raises(ValueError, match=r"key_mask of shape \(3,\) does not fit 4 keys"):
        rc.first_column(np.eye(4), key_mask=[1, 1, 0])
    with pytest.raises(ValueError, match=r"shape \(4, 4\) is not \[..., h, n, m\]"):
        rc.sink_rate(np.eye(4))
