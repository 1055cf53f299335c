"""Examples without symmetry for the tests of path sums."""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc

N, D, DEPTH, HEADS = 5, 8, 3, 2


def relative(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def config_of(**fields):
    defaults = {"depth": DEPTH, "num_heads": HEADS, "d_model": D, "d_ff": 11}
    return rc.TransformerConfig(**(defaults | fields))


def example(config, seed=0, n=N):
    """Parameters without symmetry, an input, and what else the configuration needs."""

    def make(key):
        keys = jax.random.split(key, 4)
        params = rc.init(keys[0], config, bias_scale=0.3)
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(jax.random.split(keys[1], len(leaves)), leaves, strict=True)
        leaves = [a + 0.1 * jax.random.normal(k, a.shape, a.dtype) for k, a in pairs]
        x = jax.random.normal(keys[3], (n, config.d_model)) + 0.3
        extra = {}
        if config.cross_attention:
            extra["memory"] = jax.random.normal(keys[2], (n - 1, config.d_model))
            extra["memory_mask"] = jnp.arange(n - 1) < n - 2
        return jax.tree.unflatten(tree, leaves), x, extra

    return jax.jit(make)(jax.random.key(seed))
