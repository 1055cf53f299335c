"""The rate of a large product, and the operations of a formula."""

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks import limits
from rank_collapse.runs.seeds import run_seeds, seed_mesh
from tests.oracles.benchmark_reports import parse_two_rounds


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
    few, many = lambda: (x @ w).sum(), lambda: (x[:1, :2] @ w[:2, :1] @ w[:1, :1]).sum()
    larger = lambda x, w: jax.lax.cond(x[0, 0] > 0, few, many)  # noqa: E731
    assert count(larger, x, w) == product  # of the branch with most operations, not most products
    looped = lambda x, w: jax.lax.while_loop(lambda a: a[0, 0] < 9, lambda a: a + 1, x) @ w  # noqa: E731
    assert count(looped, x, w) == product
    several = lambda a, b: jnp.einsum("abc,abd->cd", a, b)  # noqa: E731
    assert count(several, jnp.ones((2, 3, 4)), jnp.ones((2, 3, 5))) == 2 * (4 * 5) * (2 * 3)
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


def test_a_large_product_is_of_its_dtype(monkeypatch):
    dtypes, wait = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda a: dtypes.append(a.dtype) or wait(a))
    for dtype in (jnp.float32, jnp.bfloat16):
        limits.LargeProduct(seed_mesh(), 8, dtype)
    assert dtypes == [jnp.float32, jnp.bfloat16]


def test_the_rate_of_each_dtype_is_that_of_its_best_round(monkeypatch, capsys):
    """Both take turns; making a product is compiling, which enters no rate."""
    clock, seconds = [0.0], {"float32": [4.0, 2.0], "bfloat16": [1.0, 3.0]}
    monkeypatch.setattr(limits.time, "perf_counter", lambda: clock[0])
    order = []

    class Product:
        def __init__(self, mesh, width, dtype):
            assert width == 8
            self.name, self.flops = (
                dtype.__name__,
                {"float32": 8e12, "bfloat16": 6e12}[dtype.__name__],
            )
            clock[0] += 5.0 if self.name == "float32" else 7.0

        def time(self):
            order.append(self.name)
            return seconds[self.name][len(order) // 2 - (len(order) % 2 == 0)]

    monkeypatch.setattr(limits, "LargeProduct", Product)
    report = limits.time_products(parse_two_rounds(), 8)
    assert order == ["float32", "bfloat16"] * 2
    assert [timing.seconds for timing in report.timings] == list(seconds.values())
    assert [timing.compile_seconds for timing in report.timings] == [5.0, 7.0]
    assert report.figures == {
        "TFLOP/s, float32": (4.0, None),
        "TFLOP/s, bfloat16": (6.0, None),
    }
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["round 1 of 2: 4 s, 1 s", "round 2 of 2: 2 s, 3 s"]


def test_a_product_is_as_large_as_its_device_needs(monkeypatch):
    mesh = seed_mesh(jax.devices()[:1])
    monkeypatch.setattr(limits, "CPU_WIDTH", 4)
    monkeypatch.setattr(limits, "ACCELERATOR_WIDTH", 8)
    for is_on_cpu, width in ((True, 4), (False, 8)):
        monkeypatch.setattr(limits.seeds, "is_on_cpu", lambda mesh, answer=is_on_cpu: answer)
        assert limits.LargeProduct(mesh).flops == 2 * width**3
    product = limits.LargeProduct(mesh, 2)
    monkeypatch.setattr(product, "time", lambda: 0.5)
    assert product.measure_rate() == 2 * 2**3 / 0.5
    calls = []
    monkeypatch.setattr(limits.LargeProduct, "time", lambda product: calls.append(product))
    assert calls == [limits.LargeProduct(mesh, 2)]  # the first call compiles, and is not timed
