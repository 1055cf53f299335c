"""The rate of a large product, and the operations of a formula."""

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks import limits
from rank_collapse.runs.seeds import run_seeds, seed_mesh


def test_flops_of_products_are_those_of_the_formula():
    """Products in loops, branches, gradients, on several devices, and a convolution."""
    x, w = jnp.ones((3, 4)), jnp.ones((4, 5))
    count = lambda fn, *a: limits.count_flops(jax.make_jaxpr(fn)(*a))  # noqa: E731
    product = 2 * 3 * 4 * 5
    assert count(lambda x, w: jnp.tanh(x @ w), x, w) == product
    # Two products of the backward pass beside that of the forward pass.
    assert count(jax.grad(lambda x, w: jnp.tanh(x @ w).sum(), argnums=(0, 1)), x, w) == 3 * product
    scanned = lambda x, w: jax.lax.scan(lambda c, _: (c @ w @ w.T, 0), x, length=7)  # noqa: E731
    assert count(jax.jit(scanned), x, w) == 7 * 2 * product
    either = lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: (x @ w).sum(), lambda: 0.0)  # noqa: E731
    assert count(either, x, w) == product
    batch = jnp.ones((6, 3, 4))
    assert count(jax.vmap(lambda a: a @ w), batch) == 6 * product
    mesh = seed_mesh()
    spread = run_seeds(lambda a, w: a @ w, mesh, at_once=1)
    seeds_of_mesh = jnp.ones((2 * mesh.size, 3, 4))
    assert count(spread, seeds_of_mesh, w) == 2 * mesh.size * product
    images, kernels = jnp.ones((2, 8, 8, 3)), jnp.ones((5, 5, 3, 7))
    convolve = lambda a, b: jax.lax.conv_general_dilated(  # noqa: E731
        a, b, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert count(convolve, images, kernels) == 2 * (2 * 8 * 8 * 7) * (5 * 5 * 3)
    with pytest.raises(ValueError, match="while loop"):
        count(lambda x: jax.lax.while_loop(lambda a: a[0, 0] < 9, lambda a: a @ a, x), x[:, :3])


def test_the_rate_of_a_large_product_is_of_all_devices():
    mesh = seed_mesh()
    product = limits.LargeProduct(mesh, width=64)
    assert product.flops == 2 * 64**3 * mesh.size and product.measure_rate() > 0
    assert limits.compute_share(6.0, [1.0, 2.0, 3.0], [2.0, 3.0, 1.0]) == 2.0
