"""Heads' contributions against the derivative of the exact sums by each head's gain."""

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc

L, H, N, D = 5, 3, 4, 6


def test_any_chunk_of_heads_gives_the_derivative_of_each_head_s_gain(x64):
    """With factors of other parts; every field of a configuration is in tests/test_algebras.py."""
    config = rc.transformer(L, H, D)
    params, x = draws.parameters(config), draws.tokens(N, D)
    factors = {"attention_gain": jnp.linspace(0.5, 1.5, L)}

    def total(gain):
        return rc.path_contributions(params, x, config, head_gain=gain, **factors).total

    want = jax.jit(jax.jacfwd(total))(jnp.ones((L, H)))
    for chunk in (1, 2, H):
        found = rc.head_contributions(params, x, config, chunk=chunk, **factors)
        np.testing.assert_allclose(found, jnp.moveaxis(want, (0, 1), (2, 3)), atol=1e-12)
    with pytest.raises(ValueError, match="chunk=0 is below 1"):
        rc.head_contributions(params, x, config, chunk=0)
