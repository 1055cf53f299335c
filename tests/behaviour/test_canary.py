"""A canary for the compiler: small products over many rows, at sizes where a jaxlib was wrong.

jaxlib 0.10.2 computes jit(vmap(lambda r: sum((W @ r)**2))) wrongly on a CPU for W [3, 3] and 32769
to about 43000 rows (float64: from 16385). Every row past the first 2^15 (2^14) is wrong. The bug
needs a shared matrix on the left of each row, at most 3 wide (7 in float64), and a sum straight
after the product. The library puts rows on the left (x @ W), and larger widths are right.
These tests run functions of the library at such sizes, and compare with few rows at a time. The
other tests compare few rows with numpy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures import residuals
from rank_collapse.network import attention
from tests.support.compiling import AS_USERS
from tests.support.marks import full_but, full_if

# The bug may be in programs that are compiled as users compile them.
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("optimized")]

ROWS = {"float32": 33000, "float64": 16500}
# Relative to the largest value; rounding reaches 2e-4 in float32 after two layers with softmax.
TOLERANCE = {"float32": 1e-3, "float64": 1e-12}
DTYPES = tuple(ROWS)
compiled = functools.partial(jax.jit, compiler_options=AS_USERS)


def draw(dtype, *shape):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def close(actual, expected, dtype):
    assert actual.dtype == dtype and actual.shape == expected.shape
    error = np.abs(np.asarray(actual, np.float64) - expected).max(initial=0)
    assert error < TOLERANCE[dtype] * np.abs(expected).max()


def networks(dtype):
    for config in (rc.san(2, 1, 3), rc.transformer(2, 1, 3, d_ff=3)):
        params = rc.init(jax.random.key(1), config, bias_scale=0.1)
        yield config, jax.tree.map(lambda a: a.astype(dtype), params)


LIBRARY = {
    "hidden states": lambda p, x, c: rc.apply(p, x, c).hidden,
    "residual": lambda p, x, c: rc.composite_norm(residuals.residual(x)),
    "attention scores": lambda p, x, c: attention.attention_scores(
        jax.tree.map(lambda a: a[0], p.layers.attention), x, x
    ),
    "sums of paths": lambda p, x, c: rc.path_contributions(p, x, c).by_length,
}


@pytest.mark.parametrize("dtype", full_but(DTYPES, "float32"))
@pytest.mark.parametrize("name", full_if(LIBRARY, "hidden states"))  # sums of paths have them
def test_many_small_networks_are_few_small_networks(name, dtype):
    """The rows are all tokens together, of sequences of 3 tokens of width 3."""
    size = 500
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(draw(dtype, ROWS[dtype] // 3, 3, 3))
        for config, params in networks(dtype):
            call = compiled(jax.vmap(lambda x, p=params, c=config: LIBRARY[name](p, x, c)))
            parts = [np.asarray(call(x[i : i + size])) for i in range(0, len(x), size)]
            close(call(x), np.concatenate(parts), dtype)
