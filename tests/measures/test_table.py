"""The table of measures: each alone, in a profile, in monitor, and of padding alone."""

import dataclasses
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import near
from refusals import each_is_refused, is_refused

import rank_collapse as rc
from rank_collapse.measures.monitor import ATTENTION, TOKENS
from rank_collapse.measures.table import COLLAPSE

OF_ATTENTION = [name for name, measure in rc.MEASURES.items() if measure.needs == "attention"]
OF_TOKENS = [name for name, measure in rc.MEASURES.items() if measure.needs == "tokens"]
NEEDS = ("tokens", "attention", "scores", "streams")
N, D = 6, 4
X = np.random.default_rng(0).standard_normal((3, N, D)).astype(np.float32) + 0.3
KEEP = np.arange(N) < 4
RNG = np.random.default_rng(3)
INPUTS = {
    "tokens": RNG.standard_normal((2, N, D)) * [1, 2, 3, 4] + 0.5,
    "attention": RNG.dirichlet(np.ones(N), (2, 3, N)),
    "scores": RNG.standard_normal((2, 3, N, N)),
    "streams": RNG.standard_normal((2, 3, N, D)),
}
ROWS = np.arange(N) < np.array([[4], [1], [0]])  # four tokens, one, none


def test_every_row_says_what_it_is():
    for name, measure in rc.MEASURES.items():
        assert measure.of is getattr(rc, name) and measure.needs in NEEDS
        assert measure.meaning and measure.cost
        assert measure.alarm is None or measure.alarm.name == name
    assert {*TOKENS, *ATTENTION} <= rc.MEASURES.keys()
    assert {t.name for t in COLLAPSE} - {"loss"} <= {*TOKENS, *ATTENTION}
    is_refused(
        r"'sink_rate' is not one of .* which are of tokens",
        rc.profile,
        X,
        measures=("residual_ratio", "sink_rate"),
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@pytest.mark.parametrize("name", rc.MEASURES)
def test_results_are_of_the_frameworks_of_their_arguments(name, framework, dtype):
    """And equal to 1e-6, as are gradients in float64."""
    measure = rc.MEASURES[name]
    x, mask = INPUTS[measure.needs], KEEP if measure.needs in ("tokens", "attention") else None
    want, grad = measure(x, mask=mask), None
    x = x.astype(dtype)
    with jax.enable_x64(dtype == "float64"):
        if framework == "numpy":
            found, kind = measure(x, mask=mask), np.ndarray | np.generic
        elif framework == "jax":
            found, kind = jax.jit(lambda x: measure(x, mask=mask))(x), jax.Array
            assert isinstance(measure(jnp.asarray(x), mask=mask), jax.Array)
        else:
            torch = pytest.importorskip("torch")
            given = torch.tensor(x, requires_grad=True)
            found, kind = measure(given, mask=mask), torch.Tensor
            if dtype == "float64" and found.requires_grad:
                grad = torch.autograd.grad(found.sum(), given)[0]
                own = jax.jit(jax.grad(lambda x: jnp.sum(measure(x, mask=mask))))(x)
                np.testing.assert_allclose(grad, own, rtol=1e-6, atol=1e-9)
            found = found.detach() if isinstance(found, kind) else found
    assert isinstance(found, kind) and str(found.dtype).endswith(dtype)
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)
    assert framework.lower() in " ".join(measure.frameworks).lower()


def test_a_framework_that_is_not_covered_says_so():
    torch = pytest.importorskip("torch")
    of_numpy = dataclasses.replace(rc.MEASURES["stable_rank"], frameworks=("NumPy", "JAX"))
    each_is_refused(
        (lambda: of_numpy(torch.ones(3, 2)), r"of \('NumPy', 'JAX'\), not of arrays of torch"),
        (
            lambda: rc.residual(torch.ones(3, 2), center="composite"),
            "center='composite' is of NumPy and JAX",
        ),
    )


def test_torch_is_measured_under_autocast_in_full_precision():
    torch = pytest.importorskip("torch")
    x = torch.tensor(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rc.monitor(x, mask=ROWS)
    near(jax.tree.map(np.asarray, found), rc.monitor(X, mask=ROWS), rtol=1e-6)


@pytest.mark.parametrize("name", OF_TOKENS)
def test_by_numpy_as_by_jax_and_nan_where_there_is_nothing(name):
    """Alone, in jit, in a profile of concrete and of traced states."""
    measure = rc.MEASURES[name]
    alone = float(measure(X[0, :4]))
    of_one = np.nan if name == "token_cosine" else float(measure(X[1, :1]))
    expected = [alone, of_one, np.nan]
    for fn in (measure, jax.jit(measure)):
        found = [float(fn(x, mask=row)) for x, row in zip(X, ROWS, strict=True)]
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)

    def profile(hidden, mask):
        return rc.profile(hidden, measures=name, mask=mask, batch_axis=1)

    for fn in (profile, jax.jit(profile)):
        np.testing.assert_allclose(fn(X[None], ROWS)[name][0], expected, rtol=2e-5, atol=1e-6)
        broken = X[None].copy()
        broken[0, 0, 1, 2] = np.nan
        assert np.isnan(fn(broken, ROWS)[name][0, 0])


