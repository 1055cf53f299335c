"""Several residual streams: their authors' start, a closed form, gradients, and every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import streams
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.passes import OutputPass, run_pass
from tests.oracles import draws, stream_network
from tests.support.closeness import assert_close
from tests.support.marks import full_but
from tests.support.refusals import is_refused, parametrize_refusals

L, H, N, D, S = 3, 2, 5, 8, 4
NAMES = {"hyper": "hyper_connections", "manifold": "mhc", "attention": "attention_residuals"}


def network(kind, **fields):
    """(config, parameters away from their start, tokens) in float64."""
    base = rc.transformer(L, H, D, mask="causal", mlp="tanh", d_ff=7, norm_eps=1e-5)
    config = rc.design(base, NAMES[kind]).replace(**fields)
    return config, draws.parameters(config, gain_scale=0.3), draws.tokens(N, D)


initialise = jax.jit(rc.init)


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("by_token", full_but([True, False], True))
@pytest.mark.parametrize("kind", NAMES)
def test_it_is_what_the_paper_says_token_by_token(kind, by_token):
    config, params, x = network(kind, connection_by_token=by_token)
    expected = stream_network.output(params, x, config)
    output = rc.apply(params, x, config).output
    assert np.max(np.abs(output - expected)) < 1e-12 * np.max(np.abs(expected))
    assert_close(run_pass(OutputPass(), *prepare_inputs(params, x, config), config), output)


@pytest.mark.parametrize("kind", full_but(NAMES, "hyper", "attention"))
def test_paths_of_each_length_have_as_many_factors(kind):
    """Σ_k t^k C_k + offset(t) is the frozen network with its attention times t, edited or not."""
    config, params, x = network(kind)
    no_bias = np.zeros_like(params.layers.attention.b_o)  # which `head_gain` does not multiply
    params = draws.changed(params, attention={"b_o": no_bias})
    contributions = rc.path_contributions(params, x, config, count_mlps=True)
    assert_close(contributions.total, rc.apply(params, x, config).output, rtol=1e-9)
    halved = rc.path_contributions(params, x, config, head_gain=np.full((L, config.num_heads), 0.5))
    expected = stream_network.output(params, x, config, 0.5)
    assert_close(halved.total, expected, rtol=1e-9, atol=1e-9)
    factors = 0.5 ** np.arange(L + 1)[:, None, None]
    by_length = factors * contributions.by_attention_length
    assert_close(halved.by_attention_length, by_length, rtol=1e-9, atol=1e-9)
    edit = dict.fromkeys(("attention_input", "mlp_input"), lambda h, layer: h + jnp.roll(h, 1, 0))
    edited = rc.path_contributions(params, x, config, edit=edit)
    expected = rc.apply(params, x, config, edit=edit).output
    assert_close(edited.total, expected, rtol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("kind", NAMES)
def test_gradients_are_slopes(kind):
    """By tokens and all parameters, along one direction."""
    config, params, x = network(kind)

    @jax.jit
    def loss(params, x):
        return jnp.log(jnp.sum(jnp.square(rc.apply(params, x, config).output[2:] + x[2:])))

    point, step = (params, x), 1e-5
    direction = jax.tree.map(
        lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), point
    )
    slopes = jax.jit(jax.grad(loss, argnums=(0, 1)))(*point)
    by_connection = jax.tree.leaves(
        [getattr(slopes[0].layers, f"{k}_connection") for k in ("attention", "mlp")]
    )
    assert all(np.any(a != 0) for a in by_connection)
    slope = sum(
        jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (slopes, direction)), strict=True)
    )
    high, low = (
        loss(*jax.tree.map(lambda a, b, s=s: a + s * b, point, direction)) for s in (step, -step)
    )
    assert abs(slope - (high - low) / (2 * step)) < 1e-7 * max(1, abs(slope))


def test_hyper_connections_start_as_the_network_of_one_stream():
    config, _, x = network("hyper")
    plain_config = config.replace(connection="skip")
    params, plain_params = (initialise(jax.random.key(0), c) for c in (config, plain_config))
    trace, expected = rc.apply(params, x, config), rc.apply(plain_params, x, plain_config)
    assert_close(trace.hidden, expected.hidden, rtol=1e-12)
    assert_close(trace.layers.after_attention, expected.layers.after_attention)
    assert_close(trace.output, expected.output, rtol=1e-12)
    connection = params.layers.mlp_connection
    np.testing.assert_array_equal(
        connection.read.argmax(axis=-1), [1, 3, 5 % S]
    )  # sublayers 1, 3, 5
    np.testing.assert_array_equal(connection.gates, np.full((L, 2), 0.01))
    assert not np.any(connection.w_carry) and np.all(connection.write == 1)


def test_attention_residuals_start_as_the_mean_of_what_is_there():
    config, _, x = network("attention")
    params = initialise(jax.random.key(0), config)
    trace = rc.apply(params, x, config, keep=("attention_input",))
    branches = np.stack([trace.attention_branch, trace.mlp_branch], axis=1).reshape(-1, N, D)
    parts = np.concatenate([x[None], branches])
    for l in range(L):
        mean = parts[: 1 + 2 * l].mean(axis=0)
        read = stream_network.layer_norm(mean[1], config.norm_eps)
        assert_close(trace.kept["attention_input"][l, 1], read, rtol=1e-10)
        assert_close(trace.hidden[l], mean, rtol=1e-10)


@pytest.mark.parametrize("size", [2, 4])
def test_products_of_the_start_of_mhc_fall_to_the_mean_as_the_closed_form_says(size):
    """The diagonal of R = Sinkhorn(exp I) is e/(e + s − 1). Without branches, the distances of
    streams from their mean shrink by (e − 1)/(e + s − 1) per sublayer."""
    rate, mean = (np.e - 1) / (np.e + size - 1), np.full((size, size), 1 / size)
    r = np.asarray(jax.jit(streams.sinkhorn)(np.eye(size)))
    assert_close(np.diag(r), np.e / (np.e + size - 1), rtol=1e-14)
    for k in (1, 6, 40):
        expected = mean + rate**k * (np.eye(size) - mean)
        assert_close(np.linalg.matrix_power(r, k), expected, atol=1e-14)
    config, _, x = network("manifold", num_streams=size)
    layers = jax.device_get(initialise(jax.random.key(0), config).layers)
    connection = jax.tree.map(lambda a: a[0], layers.mlp_connection)

    @jax.jit
    def join(state):
        coefficients = streams.compute_connection(connection, state, config, 0)
        return streams.join_streams(coefficients, state, x)[0]

    state = np.asarray(draws.normal(size, N, D))
    after = np.asarray(join(state))
    distances = [np.linalg.norm(a - a.mean(axis=0, keepdims=True)) for a in (state, after)]
    assert_close(distances[1] / distances[0], rate, rtol=1e-12)


def test_streams_are_kept_apart():
    config, params, x = network("manifold", num_streams=3)
    trace = rc.apply(params, x, config, keep=("residual",))
    states = trace.kept["residual"]
    assert states.shape == (L, 3, N, D)
    assert_close(states.mean(axis=1), trace.hidden[1:], rtol=1e-10)
    assert np.all(np.ptp(states, axis=1).max(axis=(1, 2)) > 1e-3)
    start = initialise(jax.random.key(0), config)  # streams that start alike stay so
    states = rc.apply(start, x, config, keep=("residual",)).kept["residual"]
    assert np.max(np.ptp(states, axis=1)) < 1e-12
    edited = rc.apply(
        params, x, config, edit={"residual": lambda a, l: jnp.where(l == 0, a[::-1], a)}
    )
    assert np.max(np.abs(edited.output - trace.output)) > 1e-3


TWICE = {"residual": lambda a, l: 2 * a}


@parametrize_refusals(
    [
        (
            lambda c, p, x: c.replace(norm_placement="post"),
            "connection='hyper' does not support norm_placement='post'",
        ),
        (
            lambda c, p, x: c.replace(parallel=True),
            "parallel=True does not support connection='hyper'",
        ),
        (lambda c, p, x: c.replace(connection="hypr"), "connection='hypr' is not one of"),
        (lambda c, p, x: c.replace(num_streams=0), "num_streams=0 is not a whole number from 1 on"),
        (
            lambda c, p, x: rc.apply(p, x, c.replace(connection="manifold")),
            r"_connection\.w_read is of shape",
        ),
        (lambda c, p, x: rc.apply(p, x, c.replace(connection="skip")), "is not in the config"),
        (
            lambda c, p, x: rc.log_residual_profile(p, x, c),
            "does not cover connection='hyper'",
        ),
        (
            lambda c, p, x: rc.path_contributions(p, x, c, edit=TWICE),
            "length does not cover an edit of 'residual'",
        ),
    ]
)
def test_what_is_refused(arguments, message):
    (call,) = arguments
    is_refused(message, lambda: call(*network("hyper")))
