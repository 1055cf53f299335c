"""The table of measures: each alone, in a profile, in monitor, and of padding alone."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures.layer_measures import NEEDS_TWO_TOKENS
from rank_collapse.measures.monitor import (
    ATTENTION_MEASURES as MONITORED_ATTENTION,
    TOKEN_MEASURES as MONITORED_TOKENS,
)
from rank_collapse.measures.table import COLLAPSE, check_measure_names
from tests.support.closeness import near
from tests.support.refusals import is_refused

ATTENTION_MEASURES = [name for name, measure in rc.MEASURES.items() if measure.needs == "attention"]
TOKEN_MEASURES = [name for name, measure in rc.MEASURES.items() if measure.needs == "tokens"]
NEEDS = ("tokens", "attention", "scores")
N, D = 6, 4
X = np.random.default_rng(0).standard_normal((3, N, D)).astype(np.float32) + 0.3
KEEP = np.arange(N) < 4
RNG = np.random.default_rng(3)
INPUTS = {
    "tokens": RNG.standard_normal((2, N, D)) * [1, 2, 3, 4] + 0.5,
    "attention": RNG.dirichlet(np.ones(N), (2, 3, N)),
    "scores": RNG.standard_normal((2, 3, N, N)),
}
ROWS = np.arange(N) < np.array([[4], [1], [0]])  # four tokens, one, none


def test_every_row_says_what_it_is():
    for name, measure in rc.MEASURES.items():
        assert measure.of is getattr(rc.measures, name) and measure.needs in NEEDS
        assert measure.meaning and measure.cost
        assert measure.alarm is None or measure.alarm.name == name
    assert {*MONITORED_TOKENS, *MONITORED_ATTENTION} <= rc.MEASURES.keys()
    weights = INPUTS["attention"]
    assert {t.name for t in COLLAPSE} - {"loss"} <= rc.monitor(X[:2], weights).keys()
    is_refused(
        r"'sink_rate' is not one of .* which are the measures of tokens",
        rc.profile,
        X,
        measures=("residual_ratio", "sink_rate"),
    )
    for names in ("sink_rate", ["sink_rate"]):
        assert check_measure_names(names, "attention") == ("sink_rate",)
    assert check_measure_names("spike_norm") == ("spike_norm",)


MASKED = ("tokens", "attention")  # of which tokens may be missing


def compute_table(inputs, names=tuple(rc.MEASURES)):
    """Computes {name: the measure of its kind of input}."""
    measures = {name: rc.MEASURES[name] for name in names}
    return {
        name: m(inputs[m.needs], mask=KEEP if m.needs in MASKED else None)
        for name, m in measures.items()
    }


@pytest.mark.parametrize(
    ("framework", "dtype"),
    [("numpy", "float64"), ("jax", "float32"), ("torch", "float64")]
    + [
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("numpy", "float32"),
            ("jax", "float64"),
            ("torch", "float32"),
        )
    ],
)
def test_results_are_of_the_frameworks_of_their_arguments(framework, dtype):
    """They are equal to 1e-6, as are gradients in float64."""
    inputs, want = {n: x.astype(dtype) for n, x in INPUTS.items()}, compute_table(INPUTS)
    with jax.enable_x64(dtype == "float64"):
        if framework == "numpy":
            values, kind = compute_table(inputs), np.ndarray | np.generic
        elif framework == "jax":
            arrays = jax.tree.map(jnp.asarray, inputs)
            values, kind = jax.jit(compute_table)(arrays), jax.Array
            assert isinstance(rc.residual_ratio(arrays["tokens"]), kind)
        else:
            torch = pytest.importorskip("torch")
            arrays = {n: torch.tensor(x, requires_grad=True) for n, x in inputs.items()}
            values, kind = compute_table(arrays), torch.Tensor
            if dtype == "float64":
                check_gradients(inputs, arrays, values)
            values = {n: v.detach() if isinstance(v, kind) else v for n, v in values.items()}
    for name, value in values.items():
        assert isinstance(value, kind) and str(value.dtype).endswith(dtype), name
        np.testing.assert_allclose(value, want[name], rtol=1e-6, atol=1e-6, err_msg=name)


def check_gradients(inputs, arrays, values):
    """Asserts that torch has the gradients of JAX, for every measure that has one."""
    import torch

    names = [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.requires_grad]

    def compute_gradients(inputs):
        def make_gradient(name):
            kind = rc.MEASURES[name].needs
            return jax.grad(lambda x: jnp.sum(compute_table(inputs | {kind: x}, [name])[name]))

        return {name: make_gradient(name)(inputs[rc.MEASURES[name].needs]) for name in names}

    for name, expected in jax.jit(compute_gradients)(inputs).items():
        x = arrays[rc.MEASURES[name].needs]
        grad = torch.autograd.grad(values[name].sum(), x, retain_graph=True)[0]
        np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=1e-9, err_msg=name)


def test_torch_is_measured_under_autocast_in_full_precision():
    torch = pytest.importorskip("torch")
    x = torch.tensor(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scalars = rc.monitor(x, mask=ROWS)
    near(jax.tree.map(np.asarray, scalars), rc.monitor(X, mask=ROWS), rtol=1e-6)


@pytest.mark.full
def test_by_numpy_as_by_jax_and_nan_where_there_is_nothing():
    """Each measure alone, in jit, in a profile of concrete and of traced states."""

    def measure_each(x, mask):
        return {name: rc.MEASURES[name](x, mask=mask) for name in TOKEN_MEASURES}

    single = [n for n in TOKEN_MEASURES if n != "token_cosine"]  # one token has no cosine
    one_token = {n: rc.MEASURES[n](X[1, :1]) for n in single} | {"token_cosine": np.nan}
    expected = {n: [rc.MEASURES[n](X[0, :4]), one_token[n], np.nan] for n in TOKEN_MEASURES}
    for fn in (measure_each, jax.jit(measure_each)):
        results = [fn(x, row) for x, row in zip(X, ROWS, strict=True)]
        for name, want in expected.items():
            values = [float(f[name]) for f in results]
            np.testing.assert_allclose(values, want, rtol=2e-5, atol=1e-6, err_msg=name)

    def make_profile(hidden, mask):
        return rc.profile(hidden, measures=TOKEN_MEASURES, mask=mask, batch_axis=1)

    broken = X[None].copy()
    broken[0, 0, 1, 2] = np.nan
    for fn in (make_profile, jax.jit(make_profile)):
        results, broken_results = fn(X[None], ROWS), fn(broken, ROWS)
        for name, want in expected.items():
            want = [want[0], np.nan if name in NEEDS_TWO_TOKENS else want[1], want[2]]
            np.testing.assert_allclose(results[name][0], want, rtol=2e-5, atol=1e-6, err_msg=name)
            assert np.isnan(broken_results[name][0, 0]), name


@pytest.mark.parametrize("traced", [False, True])
def test_monitor_leaves_out_what_is_not_there(traced):
    attention = np.asarray(jax.nn.softmax(jnp.asarray(X @ X.swapaxes(-1, -2)))[:, None])
    fn = lambda x, p, m: rc.monitor(x, p, mask=m)  # noqa: E731
    fn = jax.jit(fn) if traced else fn
    scalars = fn(X, attention, ROWS)
    both = [rc.monitor(X[i], attention[i], mask=ROWS[i]) for i in range(2)]
    pooled = np.stack([X[0, :4].mean(axis=0), X[1, 0]])
    batch = rc.residual_ratio(pooled), rc.effective_rank(pooled)
    near(
        (scalars.pop("batch_residual_ratio"), scalars.pop("batch_effective_rank")), batch, rtol=2e-5
    )
    for name, value in scalars.items():
        examples = both[:1] if name == "token_cosine" else both
        np.testing.assert_allclose(
            value, np.nanmean([b[name] for b in examples]), rtol=2e-5, err_msg=name
        )
    assert np.isnan(both[1]["token_cosine"])
    none = fn(X, attention, 0 * ROWS)
    assert all(np.isnan(value) for value in none.values())
    broken = fn(np.where(X[0, 0, 0] == X, np.nan, X), attention, ROWS)
    assert all(np.isnan(broken[name]) for name in MONITORED_TOKENS)
    assert all(np.isfinite(broken[name]) for name in MONITORED_ATTENTION)


def test_precision_is_that_of_the_widest():
    """Tokens of size 1000 that differ by 1e-6, which float32 does not hold."""
    x = 1000 + 1e-6 * np.random.default_rng(1).standard_normal((N, D))
    want = float(rc.residual_ratio(x))
    assert 0 < want < 1e-8
    ratio = rc.monitor(x)["residual_ratio"]
    assert ratio.dtype == np.float64 and float(ratio) == pytest.approx(want, rel=1e-6)
    for hidden in ([X[0], x], [x, X[0]], (x, X[0])):
        ratio = np.asarray(rc.profile(hidden)["residual_ratio"])
        assert ratio.dtype == np.float64 and ratio.min() == pytest.approx(want, rel=1e-6)


@functools.cache  # one program for all sizes
def compile_measures():
    def measure(x):
        return {name: rc.MEASURES[name](x) for name in TOKEN_MEASURES}

    return measure, jax.jit(measure), jax.jit(jax.jacrev(measure))


@pytest.mark.parametrize("size", [pytest.param(3.3e38, marks=pytest.mark.full), 1e38, 1e30, 1e-30])
def test_no_size_of_tokens_over_or_underflows(size):
    """In float32, against float64; gradients are those of ordinary tokens divided by the size."""
    x = X[0] / np.abs(X[0]).max()
    large = (x.astype(np.float64) * size).astype(np.float32)
    measure, compiled, slopes = compile_measures()
    want = measure(large.astype(np.float64))
    for fn in (measure, compiled):
        near(fn(large), want, rtol=1e-6)
    ordinary, gradients = slopes(x), slopes(large)
    for name in TOKEN_MEASURES:
        assert np.isfinite(gradients[name]).all(), name
        if size < 1e31:  # else they are below the least number that XLA computes with
            scaled = gradients[name] * size
            np.testing.assert_allclose(scaled, ordinary[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_tokens_of_all_sizes_beside_each_other():
    """Cosines see no size: one token near the largest number, one near the least."""
    sizes = np.array([3e38, 1, 1e-30, 1e10, 1e-20, 5])[:, None]
    rows = X[0] / np.abs(X[0]).max(axis=1, keepdims=True)
    tokens = (rows.astype(np.float64) * sizes).astype(np.float32)
    want = rc.token_cosine(tokens.astype(np.float64))
    for fn in (rc.token_cosine, jax.jit(rc.token_cosine)):
        np.testing.assert_allclose(fn(tokens), want, rtol=1e-6)
    residual = rc.residual(tokens)
    np.testing.assert_allclose(residual, rc.residual(tokens.astype(np.float64)), rtol=1e-6)


def test_another_number_of_tokens_compiles_nothing(caplog):
    p = np.full((2, 9, 9), 1 / 9, np.float32)

    def measure(n):
        x = X[0, :1].repeat(n, 0) + np.arange(n, dtype=np.float32)[:, None]
        for tokens in (x, jax.device_put(x)):
            rc.monitor(tokens, p[:, :n, :n] * 9 / n, mask=np.ones(n, int))
            rc.profile([tokens, tokens], measures=TOKEN_MEASURES, mask=np.ones(n, bool))
            rc.profile([p[:, :n, :n] * 9 / n], measures=ATTENTION_MEASURES, mask=np.ones(n))
            rc.residual_ratio(tokens, norm="spectral")

    measure(5)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        measure(7)
        assert not [m for m in caplog.messages if m.startswith("Compiling")]
        jax.jit(lambda a: a + 7)(0.0)
    assert any(m.startswith("Compiling") for m in caplog.messages)


def test_many_tokens_are_added_up_without_losing_digits():
    """Added one by one in float32, 50,000 tokens would give a mean further off than they differ."""
    x = (1.3 + 1e-5 * np.random.default_rng(2).standard_normal((50_000, 3))).astype(np.float32)
    # the mean itself is rounded by up to 1.2e-7, the tokens differ from it by 1e-5
    wanted = rc.residual_ratio(x.astype(np.float64))
    np.testing.assert_allclose(rc.residual_ratio(x), wanted, rtol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["shard_map", "explicit"])
def test_a_batch_over_devices_is_measured_as_on_one(kind):
    """With shard_map's default checks, and under an explicit mesh that nobody has set."""
    explicit = jax.sharding.AxisType.Explicit if kind == "explicit" else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("b",), axis_types=(explicit,))
    rows, tokens, batch = jax.sharding.PartitionSpec("b"), X[:2], jax.vmap(rc.monitor)
    if kind == "shard_map":
        batch = jax.shard_map(batch, mesh=mesh, in_specs=rows, out_specs=rows)
    else:
        tokens = jax.device_put(tokens, jax.sharding.NamedSharding(mesh, rows))
    expected = jax.tree.map(lambda *a: np.stack(a), *map(rc.monitor, X[:2]))
    near(jax.jit(batch)(tokens), expected, rtol=2e-5)


@pytest.mark.parametrize("size", [1e-39, 1e-41])
def test_denormal_tokens_are_measured_outside_of_jit_and_are_0_inside(size):
    """docs/limits.md says so."""
    x = (X[0] * np.float32(size)).astype(np.float32)
    expected = float(rc.residual_ratio(x.astype(np.float64)))
    assert float(rc.residual_ratio(jnp.asarray(x))) == pytest.approx(expected, rel=1e-5)
    inside = float(jax.jit(rc.residual_ratio)(x))
    assert inside == 0 or np.isnan(inside)
