"""Layers that move tokens off a line."""

import tomllib

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments.theorems import one_layer
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_collinear_tokens_leave_their_line():
    """The smallest counterexample by hand: LayerNorm of (1, k, 0)."""
    assert one_layer.affine_rank(one_layer.COLLINEAR) == 1
    normed = one_layer.normalise_tokens(one_layer.COLLINEAR, "layer")
    expected = one_layer.COLLINEAR - one_layer.COLLINEAR.mean(axis=1, keepdims=True)
    expected /= expected.std(axis=1, keepdims=True)
    assert_close(normed, expected, atol=1e-9)
    assert one_layer.affine_rank(normed) == 2


def test_shares_of_published_models():
    """Their sums are the mean path lengths of the published configurations."""
    published = {"bloom-7b1": (30, 3.6213576), "mpt-7b": (32, 4.2280776)}
    for name, (depth, total) in published.items():
        shares = tomllib.loads(one_layer.SHARES.read_text("utf-8"))[name]["shares"]
        assert len(shares) == depth and sum(shares) == pytest.approx(total, abs=1e-4)
        row = one_layer.published_row(name, 20)
        assert row.shape == (20,) and row.sum() == pytest.approx(1) and (row > 0).all()


def test_alibi_is_by_distance_alone():
    """One layer of two heads of slopes 1/16 and 1/256, by hand."""
    rows = []
    for slope in (2.0**-4, 2.0**-8):
        weights = np.exp(-slope * np.arange(4)[::-1])
        rows.append(weights / weights.sum())
    expected = 0.7 * np.eye(4)[-1] + 0.3 * np.mean(rows, axis=0)
    measured = one_layer.rollout_row([0.3], 2, 4)
    assert_close(measured, expected, rtol=1e-12)


def test_the_last_row_of_a_random_network_is_that_of_numpy():
    """The same draw: causal heads on normed states, and shares of norms."""
    key, n, d, depth, heads = jax.random.key(2), 6, 8, 3, 4
    measured = one_layer.last_row(key, n=n, d=d, depth=depth)
    config = rc.san_skip(depth, heads, d, norm_placement="pre", norm="rms", mask="causal")
    key_p, key_x = jax.random.split(key)
    attention = rc.init(key_p, config).layers.attention
    x, rows = np.asarray(jax.random.normal(key_x, (n, d))), np.eye(n)
    for layer in range(depth):
        normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + config.norm_eps)
        branch, mean = np.zeros_like(x), np.zeros((n, n))
        for h in range(heads):
            q, k, v, o = (np.asarray(getattr(attention, f"w_{w}"))[layer, h] for w in "qkvo")
            weights = np.exp(normed @ q @ (normed @ k).T / np.sqrt(k.shape[1])) * np.tri(n)
            weights /= weights.sum(axis=1, keepdims=True)
            branch, mean = branch + weights @ normed @ v @ o, mean + weights / heads
        sizes = np.linalg.norm(branch, axis=1), np.linalg.norm(x, axis=1)
        share = np.mean(sizes[0] / (sizes[0] + sizes[1]))
        rows, x = ((1 - share) * np.eye(n) + share * mean) @ rows, x + branch
    assert_close(measured, rows[-1], rtol=1e-5)


def test_rows_of_published_models_have_two_ends():
    for name in ("bloom-7b1", "mpt-7b"):
        assert (one_layer.ends_over_middle(one_layer.published_row(name, 256)) > 1).all()
