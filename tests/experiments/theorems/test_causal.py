"""Causal attention on the sphere: parked tokens and the others."""

import numpy as np
import pytest

from experiments.theorems import causal

pytestmark = pytest.mark.usefixtures("x64")


def test_parked_tokens_are_apart_and_the_others_near():
    angles, distance = np.random.default_rng(0).uniform(0, 2 * np.pi, 300), 0.5
    centres = causal.park(angles, distance)
    gaps = np.abs(angles[:, None] - angles[centres])
    gaps = np.minimum(gaps, 2 * np.pi - gaps)
    assert (gaps.min(axis=1) <= distance).all()
    np.fill_diagonal(between := gaps[centres], np.inf)
    assert between.min() > distance and centres[0] == 0
