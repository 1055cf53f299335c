"""A network fed with its own output: Jacobians and laws by hand, distances in many digits."""

import functools

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import rank_collapse as rc
from experiments.circle import recurrence
from rank_collapse.network.attention_weights import AttentionContext
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.residual import layer_gains
from tests.oracles import mp_network
from tests.oracles.draws import parameters
from tests.support.closeness import assert_close
from tests.support.marks import full_but, full_if

A = np.array([[0.3, 0.5], [-0.2, 0.1]])
B = np.array([[0.1, -0.4], [0.25, 0.05]])


def step(x):
    """Each token sees itself through A and the others through B, each squared in part."""
    other_sum = jnp.sum(x, axis=0, keepdims=True) - x
    return (x + x**2) @ A.T + other_sum @ B.T


def test_the_transverse_jacobian_of_a_step_by_hand():
    point = jnp.array([0.2, -0.7])
    self_jacobian = A * (1 + 2 * np.array(point))[None, :]
    np.testing.assert_allclose(
        recurrence.transverse_jacobian(step, point), self_jacobian - B, rtol=1e-5
    )


def test_spectral_radius_is_that_of_complex_eigenvalues():
    turn = 0.5 * np.array([[np.cos(1), -np.sin(1)], [np.sin(1), np.cos(1)]])
    undefined = np.array([[np.nan, 0], [0, 1]])
    radii = recurrence.spectral_radius(np.stack([turn, np.diag([-3, 2]), undefined]))
    assert_close(radii, [0.5, 3, np.nan])


def test_equal_tokens_come_to_rest():
    point, moved = recurrence.equal_tokens(lambda x: x / 2 + 1, jnp.zeros(2), 20)
    assert_close(point, 2, atol=1e-5)
    _, moving = recurrence.equal_tokens(lambda x: x + 0.5, jnp.zeros(2), 20)
    assert float(moved) < 1e-5 and float(moving) == pytest.approx(0.5 * np.sqrt(2))
    _, turning = recurrence.equal_tokens(lambda x: x[:, ::-1], jnp.array([3.0, -1]), 7)
    assert float(turning) == pytest.approx(4 * np.sqrt(2))  # from (3, −1) to (−1, 3)


def test_steps_between_two_distances():
    t = np.arange(60)
    cubic, halved, constant = 0.6 ** (3.0 ** np.minimum(t, 5)), 0.6 * 0.5**t, np.full(60, 0.6)
    # Below 1e-2 at t = 3 and below 1e-6 at t = 4; halving at t = 6 and 20.
    steps = recurrence.measured_steps(np.stack([cubic, halved, constant]))
    np.testing.assert_array_equal(steps, [1, 14, np.nan])
    predicted = recurrence.predicted_steps([0.5, 0.1, 0.0, 1.0, 1.2, np.nan])
    assert_close(predicted, [4 / np.log10(2), 4, 0, np.inf, np.inf, np.nan])


def test_order_of_a_law():
    t = np.arange(60)
    cubic, halved = -0.3 * 3.0 ** np.minimum(t, 30), -t * np.log10(2)
    crossing = np.where(t < 6, -(1.5**t), -(1.5**5) - 0.3 * (t - 5))  # another law while far off
    cubic[31:] = -np.inf
    orders = recurrence.fall_order(np.stack([cubic, halved, crossing, 0 * halved]))
    assert_close(orders, [3, 1, 1, np.nan], rtol=1e-10)
    # twelve steps of order 2, then one of order 1; and only two steps below 1e-6
    early = -7.0 * 2.0 ** np.minimum(np.arange(40), 12) - 5e3 * np.maximum(np.arange(40) - 12, 0)
    short = np.array([-1.0, -7, -14, -28, -np.inf])
    assert_close(recurrence.fall_order(early), 2, rtol=1e-10)
    assert np.isnan(recurrence.fall_order(short))


CASES = {
    "attention": ({}, False),
    "MLP": ({"mlp": "gelu", "mlp_skip": True}, False),
    "skip and MLP": ({"mlp": "gelu", "mlp_skip": True, "attention_skip": True}, False),
    "skip around the recurrence": ({"attention_skip": True}, True),
}


