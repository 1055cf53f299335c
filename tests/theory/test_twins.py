"""Closed laws of phases and masks against Monte Carlo and exact cases."""

import functools

import draws
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
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


def unit(x):
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))


def angle(x):
    """ln of the mean of 1 − cosine between tokens, by draw."""
    return np.log(np.mean(np.var(unit(x), axis=1), axis=1))


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
