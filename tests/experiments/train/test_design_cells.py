"""Designs that are trained: who fails, and what a guess reaches."""

import numpy as np
from scipy import stats

from experiments.train import design_cells


def test_a_guess_stays_below_the_limit():
    limit = design_cells.guess_limit(1024, 10)
    assert 0.002 < stats.binom.sf(limit * 1024, 1024, 0.1) < 0.008


def test_who_fails():
    results = {
        "losses": np.array([[2.0, np.nan], [2.0, 2.0], [2.0, 0.1], [2.0, 1.0]]),
        "accuracy": np.array([[0.1, 0.9], [0.9, 0.12], [0.1, 0.13], [0.1, np.nan]]),
    }
    np.testing.assert_array_equal(design_cells.has_failed(results, 0.12), [True, True, False, True])