@pytest.mark.parametrize("traced", [False, True])
def test_monitor_leaves_out_what_is_not_there(traced):
    attention = np.asarray(jax.nn.softmax(jnp.asarray(X @ X.swapaxes(-1, -2)))[:, None])
    fn = lambda x, p, m: rc.monitor(x, p, mask=m)  # noqa: E731
    fn = jax.jit(fn) if traced else fn
    found = fn(X, attention, ROWS)
    both = [rc.monitor(X[i], attention[i], mask=ROWS[i]) for i in range(2)]
    for name, value in found.items():
        own = both[:1] if name == "token_cosine" else both
        np.testing.assert_allclose(value, np.mean([b[name] for b in own]), rtol=2e-5, err_msg=name)
    assert np.isnan(both[1]["token_cosine"])
    none = fn(X, attention, 0 * ROWS)
    assert all(np.isnan(value) for value in none.values())
    broken = fn(np.where(X[0, 0, 0] == X, np.nan, X), attention, ROWS)
    assert all(np.isnan(broken[name]) for name in TOKENS)
    assert all(np.isfinite(broken[name]) for name in ATTENTION)


def test_precision_is_that_of_the_widest():
    """Tokens of size 1000 that differ by 1e-6, which float32 does not hold."""
    x = 1000 + 1e-6 * np.random.default_rng(1).standard_normal((N, D))
    want = float(rc.residual_ratio(x))
    assert 0 < want < 1e-8
    found = rc.monitor(x)["residual_ratio"]
    assert found.dtype == np.float64 and float(found) == pytest.approx(want, rel=1e-6)
    for hidden in ([X[0], x], [x, X[0]], (x, X[0])):
        found = np.asarray(rc.profile(hidden)["residual_ratio"])
        assert found.dtype == np.float64 and found.min() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("size", [3.3e38, 1e38, 1e30, 1e-30])
@pytest.mark.parametrize("name", OF_TOKENS)
def test_no_size_of_tokens_over_or_underflows(name, size):
    """In float32, against float64; gradients are those of ordinary tokens over the size."""
    measure, x = rc.MEASURES[name], X[0] / np.abs(X[0]).max()
    large = (x.astype(np.float64) * size).astype(np.float32)
    want = measure(large.astype(np.float64))
    for fn in (measure, jax.jit(measure)):
        np.testing.assert_allclose(fn(large), want, rtol=1e-6)
    slope, own = (jax.grad(lambda x: measure(x))(jnp.asarray(a)) for a in (x, large))
    assert np.isfinite(own).all()
    if size < 1e31:  # else they are below the least number that XLA computes with
        np.testing.assert_allclose(own * size, slope, rtol=1e-3, atol=1e-5)


def test_tokens_of_all_sizes_beside_each_other():
    """Cosines see no size: one token near the largest number, one near the least."""
    sizes = np.array([3e38, 1, 1e-30, 1e10, 1e-20, 5])[:, None]
    rows = X[0] / np.abs(X[0]).max(axis=1, keepdims=True)
    given = (rows.astype(np.float64) * sizes).astype(np.float32)
    want = rc.token_cosine(given.astype(np.float64))
    for fn in (rc.token_cosine, jax.jit(rc.token_cosine)):
        np.testing.assert_allclose(fn(given), want, rtol=1e-6)
    rest = rc.residual(given)
    np.testing.assert_allclose(rest, rc.residual(given.astype(np.float64)), rtol=1e-6)


def test_another_number_of_tokens_compiles_nothing(caplog):
    p = np.full((2, 9, 9), 1 / 9, np.float32)

    def measured(n):
        x = X[0, :1].repeat(n, 0) + np.arange(n, dtype=np.float32)[:, None]
        for given in (x, jax.device_put(x)):
            rc.monitor(given, p[:, :n, :n] * 9 / n, mask=np.ones(n, int))
            rc.profile([given, given], measures=OF_TOKENS, mask=np.ones(n, bool))
            rc.profile([p[:, :n, :n] * 9 / n], measures=OF_ATTENTION, mask=np.ones(n))
            for center in ("median", "midrange"):
                rc.residual_ratio(given, center=center, norm="spectral")

    measured(5)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        measured(7)
        assert not [m for m in caplog.messages if m.startswith("Compiling")]
        jax.jit(lambda a: a + 7)(0.0)
    assert any(m.startswith("Compiling") for m in caplog.messages)


def test_many_tokens_are_added_up_without_losing_digits():
    """Added one by one in float32 the mean of 50,000 tokens would be off by more than they are."""
    x = (1.3 + 1e-5 * np.random.default_rng(2).standard_normal((50_000, 3))).astype(np.float32)
    # the mean itself is rounded by up to 1.2e-7, the tokens differ from it by 1e-5
    wanted = rc.residual_ratio(x.astype(np.float64))
    np.testing.assert_allclose(rc.residual_ratio(x), wanted, rtol=1e-3)


COMPOSITE = partial(rc.residual_ratio, center="composite")


@pytest.mark.parametrize(
    "measure", [rc.monitor, pytest.param(COMPOSITE, marks=pytest.mark.slow)], ids=["all", "centre"]
)
@pytest.mark.parametrize("kind", ["shard_map", "explicit"])
def test_a_batch_over_devices_is_measured_as_on_one(kind, measure):
    """With shard_map's default checks, and under an explicit mesh that nobody has set."""
    explicit = jax.sharding.AxisType.Explicit if kind == "explicit" else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("b",), axis_types=(explicit,))
    rows, given, batch = jax.sharding.PartitionSpec("b"), X[:2], jax.vmap(measure)
    if kind == "shard_map":
        batch = jax.shard_map(batch, mesh=mesh, in_specs=rows, out_specs=rows)
    else:
        given = jax.device_put(given, jax.sharding.NamedSharding(mesh, rows))
    expected = jax.tree.map(lambda *a: np.stack(a), *map(measure, X[:2]))
    near(jax.jit(batch)(given), expected, rtol=2e-5)
