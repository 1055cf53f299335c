"""Mixing by prescribed matrices."""

import jax
import numpy as np
import pytest

from experiments.theorems import mixing
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_mixing_is_by_the_matrices_that_are_prescribed():
    key = jax.random.key(3)
    first, second, third = np.asarray(mixing.draw_markov(key, 3, 6))[:, 0]
    products = [first, second @ first, third @ second @ first]
    sizes = [np.linalg.svd(p, compute_uv=False) for p in products]
    expected = [np.sum(s**4) / s[0] ** 4 - 1 for s in sizes]
    assert_close(mixing.pass_markov(key, 6), expected, rtol=1e-9)
