"""Kernels of tokens and of MLPs: written out, against quadrature and a wide network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import layers
from rank_collapse.network.residual import ResidualSpec, lone_norm
from rank_collapse.theory import token_kernel
from rank_collapse.theory.token_kernel import TokenKernel
from tests.oracles import draws
from tests.oracles.draws import parameters, tokens
from tests.support.closeness import assert_close
from tests.support.marks import full_but

NONE = dict.fromkeys(("w_q", "w_k", "w_v", "w_o", "w_in", "w_gate", "w_out"), 0.0)


def make_tokens():
    x = np.array(tokens(5, 8, shift=0.0))
    x[1] = x[0] + 0.1 * x[2]
    return x + np.float32(0.7)


def test_the_kernel_of_tokens_and_back():
    x = make_tokens()

    @jax.jit
    def measure(x):
        state = token_kernel.measure_kernel(x)
        back = token_kernel.from_covariance(state.covariance, state.change)
        moved = state.replace(change=state.distance + 1)
        moved = token_kernel.normalise_kernel(lone_norm(None, "rms", 0.3), moved)
        norm = layers.NormParams(jnp.array([1.0, 3] * 4), jnp.array([1.0, -1] * 4))
        shifted = token_kernel.normalise_kernel(lone_norm(norm, "layer", 0.3), state)
        normed_kernels = moved.covariance, shifted.covariance, moved.change
        return state, back, state.covariance, *normed_kernels

    state, back, covariance, normed_kernel, shifted_kernel, change = measure(x)
    np.testing.assert_allclose(shifted_kernel, 5 * normed_kernel + 1, rtol=1e-5)  # mean squares
    assert_close(covariance, x @ x.T / 8, atol=1e-5)
    assert_close(back.distance, state.distance, atol=1e-5)
    scale = 1 / np.sqrt(np.mean(x**2, axis=1) + 0.3)
    assert_close(normed_kernel, (x @ x.T / 8) * np.outer(scale, scale), atol=1e-5)
    assert_close(change, (state.distance + 1) * np.outer(scale, scale), atol=1e-5)
    near = np.float32(100 + 1e-3 * x)  # whose distances are 1e-10 of their squares
    apart = np.float64(near)[:, None] - np.float64(near)[None]
    distance = measure(near)[0].distance
    assert_close(distance, np.mean(apart**2, axis=-1) / 2, rtol=1e-3, atol=1e-10)
    assert not np.diag(distance).any()


def test_kernels_of_independent_features_multiply():
    """Second moments of products are products of second moments, at unequal lengths too."""
    first, second = (np.array(draws.normal(3, 4, seed=seed)) for seed in (1, 2))
    second *= np.float32([[1], [2], [3]])

    @jax.jit
    def multiply(*both):
        kernels = (token_kernel.measure_kernel(x) for x in both)
        return token_kernel._multiply_kernels(*kernels).covariance

    covariance = (first @ first.T / 4) * (second @ second.T / 4)
    np.testing.assert_allclose(multiply(first, second), covariance, rtol=1e-4, atol=1e-5)


def test_a_sum_has_the_mean_squares_of_its_gains():
    state, part = (
        token_kernel.measure_kernel(draws.tokens(3, 4, seed=seed)).replace(
            change=jnp.asarray(draws.normal(3, 3, seed=seed))
        )
        for seed in (1, 2)
    )
    skip, branch = np.float32([1, -2, 0.5, 3]), np.float32(-0.7)
    spec = ResidualSpec(None, None, skip, branch, "mlp", True, "none", "rms", 0.0)
    joined = token_kernel.add_kernels(spec, state, part)
    for name in ("variance", "distance", "change"):
        parts = [np.asarray(getattr(kernel, name)) for kernel in (part, state)]
        expected = 0.49 * parts[0] + np.mean(skip**2) * parts[1]
        np.testing.assert_allclose(getattr(joined, name), expected, rtol=1e-5)
    alone = token_kernel.add_kernels(spec.replace(skip=False), state, part)
    np.testing.assert_allclose(alone.variance, 0.49 * part.variance, rtol=1e-5)


@pytest.mark.parametrize("kind", ["relu", "reglu"])
def test_an_mlp_and_its_updates_written_out(kind, x64):
    """E φ(z_i)φ(z_j) of ReLU in closed form, biases and sizes of every matrix."""
    config = rc.TransformerConfig(1, 1, 8, mlp=kind, d_ff=5)
    params = jax.tree.map(lambda a: np.asarray(a[0]), parameters(config).layers.mlp)
    x, moved = np.asarray(tokens(3, 8)), 0.1 * np.asarray(draws.normal(3, 8, seed=3))
    state = token_kernel.measure_kernel(jnp.asarray(x))
    state = state.replace(change=jnp.asarray(moved @ moved.T / 8))
    sizes = {"w_in": 0.02, "w_gate": 0.05, "w_out": 0.03}
    kernel = jax.jit(token_kernel.mlp_kernel, static_argnums=2)(params, state, kind, sizes)

    def unit(name):
        gain = 8 * np.mean(getattr(params, f"w_{name}") ** 2)
        change_kernel = moved @ moved.T / 8 + sizes[f"w_{name}"] * x @ x.T / 8
        return gain * x @ x.T / 8 + np.mean(getattr(params, f"b_{name}") ** 2), gain * change_kernel

    z, z_change = unit("gate" if kind == "reglu" else "in")
    length = np.sqrt(np.diag(z))
    theta = np.arccos(np.clip(z / np.outer(length, length), -1, 1))
    hidden = np.sin(theta) + (np.pi - theta) * np.cos(theta)
    hidden = np.outer(length, length) * hidden / (2 * np.pi)
    change = (np.pi - theta) / (2 * np.pi) * z_change
    if kind == "reglu":
        other, other_change = unit("in")
        hidden, change = hidden * other, change * other + hidden * other_change
    gain = 5 * np.mean(params.w_out**2)
    expected = gain * hidden + np.mean(params.b_out**2)
    np.testing.assert_allclose(kernel.covariance, expected, rtol=1e-6)
    np.testing.assert_allclose(kernel.change, gain * (change + 0.03 * hidden), rtol=1e-6)


activation_kernel = jax.jit(token_kernel.activation_kernel, static_argnums=0)


def integrate_over_plane(kind, cov):
    """½E(φ(z_1) − φ(z_2))² and E φ'(z_1)φ'(z_2) over the plane, by 200 × 200 nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    weights = weights / weights.sum()
    root = np.linalg.cholesky(cov)
    a, b = np.meshgrid(nodes, nodes, indexing="ij")
    z = root @ np.stack([a.ravel(), b.ravel()])
    w = np.outer(weights, weights).ravel()
    phi = layers.ACTIVATIONS[kind].fn
    value, slope = jax.jit(lambda z: jax.jvp(phi, (z,), (jnp.ones_like(z),)))(z)
    return w @ (0.5 * (value[0] - value[1]) ** 2), w @ (slope[0] * slope[1])


