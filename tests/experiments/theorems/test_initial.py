"""Heads at initialisation."""

import jax
import numpy as np
import pytest

from experiments.theorems import initial

pytestmark = pytest.mark.usefixtures("x64")


def test_heads_differ_where_attention_is_not_uniform():
    """With uniform attention H heads are one head of the same values: nothing can depend on H."""
    key = jax.random.key(1)
    sizes, keys = {"depth": 2, "d": 16}, jax.random.split(key, 3)
    apart = {
        h: np.mean([1 - initial.pass_heads(one, h, **sizes)[-1] for one in keys]) for h in (1, 4)
    }
    measured = initial.compare_heads(key, 1, 4, networks=3, **sizes)
    assert measured == pytest.approx(np.log(apart[4] / apart[1])) and abs(measured) > 1e-3
