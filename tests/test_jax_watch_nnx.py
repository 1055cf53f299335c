"""One call for NNX: the scalars are those of rc.monitor on the same arrays."""

import contextlib
import functools
import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rank_collapse as rc
from rank_collapse import jax_watch
from tests.oracles.flax_layers import (
    CAUSAL,
    B,
    D,
    H,
    L,
    Layer,
    N,
    X,
    check_scalars,
    compute_weights,
    monitor_layers,
)
from tests.support.refusals import is_refused


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(L)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.full
@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.full)])
def test_nnx(jit):
    model, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    states, reads, weights = [X], [], []
    for layer in other.layers:
        reads.append(layer.norm(states[-1]))
        parameters = nnx.to_pure_dict(nnx.state(layer.attention, nnx.Param))
        weights.append(compute_weights(parameters, reads[-1], CAUSAL))
        states.append(layer(states[-1]))

    def monitor_model(model):
        return jax_watch.nnx_monitored(model, X)

    before = nnx.MultiHeadAttention.__call__
    out, scalars = (nnx.jit(monitor_model) if jit else monitor_model)(model)
    assert nnx.MultiHeadAttention.__call__ is before
    assert model.layers[0].attention.attention_fn is other.layers[0].attention.attention_fn
    np.testing.assert_allclose(out, states[-1], rtol=1e-6, atol=1e-6)
    check_scalars(scalars, monitor_layers(reads, weights))
    message = "no attention was measured"
    is_refused(message, jax_watch.nnx_monitored, model, X, select=lambda _: False)


class VmappedModel(Model):
    def __call__(self, x):
        for layer in self.layers:
            x = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(layer, x)
        return x


class ExampleLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, D, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x))


def build_examples(rngs):
    model = VmappedModel(rngs)
    model.layers = nnx.List([ExampleLayer(rngs) for _ in range(L)])
    return model


@pytest.mark.full
def test_nnx_inner_and_outer_vmap_and_frames():
    model = build_examples(nnx.Rngs(0))
    _, scalars = jax_watch.nnx_monitored(model, X)
    x, reads, weights = X, [], []
    for layer in model.layers:
        reads.append(layer.norm(x))
        parameters = nnx.to_pure_dict(nnx.state(layer.attention, nnx.Param))
        weights.append(compute_weights(parameters, reads[-1], jnp.ones((1, 1, N, N))))
        x = layer(x)
    check_scalars(scalars, monitor_layers(reads, weights))
    frames = jnp.stack([X, 2 * X[::-1]])  # tokens [2, b, n, d]
    _, scalars = jax_watch.nnx_monitored(model.layers[0].attention, frames)
    want = rc.monitor(frames)["residual_ratio"]
    np.testing.assert_allclose(scalars["residual_ratio"], [want], rtol=1e-5)
    seeds = nnx.vmap(build_examples)(nnx.Rngs(0).split(2))
    unit = functools.partial(rc.monitor, tokens="unit")
    monitored = functools.partial(jax_watch.nnx_monitored, measure=unit)
    _, scalars = nnx.vmap(monitored, in_axes=(0, None))(seeds, X)
    assert scalars["residual_ratio"].shape == (2, L)


def test_variables_of_nnx_change_as_without_a_measurement():
    model, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    for _ in range(2):  # keys of dropout are counted
        out, _ = jax_watch.nnx_monitored(model, X)
        np.testing.assert_array_equal(out, other(X))
    states = [nnx.to_pure_dict(nnx.state(m, nnx.RngCount)) for m in (model, other)]
    assert jax.tree.leaves(states[0]) == jax.tree.leaves(states[1])


class InnerAttention(nnx.Module):
    @nnx.jit
    def __call__(self, x):
        return x[::-1]


class OuterAttention(nnx.Module):
    def __init__(self):
        self.inner = InnerAttention()

    def __call__(self, x):
        return x + self.inner(2 * x)


def test_what_jax_traced_before_is_measured_and_once_for_each_call():
    model, x = nnx.Sequential(OuterAttention(), OuterAttention()), X[0]
    measure = {"measure": lambda x, weights: {"first": x[0, 0]}}
    model(x)
    reads = np.stack([x, x + 2 * x[::-1]])[:, 0, 0]
    for kinds, scale in ((InnerAttention | OuterAttention, 2), (OuterAttention, 1)):
        _, scalars = jax_watch.nnx_monitored(
            model, x, select=lambda module, kinds=kinds: isinstance(module, kinds), **measure
        )
        np.testing.assert_allclose(scalars["first"], scale * reads, rtol=1e-6)


class JitAttention(nnx.MultiHeadAttention):
    __call__ = nnx.jit(nnx.MultiHeadAttention.__call__)


def test_weights_inside_of_an_inner_trace_are_not_measured():
    model = JitAttention(1, 2, decode=False, rngs=nnx.Rngs(0))
    measure = {"measure": lambda x, weights: {"has_weights": weights is not None}}
    _, scalars = nnx.eval_shape(lambda m: jax_watch.nnx_monitored(m, X[0, :, :2], **measure), model)
    assert scalars["has_weights"].shape == (1,)