@pytest.mark.parametrize(("kind", "error"), [("gelu", 1e-7), ("tanh", 1e-5), ("relu", 2e-3)])
def test_activations_against_quadrature_over_the_plane(kind, error, x64):
    """Errors: of ReLU in the quadrature, at its kink; of tanh in the expansion of the kernel."""
    cov = np.array([[1.3, -0.5], [-0.5, 0.8]])
    z = jax.jit(token_kernel.from_covariance)(cov, np.zeros((2, 2)))
    kernel, slope = activation_kernel(kind, z)
    distance, expected_slope = integrate_over_plane(kind, cov)
    assert_close(kernel.distance[0, 1], distance, atol=error)
    assert_close(slope[0, 1], expected_slope, atol=3 * error)


@pytest.mark.parametrize("kind", full_but(["relu", "gelu", "silu"], "gelu"))
def test_distances_of_nearly_equal_tokens_keep_their_digits(kind):
    """½E(φ(z_1) − φ(z_2))² → E φ'² · distance, in float32 at distances of 1e-25."""
    z = jax.device_put(TokenKernel(np.ones(2), 1e-25 * (1 - np.eye(2)), np.zeros((2, 2))))
    kernel, slope = activation_kernel(kind, z)
    np.testing.assert_allclose(kernel.distance[0, 1] / 1e-25, slope[0, 1], rtol=2e-4)
    none, slope = activation_kernel(kind, z.scaled(np.float32(0)))  # of tokens of zeros
    assert np.isfinite(slope).all() and not np.any(none.variance) and not np.any(none.distance)


@pytest.mark.parametrize("theta", [0.02, 0.2, 0.29, 0.31, 2.5])
def test_relu_by_its_closed_form(theta):
    """E φ(z_1)φ(z_2) = (sin θ + (π − θ) cos θ)/2π at ρ = cos θ (Cho and Saul 2009), in float64."""
    far = 1 - np.cos(theta)
    z = jax.device_put(TokenKernel(np.ones(2), far * (1 - np.eye(2)), np.zeros((2, 2))))
    kernel, _ = activation_kernel("relu", z)
    closed = 0.5 - (np.sin(theta) + (np.pi - theta) * np.cos(theta)) / (2 * np.pi)
    np.testing.assert_allclose(kernel.distance[0, 1], closed, rtol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gelu", "geglu"])
def test_an_mlp_against_a_wide_one(kind):
    """f = 2000 hidden units and d = 200: the kernel of the output within 5 errors of 1/√d."""
    config = rc.TransformerConfig(1, 1, 200, d_ff=2000, mlp=kind)
    rows = jnp.array([[1.0, 0.0], [0.8, 0.6], [-1.5, 0.5]])
    x = rows @ draws.normal(2, 200)
    params = jax.tree.map(lambda a: a[0], draws.parameters(config, bias_scale=0.0).layers.mlp)
    state = token_kernel.measure_kernel(x)
    outputs = layers.apply_mlp(params, x, kind)
    expected = token_kernel.mlp_kernel(params, state, kind, NONE)
    size = jnp.sqrt(jnp.outer(expected.variance, expected.variance))
    error = np.abs(expected.covariance - outputs @ outputs.T / 200) / size
    assert np.max(error) < 5 / np.sqrt(200)