def compute_distances(params, classifier, start, config, num_steps, skip, digits=800):
    """Computes log10 of the distances in arithmetic of many digits, the network written out."""
    gains, context = layer_gains(config, jnp.float32, params), AttentionContext()
    with mpmath.workdps(digits):
        layer_params, gains = mp_network.row_of(
            jax.tree.map(mp_network.exact, (params.layers, gains)), 0
        )
        embedding, (w, b), x = jax.tree.map(mp_network.exact, (params.embedding, classifier, start))
        path = [x]
        for _ in range(num_steps - 1):
            y = mp_network.unit_norm(x @ embedding.w_in + embedding.b_in, "layer", 1e-12)
            y = y * embedding.norm.gain + embedding.norm.bias
            path.append(mp_network.layer(layer_params, y, config, context, gains) @ w + b)
            x = x + path[-1] if skip else path[-1]
        return [float(mpmath.log10(mpmath.norm(a - b))) for a, b in path]


def make_config(**fields):
    """Makes a network of one post-norm layer over vectors of two numbers, with other fields."""
    embedding = EmbeddingConfig(d_input=2, d_embed=4)
    defaults = {"depth": 1, "d_ff": 4, "norm_placement": "post", "embedding": embedding}
    return rc.TransformerConfig(num_heads=2, d_model=4, **(defaults | fields))


@pytest.mark.parametrize("name", full_if(CASES, "MLP"))
def test_distances_in_logarithms_are_those_of_many_digits(name):
    fields, skip = CASES[name]
    config = make_config(**fields)
    params = parameters(config, seed=3)
    rng = np.random.default_rng(4)
    classifier = jnp.asarray(rng.normal(size=(4, 2)), jnp.float32), jnp.asarray([0.1, -0.2])
    start = np.array([[0.3, 0.1], [-0.1, 0.25]], np.float32)
    expected = compute_distances(params, classifier, start, config, 7, skip)
    roll_out = jax.jit(functools.partial(recurrence.log_roll_out, skip=skip), static_argnums=(3, 4))
    log10_distances = roll_out(params, classifier, jnp.asarray(start), config, 7)
    np.testing.assert_allclose(log10_distances, expected, rtol=1e-4, atol=1e-4)
    if not config.attention_skip:
        assert expected[-1] < -100  # far below what float32 holds


@pytest.mark.full
def test_tokens_of_less_precision_than_the_classifier(x64):
    config = make_config()
    params = parameters(config, seed=3)
    classifier = jnp.sin(jnp.arange(8.0)).reshape(4, 2), jnp.array([0.1, -0.2])
    start = jnp.array([[0.5, 0.25], [-0.125, 0.25]], jnp.float32)
    log10_distances = recurrence.log_roll_out(params, classifier, start, config, 4)
    expected = recurrence.log_roll_out(params, classifier, start.astype(float), config, 4)
    assert log10_distances.dtype == jnp.float64
    np.testing.assert_array_equal(log10_distances, expected)


@pytest.mark.full
@pytest.mark.parametrize("placement", full_but(["sandwich", "branch", "pre"], "sandwich"))
def test_distances_at_every_placement_of_norms(placement, x64):
    """Against the network fed with its own output in float64, where that still resolves them."""
    skips = {"attention_skip": True, "mlp_skip": True}
    config = make_config(depth=2, norm_placement=placement, mlp="gelu", **skips)
    params = parameters(config, seed=3)
    w, b = jnp.asarray(np.random.default_rng(4).normal(size=(4, 2))), jnp.array([0.1, -0.2])
    tokens = jnp.array([[0.3, 0.1], [-0.1, 0.25]])
    log10_distances = recurrence.log_roll_out(params, (w, b), tokens, config, 5)
    for step in range(5):
        distance = np.linalg.norm(tokens[0] - tokens[1])
        assert_close(log10_distances[step], np.log10(distance), atol=1e-6)
        tokens = rc.apply(params, tokens, config).output @ w + b[None, :]
