"""Mixing by prescribed matrices."""

import jax
import numpy as np
import pytest

from experiments.theorems import mixing
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_mixing_is_by_the_matrices_that_are_prescribed():
    key = jax.random.key(3)
    first, second, third = np.asarray(mixing.draw_markov(key, 3, 6))[:, 0]
    products = [first, second @ first, third @ second @ first]
    sizes = [np.linalg.svd(p, compute_uv=False) for p in products]
    expected = [np.sum(s**4) / s[0] ** 4 - 1 for s in sizes]
    assert_close(mixing.pass_markov(key, 6), expected, rtol=1e-9)


def test_residuals_of_tied_weights_are_those_of_numpy():
    """The same draws: x + A x W, 400 times."""
    n, d, seed = 5, 3, 4
    curves = {curve.name: curve for curve in mixing.tied_curves(seed, n=n, d=d)}
    for name, sign in (("W ⪰ 0", 1), ("W ⪯ 0", -1)):
        expected = []
        for draw in range(4):
            keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), draw), 3)
            a, root = (
                np.exp(jax.random.normal(keys[0], (n, n))),
                np.asarray(jax.random.normal(keys[1], (d, d))),
            )
            a, w = a / a.sum(axis=1, keepdims=True), root @ root.T
            w, x = (
                sign * w / np.linalg.norm(w, ord=2),
                np.asarray(jax.random.normal(keys[2], (n, d))),
            )
            for _ in range(400):
                x = x + a @ x @ w
                x /= np.linalg.norm(x)
            expected.append(np.linalg.norm(x - x.mean(axis=0)))
        assert_close(curves[f"{name}: residual ratio"].measured, expected, rtol=1e-6, atol=1e-9)


def test_ranges_under_masks_are_those_of_numpy():
    """The same draws: factors of the range over r layers, and what the bound allows."""
    n, d, seed = 6, 3, 4
    factors, halving = mixing.mask_curves(seed, n=n, d=d)
    allowed = {"full": np.ones((n, n)), "causal": np.tri(n)}
    allowed["causal, window 3"] = np.tri(n) * (1 - np.tri(n, k=-4))  # at most 3 tokens away
    for index, (name, (_, radius)) in enumerate(mixing.MASKS.items()):
        key_m, key_x = jax.random.split(jax.random.key(seed))
        matrices = np.asarray(jax.random.normal(key_m, (10 * radius, 1, d, d))) / np.sqrt(d)
        x, least = np.asarray(jax.random.normal(key_x, (n, d))), 1.0
        ranges = [np.ptp(x, axis=0)]
        for (matrix,) in matrices:
            weights = np.exp(x @ matrix @ x.T) * allowed[name]
            weights /= weights.sum(axis=1, keepdims=True)
            least, x = min(least, weights[allowed[name] > 0].min()), weights @ x
            ranges.append(np.ptp(x, axis=0))
        pairs = zip(ranges[radius:], ranges[:-radius], strict=True)
        worst = max((b[a > 1e-10] / a[a > 1e-10]).max(initial=0) for b, a in pairs)
        assert_close(factors.measured[index], worst, rtol=1e-6)
        assert_close(factors.predicted[index], 1 - least**radius, rtol=1e-9)
        assert_close(halving.measured[index], radius * np.log(0.5) / np.log(worst), rtol=1e-6)
