"""Closed laws of phases and masks against Monte Carlo and exact cases."""

import functools

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import variant_heads
from rank_collapse.network.attention import AttentionContext
from rank_collapse.theory.expectation import expected_pass


@functools.cache
def rng(seed):
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def from_the_start():
    """The same draws whichever tests run before."""
    rng.cache_clear()


def agree(found, expected, more=0.0):
    """Means of draws within 5 standard errors, and what the law leaves out."""
    found = np.asarray(found, np.float64)
    error = found.std(axis=0, ddof=1) / np.sqrt(len(found))
    assert np.all(np.abs(found.mean(axis=0) - expected) < 5 * error + more), (found, expected)


def roots(n, cosine):
    """n unit vectors at one angle."""
    return np.linalg.cholesky((1 - cosine) * np.eye(n) + cosine)


def tokens(seed, draws, n, d, rho):
    """[draws, n, d] of mean square 1 and mean product ρ per feature."""
    common = rng(seed).normal(size=(draws, 1, d))
    return np.sqrt(rho) * common + np.sqrt(1 - rho) * rng(seed).normal(size=(draws, n, d))


@pytest.mark.parametrize("gamma", [0.5, 2.0, 4.0])
def test_critical_scaling_is_the_networks(gamma):
    """Tokens that are all at one angle: the cosine after it (arXiv 2510.05554, theorem 1)."""
    n, rho = 6, 0.4
    with jax.enable_x64(True):
        x = roots(n, rho) * np.sqrt(n)
        config = rc.variant(rc.san(1, 1, n), "critical", gamma=gamma)
        params = rc.network.init_variant(jax.random.key(0), config, "critical")
        out = np.asarray(rc.apply(params, jnp.asarray(x), config).output)
        cosines = (out @ out.T) / np.outer(*2 * [np.linalg.norm(out, axis=1)])
    w = 1 / (1 + (n - 1) * n ** (-gamma * (1 - rho)))  # the weight of a token itself
    u = (1 - w) / (n - 1)
    between = rho + (1 - rho) * (2 * w * u + (n - 2) * u**2)
    expected = between / (rho + (1 - rho) * (w**2 + (n - 1) * u**2))
    np.testing.assert_allclose(cosines[~np.eye(n, dtype=bool)], expected, rtol=1e-10)


def unit(x):
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))


def angle(x):
    """ln of the mean of 1 − cosine between tokens, by draw."""
    return np.log(np.mean(np.var(unit(x), axis=1), axis=1))


@pytest.mark.full
@pytest.mark.parametrize(("rho", "decay"), [(0.3, 0.5), (0.8, 0.9)])
def test_ssm_mixing_of_drawn_weights(rho, decay):
    """The heads of `variant` "ssd" with steps of one size, tokens far from the first."""
    draws, n, d, k = 400, 60, 64, 32
    x = np.pad(roots(n, rho), ((0, 0), (0, d - n)))
    b, c = (x @ rng(14).normal(size=(draws, d, k)) for _ in "bc")
    step = 0.5  # softplus of it, times the rate, is −ln of the decay
    rate = -np.log(decay) / np.log1p(np.exp(step))
    one, causal = np.full((draws, n, 1), step), AttentionContext(jnp.tril(jnp.ones((n, n), bool)))
    m = jax.vmap(lambda q, k: variant_heads.ssd(rate, 0.0, q, k, None, causal)[0])
    q, k = (jnp.asarray(np.concatenate([a, one], axis=2))[:, None] for a in (c, b))
    mixed = np.tril(np.asarray(m(q, k)[:, 0])) @ x
    products = np.einsum("snd,smd->snm", mixed, mixed)[:, -1]
    square = products[:, -1].mean()
    same, other = (rho / (1 - decay)) ** 2, (1 - rho**2) / (1 - decay**2)
    for distance in (1, 5):
        cosine = rho * (same + other * decay**distance) / (same + other)
        agree(products[:, -1 - distance] / square, cosine, 0.02)


# Closed laws of phases and of masks against `expected_pass`, where both hold.
#
# Critical scaling has the identity for weights: no expectation over weights is its own.


def equal_sizes(params, **sizes):
    """Every weight of a matrix at the root of its mean square: the kernels read nothing else."""
    parts = {name: getattr(params.layers, name) for name in ("attention", "mlp")}
    equal = {
        name: {n: jnp.full_like(getattr(own, n), v) for n, v in sizes.items() if hasattr(own, n)}
        for name, own in parts.items()
        if own is not None
    }
    return draws.changed(params, **equal)


@pytest.mark.full
def test_the_bound_of_masks_holds_of_the_expected_pass():
    """Uniform weights on what the mask allows, values of unit gain: the largest distance."""
    n, d, depth = 9, 16, 6
    i, j = np.mgrid[:n, :n]
    mask = abs(i - j) <= 2
    config = rc.san(depth, 1, d)
    params = equal_sizes(
        draws.parameters(config, bias_scale=0.0, gain_scale=0.0), w_q=0.0, w_v=d**-0.5, w_o=d**-0.5
    )
    x = jnp.asarray(np.random.default_rng(13).normal(size=(n, d)))
    found = expected_pass(params, x, config, mask=jnp.asarray(mask)).hidden
    largest = np.sqrt(np.max(np.asarray(found.distance), axis=(1, 2)))
    # One token reaches all in two steps (Wu et al. 2024, theorem 1): (1 − ε²)^⌊t/2⌋.
    bounds = (1 - 5.0**-2) ** (np.arange(depth + 1) // 2)
    assert np.all(largest / largest[0] <= bounds + 1e-6)
    assert largest[-1] < 0.5 * largest[0]
