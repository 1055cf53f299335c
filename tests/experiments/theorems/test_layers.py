"""Layers that move tokens off a line."""

import pytest

from experiments.theorems import layers
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_collinear_tokens_leave_their_line():
    """The smallest counterexample by hand: LayerNorm of (1, k, 0)."""
    assert layers.affine_rank(layers.COLLINEAR) == 1
    normed = layers.normalise_tokens(layers.COLLINEAR, "layer")
    expected = layers.COLLINEAR - layers.COLLINEAR.mean(axis=1, keepdims=True)
    expected /= expected.std(axis=1, keepdims=True)
    assert_close(normed, expected, atol=1e-9)
    assert layers.affine_rank(normed) == 2
