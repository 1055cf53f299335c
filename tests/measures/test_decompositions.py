"""Decompositions under vmap: values and derivatives of the plain ones, and nothing that waits."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.measures import norms

PLAIN = {
    "svd": lambda x: jnp.linalg.svd(x, full_matrices=False),
    "svdvals": jnp.linalg.svdvals,
}

# Two devices on two threads, each at SVDs of two matrices, after a product large enough for XLA
# to go on in its thread pool: with LAPACK's batched call this never ends.
SHARED = """
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
from rank_collapse.measures import residuals
from rank_collapse.runs import seeds
def measure(x, _):
    def ranks(i):
        y = (jnp.tanh(x @ x.T + i) @ x)[:32, :32]
        return jnp.stack([residuals.stable_rank(y), residuals.rank_one_ratio(y)])
    return jax.lax.map(ranks, jnp.arange(50.0))
x = jax.random.normal(jax.random.key(0), (4, 256, 256))
mesh = seeds.seed_mesh()
print(seeds.to_host(seeds.spread(measure, mesh)(seeds.lay_out(x, mesh), None)).shape)
"""


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_derivatives_under_vmap_are_those_of_one_matrix(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jax.random.normal(jax.random.key(0), (2, 3, 5, 5), dtype)
        x += x.swapaxes(-1, -2)
        plain, ours = PLAIN[name], getattr(norms, name)

        def largest(fn):
            return lambda a: jnp.max(jnp.abs(jax.tree.leaves(fn(a))[0]))

        for f, g in ((plain, ours), (jax.grad(largest(plain)), jax.grad(largest(ours)))):
            found = jax.jit(jax.vmap(jax.vmap(g)))(x)
            for index in np.ndindex(2, 3):
                one = jax.tree.map(lambda a, i=index: a[i], found)
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
                    one,
                    f(x[index]),
                )
        outside = jax.grad(lambda a: jnp.sum(jax.vmap(largest(ours))(a)))(x[0])
        np.testing.assert_allclose(
            outside, jax.vmap(jax.grad(largest(plain)))(x[0]), rtol=1e-4, atol=1e-5
        )


def test_two_devices_do_not_wait_for_each_other():
    done = subprocess.run(
        [sys.executable, "-c", SHARED], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "(4, 50, 2)", done.stderr
