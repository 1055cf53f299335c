"""Decompositions of matrices on JAX: under vmap, where they fail, and on two devices."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import rank_collapse as rc
from rank_collapse.measures import on_jax
from tests.oracles import draws
from tests.support.closeness import near
from tests.support.marks import full_but

PLAIN = {
    "svd": lambda x: tuple(jnp.linalg.svd(x, full_matrices=False)),
    "svdvals": jnp.linalg.svdvals,
}


@pytest.mark.full
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", full_but(["float32", "float64"], "float64"))
def test_values_and_derivatives_under_vmap_are_those_of_one_matrix(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = draws.normal(2, 3, 5, 5).astype(dtype)
        x += x.swapaxes(-1, -2)
        plain, ours = PLAIN[name], getattr(on_jax, name)

        def largest(fn):
            return lambda a: jnp.max(jnp.abs(jax.tree.leaves(fn(a))[0]))

        for f, g in ((plain, ours), (jax.grad(largest(plain)), jax.grad(largest(ours)))):
            results = jax.jit(jax.vmap(jax.vmap(g)))(x)
            for index in np.ndindex(2, 3):
                result = jax.tree.map(lambda a, i=index: a[i], results)
                near(result, f(x[index]), rtol=1e-4, atol=1e-5)
        outside = jax.grad(lambda a: jnp.sum(jax.vmap(largest(ours))(a)))(x[0])
        np.testing.assert_allclose(
            outside, jax.vmap(jax.grad(largest(plain)))(x[0]), rtol=1e-4, atol=1e-5
        )


def test_constants_beside_a_traced_array_stay_with_jax():
    """NumPy computes only if it can see every value."""
    kinds = []

    def measure(x, weights):
        kinds.append(isinstance(x, np.ndarray))
        return x * weights

    x = jnp.arange(3.0)
    jax.jit(lambda weights: on_jax.run_on_host(measure, (x, weights), {}))(x)
    on_jax.run_on_host(measure, (x, x), {})
    assert kinds == [False, True]


def test_matrices_of_several_leading_axes_are_those_one_by_one():
    x = np.asarray(draws.normal(2, 4, 3, 2))
    values = jax.jit(on_jax.svdvals)(x)
    np.testing.assert_allclose(values, np.linalg.svd(x, compute_uv=False), rtol=1e-5)


def test_a_decomposition_that_does_not_converge_is_repeated_by_another():
    """NaN of a NaN stays, and the first result stays where it is finite."""

    def fail_at_large(x):
        return jnp.where(x[0, 0] > 1, jnp.nan, jnp.sum(x)), 1.0

    decompose = on_jax.retry_unless_finite(fail_at_large, lambda x: (2 * jnp.sum(x), 2.0))
    x = np.stack([np.full((2, 2), a, "float32") for a in (0.5, 3.0, np.nan)])
    for results in (
        jax.vmap(decompose)(x),
        [np.stack(a) for a in zip(*map(decompose, x), strict=True)],
    ):
        np.testing.assert_array_equal(results[0], [2, 24, np.nan])
        np.testing.assert_array_equal(results[1], [1, 2, 1])


@pytest.mark.parametrize("spec", full_but([("x",), (None, "x"), (None, None, "x")], (None, "x")))
def test_arrays_with_explicit_axes_are_measured_as_one_array(spec):
    """Axes of `jax.make_mesh` are explicit: there JAX refuses to sort, slice or decompose what is
    spread over devices. Norms close over arrays that have such axes, too."""
    mesh = jax.make_mesh((2,), ("x",))
    x, gain = np.asarray(draws.normal(2, 6, 4)), np.arange(1, 5, dtype=np.float32)
    place = NamedSharding(mesh, PartitionSpec(*spec))
    names = [name for name, measure in rc.MEASURES.items() if measure.needs == "tokens"]

    def measure(x, gain):
        read = rc.monitor(x, tokens="read", norm=lambda y: y * gain[None, None])
        each = jax.vmap(rc.effective_rank)(x)
        return {name: rc.MEASURES[name](x) for name in names}, read, each, rc.residual(x)

    laid_out = jax.device_put(x, place), jax.device_put(gain, NamedSharding(mesh, PartitionSpec()))
    results, wanted = jax.jit(measure)(*laid_out), measure(x, gain)
    near(results, wanted, rtol=1e-4, atol=1e-5)
    assert results[3].sharding.is_equivalent_to(place, 3)  # not copied to all devices
    by_example = NamedSharding(mesh, PartitionSpec(*spec[:1]))
    assert results[0]["stable_rank"].sharding.is_equivalent_to(by_example, 1)
    slope = jax.jit(jax.grad(lambda x: rc.rank_one_ratio(x).sum()))
    near(slope(laid_out[0]), slope(x), rtol=1e-4, atol=1e-6)


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
print(seeds.to_host(seeds.run_seeds(measure, mesh)(seeds.shard_seeds(x, mesh), None)).shape)
"""


@pytest.mark.full
def test_two_devices_do_not_wait_for_each_other():
    done = subprocess.run(
        [sys.executable, "-c", SHARED], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "(4, 50, 2)", done.stderr


def test_a_cpu_decomposes_one_matrix_at_a_time():
    """LAPACK calls for several matrices wait for each other where CPUs are devices of a mesh."""
    text = jax.jit(on_jax.svdvals).lower(jnp.zeros((3, 4, 5))).as_text()
    calls = [line for line in text.splitlines() if "lapack_" in line]
    assert calls and not any("3x4x5" in line or "3x5x4" in line for line in calls)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_the_second_decomposition_is_of_the_same_matrix(shape):
    x = np.asarray(draws.normal(*shape))

    def fail(x):
        return jax.tree.map(lambda a: jnp.nan * a, PLAIN["svd"](x))

    u, s, vt = jax.jit(on_jax.retry_unless_finite(fail, on_jax._decompose_transposed))(x)
    np.testing.assert_allclose(u * np.asarray(s)[None] @ vt, x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(s, np.linalg.svd(x, compute_uv=False), rtol=1e-5)
