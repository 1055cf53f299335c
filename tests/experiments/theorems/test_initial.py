"""Heads at initialisation."""

import jax
import jax.numpy as jnp
import pytest

from experiments.theorems import initial

pytestmark = pytest.mark.usefixtures("x64")


def test_heads_differ_where_attention_is_not_uniform():
    """With uniform attention H heads are one head of the same values: nothing can depend on H."""
    key = jax.random.key(1)
    uniform = [initial.pass_heads(key, h, depth=2, d=16, uniform=True) for h in (1, 4)]
    assert initial.compare_heads(key, 1, 4, depth=2, d=16, uniform=True) == pytest.approx(
        float(jnp.log((1 - uniform[1][-1]) / (1 - uniform[0][-1])))
    )
    assert abs(initial.compare_heads(key, 1, 4, depth=2, d=16)) > 1e-3
