"""Contributions and derivatives by head."""

import jax
import jax.numpy as jnp
import pytest

import rank_collapse as rc
from tests.oracles import draws
from tests.support.closeness import assert_close

L, H, N, D = 5, 3, 4, 6


@pytest.mark.full
def test_any_chunk_of_heads_gives_the_derivative_of_each_head_s_gain(x64):
    """Every field of a configuration is in tests/behaviour/test_algebras.py."""
    config = rc.transformer(L, H, D)
    params, x = draws.parameters(config), draws.tokens(N, D)

    def total(gain):
        return rc.path_contributions(params, x, config, head_gain=gain).total

    expected = jax.jit(jax.jacfwd(total))(jnp.ones((L, H)))
    for chunk in (1, 2, H):
        contributions = rc.head_contributions(params, x, config, chunk=chunk)
        assert_close(contributions, jnp.moveaxis(expected, (0, 1), (2, 3)), atol=1e-12)