def test_variables_of_a_model_outside_of_a_transformation_are_read_alone():
    model = nnx.Linear(D, D, rngs=nnx.Rngs(0))
    monitored = functools.partial(jax_watch.nnx_monitored, model, select=callable)
    slope = jax.grad(lambda t: monitored(t * X[0])[0].sum())
    want = jax.grad(lambda t: model(t * X[0]).sum())
    np.testing.assert_allclose(slope(1.0), want(1.0), rtol=1e-6)


def test_weights_of_nnx_are_causal_where_the_call_says_so_and_of_flax_alone():
    q = jax.random.normal(jax.random.key(0), (B, N, H, D // H))
    from flax.nnx.nn import attention as library

    record = jax_watch._Record()
    attend = record.keep_weights(library.dot_product_attention, library)
    attend(q, q, q, is_causal=True)
    masked = library.dot_product_attention_weights(q, q, mask=CAUSAL)
    np.testing.assert_allclose(record.weights, masked, rtol=1e-6)
    model = nnx.MultiHeadAttention(
        H, D, decode=False, rngs=nnx.Rngs(0), attention_fn=lambda q, k, v, **_: v
    )
    _, scalars = jax_watch.nnx_monitored(model, X)
    assert "attention_entropy" not in scalars and "residual_ratio" in scalars


class Mean(nnx.Module):
    """A mixer of a user, which is no attention of Flax; its first argument is no array."""

    def __call__(self, mode, x):
        return x + x.mean(axis=-2, keepdims=True)


class Shift(nnx.Module):
    def __call__(self, x, memory=None):
        return jnp.roll(x, 1, axis=-2)


class Mixers(nnx.Module):
    def __init__(self):
        self.mean, self.shift = Mean(), Shift()

    def __call__(self, x, *, scale):
        return scale * self.shift(memory=-x, x=self.mean("train", x))


def test_modules_of_every_class_that_is_selected_are_measured():
    out, scalars = jax_watch.nnx_monitored(
        Mixers(),
        X,
        select=lambda module: isinstance(module, Mean | Shift),
        measure=lambda x, weights: {"first": x[0, 0], "has_weights": weights is not None},
        scale=3.0,
    )
    mixed = X + X.mean(axis=-2, keepdims=True)
    np.testing.assert_allclose(out, 3 * np.roll(mixed, 1, axis=-2), rtol=1e-6)
    np.testing.assert_allclose(scalars["first"], [X[0, 0], mixed[0, 0]], rtol=1e-6)
    assert not scalars["has_weights"].any()


def test_of_modules_of_one_class_those_that_are_selected_are_measured():
    model = nnx.Sequential(Shift(), Shift())
    model.layers[1].is_last = True
    _, scalars = jax_watch.nnx_monitored(
        model,
        X[0],
        select=lambda module: hasattr(module, "is_last"),
        measure=lambda x, weights: {"first": x[0, 0]},
    )
    np.testing.assert_allclose(scalars["first"], [X[0, -1, 0]], rtol=1e-6)


class Meeting(nnx.Module):
    """Waits inside of its call until another thread calls one, too, or for a moment."""

    def __call__(self, x):
        with contextlib.suppress(threading.BrokenBarrierError):
            MEETING.wait(0.5)
        return x


MEETING = threading.Barrier(2)


def test_threads_do_not_change_what_others_measure():
    """Methods of a class are wrapped while a model is traced, and are its own again after it."""

    def count_layers(count):
        model = nnx.Sequential(*(Meeting() for _ in range(count)))
        measure = {"measure": lambda x, weights: {"one": 1.0}}
        _, scalars = jax_watch.nnx_monitored(
            model, X[0], select=lambda module: isinstance(module, Meeting), **measure
        )
        return len(scalars["one"])

    before = Meeting.__call__
    with futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(count_layers, [1, 2])) == [1, 2]
    assert Meeting.__call__ is before


def test_tokens_are_at_least_two_rows_of_floats():
    for a in (np.ones((2, 3)), "text", None, 1.0, jnp.ones((2, 3), int), jnp.ones(3)):
        assert not jax_watch._are_tokens(a)
    assert not jax_watch._are_tokens(jnp.ones((4, 1, 3)))
    assert jax_watch._are_tokens(jnp.ones((2, 3))) and jax_watch._are_tokens(jnp.ones((1, 2, 1)))
    assert jax_watch._are_tokens(jnp.ones((2, 3), jnp.bfloat16))


def test_attention_is_known_by_the_name_of_its_class():
    for name, is_attention in (
        ("SelfAttn", True),
        ("MultiHeadAttention", True),
        ("Tension", False),
    ):
        assert jax_watch.is_attention(type(name, (), {})()) == is_attention
