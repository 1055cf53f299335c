"""Chained attention of random paths, layer by layer, against products of matrices in NumPy."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.trained.chains import ChainPass
from rank_collapse.paths.sets import sample_path_sets
from tests.support.closeness import assert_close

DEPTH, HEADS, TOKENS, PATHS, SEED = 3, 2, 5, 4, 7


def composite(matrix):
    """√(‖A‖₁ ‖A‖_∞)."""
    sizes = np.abs(matrix)
    return np.sqrt(sizes.sum(axis=0).max() * sizes.sum(axis=1).max())


@jax.jit
def walk_layers(attention, exists):
    """Passes a `ChainPass` through the attention weights [l, h, n, n] of a network."""
    chains = ChainPass(PATHS, seed=SEED)
    inputs = SimpleNamespace(existing_tokens=exists, x=jnp.zeros((TOKENS, 1)))
    config = SimpleNamespace(depth=DEPTH, num_heads=HEADS)
    carry = chains.init_carry(inputs, config)
    for index in range(DEPTH):
        values = SimpleNamespace(trace=SimpleNamespace(attention=attention[index]))
        layer = SimpleNamespace(index=index, inputs=inputs)
        carry, result = chains.measure_layer(layer, None, values, carry)
        assert result is None
    return chains.build_result(SimpleNamespace(prepared=inputs, carry=carry, config=config))


@pytest.mark.parametrize("count", [TOKENS, 3])
def test_paths_of_each_length_have_the_ratios_of_their_products(count):
    """Rows of tokens that do not exist do not count, and no token attends to them."""
    exists = np.arange(TOKENS) < count
    weights = np.random.default_rng(0).dirichlet(np.ones(TOKENS), (DEPTH, HEADS, TOKENS)) * exists
    weights /= weights.sum(axis=-1, keepdims=True)
    lengths = np.arange(1, DEPTH + 1)
    paths = sample_path_sets(jax.random.key(SEED), lengths, 1, PATHS, DEPTH, HEADS)
    paths = np.asarray(paths).reshape(DEPTH, PATHS, DEPTH)
    assert ((paths < HEADS).sum(axis=-1) == lengths[:, None]).all()
    expected = np.zeros((DEPTH, PATHS))
    for place in np.ndindex(*expected.shape):
        product = np.eye(TOKENS)
        for layer, head in zip(weights, paths[place], strict=True):
            product = product if head == HEADS else layer[head] @ product
        rows = product[exists]
        expected[place] = composite(rows - rows.mean(axis=0)) / composite(rows)
    measured = walk_layers(jnp.asarray(weights, jnp.float32), exists)
    assert_close(measured, expected, rtol=1e-3)
    assert len(np.unique(expected.round(9))) > 2 * DEPTH  # other paths have other ratios
