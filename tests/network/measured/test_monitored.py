"""What is monitored inside of the layers, and that it has no gradient."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.measured.monitored import MonitorPass
from tests.oracles import draws
from tests.support.closeness import near

N, D, H = 6, 10, 3


def draw_normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def draw_weights(*leading, seed=1):
    return np.asarray(jax.nn.softmax(2 * draw_normal(*leading, H, N, N, seed=seed), axis=-1))


@pytest.mark.full
@pytest.mark.parametrize("keep", [None, np.arange(N) < 4])
def test_inside_the_layers_as_on_a_trace(keep):
    config = rc.transformer(3, 2, D, norm_placement="pre", final_norm=True, mlp="gelu")
    params, x = draws.parameters(config), draw_normal(N, D)
    trace = rc.apply(params, x, config, mask=keep)
    output, scalars = rc.monitored(params, x, config, mask=keep)
    np.testing.assert_allclose(output, trace.output, rtol=1e-6, atol=1e-6)
    by_layer = [
        rc.monitor(*layer, mask=keep)
        for layer in zip(trace.hidden[1:], trace.attention, strict=True)
    ]
    near(scalars, jax.tree.map(lambda *a: np.stack(a), *by_layer), rtol=1e-5)
    states = jax.eval_shape(lambda: rc.monitored(params, x, config, attention=False, mask=keep)[1])
    assert states.keys() == rc.monitor(x).keys()


def test_what_is_monitored_of_a_layer_has_no_gradient():
    layer = SimpleNamespace(inputs=SimpleNamespace(token_mask=None))

    def measure(x, p):
        values = SimpleNamespace(trace=SimpleNamespace(hidden=x, attention=p))
        return MonitorPass().measure_layer(layer, None, values, ())[1]

    point = jnp.asarray(draw_normal(N, D)), jnp.asarray(draw_weights())
    values, slopes = jax.jvp(measure, point, jax.tree.map(jnp.cos, point))
    assert not any(map(np.any, slopes.values())) and values["token_cosine"] != 0


@pytest.mark.full
def test_what_is_monitored_does_not_change_the_gradient():
    config = rc.transformer(2, 2, D, mlp="relu")
    params, x = draws.parameters(config), draw_normal(N, D)
    square = lambda output: jnp.sum(jnp.square(output))  # noqa: E731

    def loss(params):
        output, scalars = rc.monitored(params, x, config)
        return square(output) + sum(jnp.sum(v) for v in scalars.values()), scalars

    gradient, scalars = jax.grad(loss, has_aux=True)(params)
    plain = jax.grad(lambda p: square(rc.apply(p, x, config).output))(params)
    near(gradient, plain, rtol=1e-5, atol=1e-6)
    assert {v.shape for v in scalars.values()} == {(2,)}
