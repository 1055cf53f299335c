"""One call for Equinox: the scalars are those of rc.monitor on the same arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse import jax_watch
from tests.oracles.flax_layers import (
    B,
    D,
    H,
    L,
    Sequence,
    X,
    check_scalars,
    monitor_layers,
)


@pytest.mark.full
def test_equinox_blocks_in_jit_and_vmap():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), L)

    class Network(eqx.Module):
        layers: list

        def __call__(self, x):
            for layer in self.layers:
                x = x + layer(x, x, x)
            return x

    model = Network([eqx.nn.MultiheadAttention(H, D, key=key) for key in keys])

    @eqx.filter_jit
    def monitor_batch(model, batch):
        def monitor_example(x):
            unit = functools.partial(rc.monitor, tokens="unit")
            return jax_watch.equinox_monitored(model, x, blocks=lambda m: m.layers, measure=unit)

        return jax.vmap(monitor_example)(batch)

    out, scalars = monitor_batch(model, X)
    for example in range(B):
        x, reads = X[example], []
        for layer in model.layers:
            reads.append(x)
            x = x + layer(x, x, x)
        np.testing.assert_allclose(out[example], x, rtol=1e-5, atol=1e-6)
        example_scalars = {name: values[example] for name, values in scalars.items()}
        check_scalars(example_scalars, monitor_layers(reads, [None] * L, tokens="unit"))


FULL = [pytest.param(how, marks=pytest.mark.full) for how in ("vmap", "jit", "stacked")]


@pytest.mark.full
@pytest.mark.parametrize("how", ["checkpoint", *FULL])
def test_equinox_transformations_inside(how):
    """Tokens, losses and gradients are those of the model without a measurement."""
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        skip_gain: float

        def __call__(self, x):
            return self.skip_gain * x + self.attention(x, x, x)

    class Network(eqx.Module):
        layers: list | Layer

        def __call__(self, x):
            if how == "stacked":
                arrays, static = eqx.partition(self.layers, eqx.is_array)

                def step(x, layer):
                    return (jax.vmap(eqx.combine(layer, static))(x), None)

                return jax.lax.scan(step, x, arrays)[0]
            transform = {"checkpoint": eqx.filter_checkpoint, "jit": eqx.filter_jit}
            for layer in self.layers:
                assert layer.skip_gain == 0.5 and isinstance(layer, Layer)
                x = jax.vmap(transform.get(how, lambda f: f)(layer))(x)
            return x

    keys = jax.random.split(jax.random.key(0), L)
    layers = [Layer(eqx.nn.MultiheadAttention(H, D, key=key), 0.5) for key in keys]

    def stack(*leaves):
        return jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0]

    model = Network(jax.tree.map(stack, *layers) if how == "stacked" else layers)

    def compute_loss(model):
        return jnp.sum(model(X) ** 2), None

    def compute_monitored_loss(model):
        out, scalars = jax_watch.equinox_monitored(model, X, blocks=lambda m: m.layers)
        return jnp.sum(out**2), scalars

    steps = [
        eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(model)
        for loss in (compute_monitored_loss, compute_loss)
    ]
    ((loss, scalars), gradients), ((expected_loss, _), expected) = steps
    assert loss == expected_loss
    arrays = [jax.tree.leaves(eqx.filter(g, eqx.is_array)) for g in (gradients, expected)]
    for a, b in zip(*arrays, strict=True):
        np.testing.assert_array_equal(a, b)
    x, reads = X, []
    for layer in layers:
        reads.append(np.asarray(x, np.float64))
        x = jax.vmap(layer)(x)
    check_scalars(scalars, monitor_layers(reads, [None] * L))
    ratios = [np.mean([compute_ratio(example) for example in read]) for read in reads]
    np.testing.assert_allclose(scalars["residual_ratio"], ratios, rtol=1e-5)
    np.testing.assert_array_equal(compute_monitored_loss(model)[0], compute_loss(model)[0])


def compute_ratio(x):
    """Computes the residual ratio by its definition."""
    norms = [a.sum(axis=0).max() * a.sum(axis=1).max() for a in np.abs([x - x.mean(axis=0), x])]
    return np.sqrt(norms[0] / norms[1])


def test_equinox_batches_and_losses_by_a_call():
    eqx = pytest.importorskip("equinox")
    model = Sequence([eqx.nn.MultiheadAttention(H, D, key=jax.random.key(i)) for i in range(L)])

    def call(model, x):
        return jax.vmap(model)(x)

    out, scalars = jax_watch.equinox_monitored(model, X, blocks=lambda m: m.layers, call=call)
    np.testing.assert_array_equal(out, call(model, X))
    x, reads = X, []
    for layer in model.layers:
        reads.append(x)
        x = jax.vmap(lambda x, layer=layer: layer(x, x, x))(x)
    check_scalars(scalars, monitor_layers(reads, [None] * L))


def test_stacked_layers_in_a_scan_are_layers():
    """One module holds the arrays of all layers."""
    eqx = pytest.importorskip("equinox")

    class Scale(eqx.Module):
        factor: jax.Array

        def __call__(self, x):
            return self.factor * x

    class Network(eqx.Module):
        layers: Scale

        def __call__(self, x):
            return jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)[0]

    model = Network(Scale(jnp.array([2.0, 3.0, 5.0])))
    out, scalars = jax_watch.equinox_monitored(
        model, X, blocks=lambda m: m.layers, measure=lambda x, weights: {"first": x[0, 0, 0]}
    )
    np.testing.assert_allclose(out, 30 * X, rtol=1e-6)
    np.testing.assert_allclose(scalars["first"], X[0, 0, 0] * np.array([1, 2, 6]), rtol=1e-6)


def test_a_block_that_the_model_compiles_is_compiled_once():
    """Its class is part of what was compiled, so a second call needs the same one."""
    eqx, traced = pytest.importorskip("equinox"), []

    class Scale(eqx.Module):
        factor: jax.Array

        def __call__(self, x):
            traced.append(type(self).__qualname__)
            return self.factor * x

    run, model = eqx.filter_jit(lambda block, x: block(x)), [Scale(jnp.float32(2))]
    for _ in range(2):
        out, scalars = jax_watch.equinox_monitored(
            model,
            X,
            blocks=lambda m: [m[0]],
            call=lambda m, x: run(m[0], x),
            measure=lambda x, weights: {"first": x[0, 0, 0]},
        )
        np.testing.assert_array_equal(out, 2 * X)
        assert scalars["first"] == X[0, 0, 0]
    assert traced == [Scale.__qualname__]


def test_functions_among_blocks_are_measured_by_the_tokens_they_read():
    """Each by its first argument that is tokens; what reads none is not measured."""
    pytest.importorskip("equinox")
    model = Sequence(
        [
            lambda x, y, z: 2.0 * x + 1.0,
            functools.partial(lambda scale, x, y, z: scale * x, 3.0),
            lambda x, y, z: x - y.mean(axis=-2, keepdims=True),
        ]
    )
    out, scalars = jax_watch.equinox_monitored(model, X, blocks=lambda m: m.layers)
    reads = [X, 2 * X + 1, 6 * X + 3]
    np.testing.assert_array_equal(out, model(X))
    check_scalars(scalars, monitor_layers(reads, [None] * L))
    out, scalars = jax_watch.equinox_monitored(
        model,
        X,
        blocks=lambda m: [m.layers[0]],
        call=lambda model, x, *, scale: scale * model.layers[0](y=x, x=2 * x, z=None),
        scale=3.0,
    )
    np.testing.assert_array_equal(out, 3 * (4 * X + 1))
    check_scalars(scalars, monitor_layers([X], [None]))  # of arguments by name the first
    single = Sequence([lambda x, y, z: x[0], lambda x, y, z: x])
    one, few = jax_watch.equinox_monitored(single, X[0], blocks=lambda m: m.layers)
    assert one.shape == (D,) and few["residual_ratio"].shape == (1,)


def test_equinox_models_get_their_inputs_and_options():
    """Also where no call is passed."""
    eqx = pytest.importorskip("equinox")

    class Network(eqx.Module):
        layers: list

        def __call__(self, x, shift=0.0, *, scale=1.0, mask=None):
            x = x if mask is None else jnp.where(mask, x, 0.0)
            return self.layers[0](scale * x) + shift

    mask = np.arange(X.shape[-2])[None, :, None] != 1
    for inputs, options, expected in (
        ((X,), {"scale": 3.0}, 3 * X),
        ((X, 2.0), {"scale": 3.0, "mask": mask}, 3 * X * mask + 2),
        ((X,), {"shift": 2.0, "mask": mask}, X * mask + 2),
        ((), {"x": X}, X),
    ):
        out, scalars = jax_watch.equinox_monitored(
            Network([lambda x: x]),
            *inputs,
            blocks=lambda m: m.layers,
            measure=lambda x, weights: {"second": x[0, 1, 0]},
            **options,
        )
        np.testing.assert_array_equal(out, expected)
        read = options.get("scale", 1.0) * X[0, 1, 0] * ("mask" not in options)
        np.testing.assert_array_equal(scalars["second"], [read])
