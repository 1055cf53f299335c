"""Entropy of attention against its closed forms and a plain sum."""

import numpy as np
import pytest

import rank_collapse as rc


def test_closed_forms():
    uniform, one_hot = np.full((3, 5), 0.2), np.eye(3, 5)
    found = rc.attention_entropy(np.stack([uniform, one_hot]))
    np.testing.assert_allclose(found, [np.log(5), 0], rtol=1e-6)
    found = rc.attention_entropy(np.concatenate([uniform, one_hot]), mask=[1, 1, 1, 1, 0, 0])
    np.testing.assert_allclose(found, 0.75 * np.log(5), rtol=1e-6)
    p = np.random.default_rng(0).dirichlet(np.ones(6), (2, 3, 4))
    np.testing.assert_allclose(rc.attention_entropy(p), (-p * np.log(p)).sum(-1).mean(-1))


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"shape \(5,\) is not"):
        rc.attention_entropy(np.ones(5))
    with pytest.raises(ValueError, match=r"mask of shape \(2,\) does not fit 3 queries"):
        rc.attention_entropy(np.eye(3), mask=[True, False])
