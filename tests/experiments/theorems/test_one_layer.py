"""Layers that move tokens off a line."""

import tomllib

import numpy as np
import pytest

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
