"""Taps inside every transformation of JAX, against the layers written out one after the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.watch.taps import measure_taps, tap
from tests.oracles import draws
from tests.support.marks import full_but
from tests.support.refusals import is_refused, parametrize_refusals

L, B, N, D = 3, 2, 5, 4
X = draws.normal(B, N, D)
W = draws.normal(L, D, D, seed=2)


def call_layer(x, w):
    tap(x)
    return jnp.tanh(x @ w) + x


def call_vmapped(w, x):
    for layer in w:
        x = jax.vmap(call_layer, (0, None))(x, layer)
    return x


def call_transposed(w, x):
    """The axis of the batch is the last one of what is mapped."""
    x = jnp.moveaxis(x, 0, -1)
    for layer in w:
        x = jax.vmap(call_layer, (-1, None), -1)(x, layer)
    return jnp.moveaxis(x, -1, 0)


def call_checkpointed_scan(w, x):
    layer = jax.checkpoint(jax.jit(call_layer), policy=jax.checkpoint_policies.dots_saveable)
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def call_vmapped_scan(w, x):
    return jax.vmap(lambda x: call_checkpointed_scan(w, x))(x)


def call_reversed_scan(w, x):
    def step(x, w):
        return (call_layer(x, w), None)

    return jax.lax.scan(step, x, w[::-1], reverse=True)[0]


def call_two_layers_a_step(w, x):
    def step(x, pair):
        for layer in pair:
            x = call_layer(x, layer)
        return x, None

    x = call_layer(x, w[0])
    return jax.lax.scan(step, x, w[None, 1:])[0]


def call_branches(w, x):
    for index, layer in enumerate(w):
        x = jax.lax.cond(index % 2 == jnp.int32(0), call_layer, call_layer, x, layer)
    return x


PROGRAMS = [
    call_vmapped,
    call_transposed,
    call_checkpointed_scan,
    call_vmapped_scan,
    call_two_layers_a_step,
    call_branches,
]
QUICK = call_vmapped, call_vmapped_scan, call_branches


def compute_ratio(x):
    """Computes the residual ratio by its definition."""
    norms = [a.sum(axis=0).max() * a.sum(axis=1).max() for a in np.abs([x - x.mean(axis=0), x])]
    return np.sqrt(norms[0] / norms[1])


def compute_layers(x):
    """Computes, in float64, the tokens that each layer reads."""
    x, w, reads = np.asarray(x, np.float64), np.asarray(W, np.float64), []
    for layer in w:
        reads.append(x)
        x = np.tanh(x @ layer) + x
    return reads


def measure_ratios(x, weights):
    """Computes two scalars of `rc.monitor`: the others would only be compiled."""
    ratios = "residual_ratio", "batch_residual_ratio"
    return {name: a for name, a in rc.monitor(x, weights).items() if name in ratios}


@pytest.mark.parametrize("program", full_but(PROGRAMS, *QUICK))
def test_scalars_outputs_and_gradients(program):
    reads = compute_layers(X)
    want = [np.mean([compute_ratio(example) for example in x]) for x in reads]
    pooled = [compute_ratio(x.mean(axis=1)) for x in reads]

    def compute_monitored_loss(w):
        out, scalars = measure_taps(program, measure_ratios, w, X)
        return jnp.sum(out**2), scalars

    def compute_loss(w):
        return jnp.sum(program(w, X) ** 2)  # with taps, which do nothing

    (loss, scalars), gradients = jax.jit(jax.value_and_grad(compute_monitored_loss, has_aux=True))(
        W
    )
    np.testing.assert_allclose(scalars["residual_ratio"], want, rtol=1e-5)
    np.testing.assert_allclose(scalars["batch_residual_ratio"], pooled, rtol=1e-5)
    expected_loss, expected = jax.jit(jax.value_and_grad(compute_loss))(W)
    assert loss == expected_loss
    np.testing.assert_array_equal(gradients, expected)
    out, scalars = measure_taps(program, measure_ratios, W, X)
    np.testing.assert_array_equal(out, program(W, X))
    np.testing.assert_allclose(scalars["residual_ratio"], want, rtol=1e-5)


def test_a_reversed_scan_numbers_layers_as_its_arrays():
    _, scalars = measure_taps(call_reversed_scan, measure_ratios, W, X)
    want = [np.mean([compute_ratio(example) for example in x]) for x in compute_layers(X)]
    np.testing.assert_allclose(scalars["residual_ratio"], want[::-1], rtol=1e-5)


def list_equations(program, name):
    """Lists the equations of a primitive in a program, also in those inside of it."""
    equations = []
    for eqn in program.eqns:
        equations += [eqn] if eqn.primitive.name == name else []
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            equations += list_equations(inner, name) if hasattr(inner, "eqns") else []
    return equations


def test_scans_and_checkpoints_keep_how_they_are_run():
    """The policy of what a checkpoint saves, how far a scan is unrolled, and the like."""
    policy = jax.checkpoint_policies.everything_saveable
    layer = jax.checkpoint(call_layer, policy=policy, prevent_cse=False)

    def model(w, x):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w, unroll=3)[0]

    measured = jax.make_jaxpr(lambda w, x: measure_taps(model, lambda x, _: {"a": x[0]}, w, x))
    for name, options in (
        ("scan", {"unroll": 3, "length": L, "reverse": False}),
        ("remat2", {"policy": policy, "prevent_cse": False}),
    ):
        programs = jax.make_jaxpr(model)(W, X[0]), measured(W, X[0])
        for program in programs:
            (eqn,) = list_equations(program.jaxpr, name)
            assert {key: eqn.params[key] for key in options} == options


def test_an_outer_vmap_keeps_its_axis():
    measured = functools.partial(measure_taps, call_checkpointed_scan, measure_ratios, W)
    _, scalars = jax.vmap(measured)(X[:, None])
    want = [[compute_ratio(x[i]) for x in compute_layers(X)] for i in range(B)]
    np.testing.assert_allclose(scalars["residual_ratio"], want, rtol=1e-5)


def test_weights_that_some_layers_do_not_have_and_outputs_that_are_no_arrays():
    weights = jnp.full((B, 2, N, N), 1 / N)

    def model(x):
        tap(x)
        jax.vmap(tap)(x, weights)
        jax.vmap(tap, (0, None))(x, weights[0])
        skipped = jax.lax.cond(x[0, 0, 0] > 1e9, lambda x: tap(x) or x, lambda x: x, x)
        return skipped, "text", None

    (_, text, none), scalars = measure_taps(model, rc.monitor, X)
    assert (text, none) == ("text", None)
    entropy = [np.nan, np.log(N), np.log(N), np.nan]
    np.testing.assert_allclose(scalars["attention_entropy"], entropy, rtol=1e-5)
    ratio = rc.monitor(X)["residual_ratio"]
    np.testing.assert_allclose(scalars["residual_ratio"], [*[ratio] * 3, np.nan], rtol=1e-5)


def test_layers_that_lack_a_scalar_are_gaps_in_scans_and_branches():
    """Branches of one, two and no layers, and scans of three; float16 does not round others."""
    weights = jnp.full((2, N, N), 1 / N)

    def measure(x, weights):
        scalars = {"first": x[0, 0]}
        return scalars if weights is None else scalars | {"sum": weights.sum()}

    def bare(x):
        tap(x)
        return x

    def weighted(x):
        tap(x, weights)
        return x

    def two(x):
        tap(x.astype(jnp.float16) + 1)
        tap(x + 2)
        return x

    def repeat(function, x):
        return jax.lax.scan(lambda x, _: (function(x), None), x, None, length=3)[0]

    def model(x, index):
        jax.vmap(tap, in_axes=(1, None))(jnp.stack([x, x + 9], axis=1), weights)
        jax.vmap(tap, in_axes=(None, 0))(x + 8, jnp.stack([weights, weights + 1]))
        x = repeat(bare, x)
        x = jax.lax.switch(index, (weighted, two, lambda x: x), x)
        return repeat(two, x)

    start, nan, total = float(X[0, 0, 0]), np.nan, 2.0 * N

    def measure_first(x, weights):
        return measure(x if x.ndim == 2 else x[1], weights if x.ndim == 2 else weights[1])

    for index, firsts, sums in (
        (0, [0, nan], [total, nan]),
        (1, [1, 2], [nan, nan]),
        (2, [nan, nan], [nan, nan]),
    ):
        _, scalars = measure_taps(model, measure_first, X[0], jnp.int32(index))
        want = start + np.array([9, 8, 0, 0, 0, *firsts, *[1, 2] * 3])
        np.testing.assert_allclose(scalars["first"], want, rtol=2e-3)
        want = [total, total + 2 * N * N, nan, nan, nan, *sums, *[nan] * 6]
        np.testing.assert_allclose(scalars["sum"], want, rtol=1e-6)
        assert scalars["first"][-1] == X[0, 0, 0] + 2


def test_a_measurement_may_be_a_vector_and_a_layer_may_have_none():
    """The longer branch is the second; an inner program returns a constant."""

    def tap_two(x):
        tap(x, x)
        tap(x + 1, x)
        return x

    def model(x, index):
        tap(x)
        _, constant = jax.jit(lambda x: (tap(x, x), 2.5))(x)
        x = jax.lax.switch(index, (lambda x: tap(x, x) or x, tap_two), x)
        return x, constant

    def measure_rows(x, weights):
        return {} if weights is None else {"row": x[0]}

    for index, third in ((0, np.nan), (1, X[0, 0] + 1)):
        (out, constant), scalars = measure_taps(model, measure_rows, X[0], jnp.int32(index))
        np.testing.assert_array_equal(out, X[0])
        assert constant == 2.5
        want = [np.full(D, np.nan), X[0, 0], X[0, 0], np.full(D, third)]
        np.testing.assert_array_equal(scalars["row"], np.stack(want))
        assert list(scalars) == ["row"]
    assert measure_taps(model, lambda x, weights: {}, X[0], jnp.int32(1))[1] == {}


def test_a_compiled_function_with_taps_is_measured_whether_or_not_it_ran_before():
    layer = jax.jit(call_layer)
    out = layer(X, W[0])
    for _ in range(2):
        measured, scalars = measure_taps(layer, measure_ratios, X, W[0])
        np.testing.assert_array_equal(measured, out)
        assert scalars["residual_ratio"].shape == (1,)
    assert measure_taps(jnp.sin, measure_ratios, X)[1] == {}
    sines = jax.jvp(lambda x: tap(x) or jnp.sin(x), (X,), (X,))  # its derivative is measured once
    np.testing.assert_array_equal(sines[0], jnp.sin(X))


@jax.custom_vjp
def call_custom(x):
    tap(x)
    return x


call_custom.defvjp(lambda x: (x, None), lambda _, g: (g,))


def call_loop(x):
    return jax.lax.while_loop(lambda x: x[0, 0, 0] < 9, lambda x: call_layer(x, W[0]) + 1, x)


@parametrize_refusals(
    [
        (lambda: measure_taps(call_loop, rc.monitor, X), "inside while cannot be measured"),
        (lambda: measure_taps(call_custom, rc.monitor, X), "inside custom_vjp_call cannot be"),
    ]
)
def test_what_gives_nothing_out_is_refused(arguments, message):
    is_refused(message, *arguments)
