"""Norms, residuals, ranks, decompositions: against numpy, removed rows, and linear programs."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures import norms, on_jax, residuals as rs
from tests.oracles import draws
from tests.support.closeness import assert_close, near
from tests.support.marks import full_but
from tests.support.refusals import is_refused, parametrize_refusals


def tokens(n=7, d=5, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32) + 0.4


NUMPY_NORMS = {
    "one": lambda a: np.abs(a).sum(0).max(),
    "inf": lambda a: np.abs(a).sum(1).max(),
    "composite": lambda a: np.sqrt(np.abs(a).sum(0).max() * np.abs(a).sum(1).max()),
    "frobenius": lambda a: np.sqrt((a**2).sum()),
    "spectral": lambda a: np.sqrt(np.linalg.eigvalsh(a.T @ a).max()),
    "max": lambda a: np.abs(a).max(),
}


def compute_ranks(a):
    s = np.sqrt(np.maximum(np.linalg.eigvalsh(a @ a.T if len(a) < a.shape[1] else a.T @ a), 0))
    p, q = s / s.sum(), s**2 / (s**2).sum()
    c = np.linalg.svd(a - a.mean(axis=0), compute_uv=False)[: min(len(a) - 1, a.shape[1])]
    unit = a / np.linalg.norm(a, axis=1, keepdims=True)
    pairs = [unit[i] @ unit[j] for i in range(len(a)) for j in range(len(a)) if i != j]
    return {
        rs.stable_rank: (s**2).sum() / s.max() ** 2,
        rs.effective_rank: np.exp(-(p * np.log(p)).sum()),
        rs.effective_rank_share: np.exp(-(c / c.sum() * np.log(c / c.sum())).sum()) / len(c),
        rs.matrix_entropy: -(q * np.log(q)).sum(),
        rs.token_cosine: np.mean(pairs),
        rs.rank_one_ratio: None,
    }


@pytest.mark.parametrize("shape", [(7, 5), (4, 9)])
def test_equals_numpy(shape):
    x = tokens(*shape)
    assert set(NUMPY_NORMS) == set(norms.NORMS)
    for norm, plain in NUMPY_NORMS.items():
        np.testing.assert_allclose(norms.matrix_norm(x, norm), plain(x), rtol=1e-5)
        want = plain(x - x.mean(0)) / plain(x)
        np.testing.assert_allclose(rc.residual_ratio(x, norm=norm), want, rtol=1e-5)
    assert_close(rc.residual(x), x - x.mean(0), atol=1e-6)
    for fn, want in compute_ranks(x).items():
        if want is not None:
            np.testing.assert_allclose(fn(x), want, rtol=1e-4, err_msg=fn.__name__)
    s = np.linalg.svd(x, compute_uv=False)
    np.testing.assert_allclose(rs.rank_one_ratio(x, norm="spectral"), s[1] / s[0], rtol=1e-4)
    np.testing.assert_allclose(
        rs.rank_one_ratio(x, norm="frobenius"),
        np.sqrt((s[1:] ** 2).sum() / (s**2).sum()),
        rtol=1e-4,
    )


def test_masked_rows_are_as_if_removed():
    x = tokens(8, 5) + np.float32([-4, -2, 0, 2, 4])  # no zero lies between features of one sign
    keep = np.array([1, 0, 1, 1, 0, 1, 1, 0], bool)
    spoiled = np.where(keep[:, None], x, 1e4)
    functions = [lambda a, m, f=f: f(a, mask=m) for f in compute_ranks(x)]
    functions += [lambda a, m, k=k: norms.matrix_norm(a, k, mask=m) for k in norms.NORMS]
    functions.append(lambda a, m: rc.residual_ratio(a, mask=m))
    masked = jax.jit(lambda a, m: [f(a, m) for f in functions])(spoiled, keep)
    plain = jax.jit(lambda a: [f(a, None) for f in functions])(x[keep])
    np.testing.assert_allclose(masked, plain, rtol=2e-4)
    residual = rc.residual(spoiled, mask=keep)
    assert_close(residual[keep], rc.residual(x[keep]), atol=1e-6)
    np.testing.assert_array_equal(residual[~keep], 0)


def test_the_mean_minimises_the_frobenius_norm():
    x = tokens(9, 4, seed=5) ** 3
    least, rng = norms.matrix_norm(rc.residual(x), "frobenius"), np.random.default_rng(0)
    for size in (1e-2, 0.3):
        moved = rc.residual(x) + size * rng.standard_normal((1, 4))
        assert norms.matrix_norm(moved, "frobenius") > least


def test_edges():
    one = np.ones((4, 3), np.float32)
    assert_close(rc.residual_ratio(one), 0, atol=1e-6)
    np.testing.assert_array_equal(rc.residual_ratio(0 * one), 0)
    np.testing.assert_allclose(rs.token_cosine(one), 1, rtol=1e-6)
    np.testing.assert_allclose(rs.effective_rank(np.eye(4)), 4, rtol=1e-5)
    for rank in (rs.effective_rank, rs.stable_rank):
        np.testing.assert_allclose(rank(one), 1, rtol=1e-4)
        np.testing.assert_array_equal(rank(0 * one), 0)
    outer = np.outer([1, -2, 3], [1, 1, 2]).astype(np.float32)
    assert rs.rank_one_ratio(outer) < 1e-6 < 0.5 < rc.residual_ratio(outer)
    assert rc.residual(one[:1]).shape == (1, 3)


@parametrize_refusals(
    [
        (lambda: rc.residual(np.ones(3)), r"\(3,\)"),
        (lambda: rc.residual(np.ones((0, 4))), r"\(0, 4\)"),
        (lambda: rc.composite_norm(np.array([[1.0, np.nan]])), "1 values that are not finite"),
        (lambda: rc.residual_ratio(np.ones((2, 2)), norm="two"), "norm='two'"),
        (lambda: rc.residual(np.ones((2, 2)), mask=np.ones(3, bool)), r"\(3,\)"),
        (lambda: rc.residual(np.ones((2, 2)), mask=np.zeros(2, bool)), "leaves no token"),
        (lambda: rc.residual(np.ones((2, 2)), mask=np.ones(2) / 2), "a mask is boolean"),
        (lambda: rc.token_cosine(np.ones((1, 2))), r"\(1, 2\)"),
    ]
)
def test_refusals_name_the_value(arguments, message):
    is_refused(message, *arguments)


def test_small_singular_values_of_float32_are_kept():
    """A direction below the square root of epsilon, in float32 3e-4."""
    small = np.array([[1, 1], [1, 1 + 2e-5]], np.float32)
    assert abs(norms.compute_singular_values(small)[1] - 1e-5) < 1e-6


def test_participation_ratio():
    x = np.random.default_rng(0).standard_normal((7, 4))
    squares = np.linalg.svd(x, compute_uv=False) ** 2
    expected = squares.sum() ** 2 / (squares**2).sum()
    assert_close(rc.participation_ratio(x), expected, rtol=1e-12)
    padded = np.concatenate([x, np.full((2, 4), 9.0)])
    ratio = rc.participation_ratio(padded, mask=np.arange(9) < 7)
    assert_close(ratio, expected, rtol=1e-12)
    assert float(rc.participation_ratio(np.eye(3, 5))) == pytest.approx(3)
    assert float(rc.participation_ratio(np.zeros((3, 5)))) == 0


PLAIN = {
    "svd": lambda x: tuple(jnp.linalg.svd(x, full_matrices=False)),
    "svdvals": jnp.linalg.svdvals,
}


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
