"""Mixing by prescribed matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
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
    excesses = [mixing.pass_markov(key, 6, layer=jnp.array(layer)) for layer in (1, 2, 3)]
    assert_close(excesses, expected, rtol=1e-9)


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
    assert mixing.MASKS["causal, window 3"] == ({"mask": "causal", "window": 3}, 5)
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


def test_curves_of_the_width_are_beside_their_law(monkeypatch):
    """The excess by layer and width; centred weights have half of the first as their bound."""

    def fake_pass(key, n, weights):
        assert (weights.identity, weights.weights) == (0, 1)
        drawn = jax.random.uniform(key)
        return np.array([1.0, 2.0, 3.0]) * n + drawn - weights.uniform * 1000

    monkeypatch.setattr(mixing, "pass_markov", fake_pass)
    curves = mixing.width_curves(5)
    key = jax.random.key(5)
    drawn = [float(jax.random.uniform(jax.random.fold_in(key, n))) for n in (64, 128, 256)]
    widths = np.array([64, 128, 256])
    for layer in (1, 2, 3):
        curve, centred = curves[layer - 1], curves[layer + 2]
        values = layer * widths + drawn
        assert_close(curve.measured, values)
        assert_close(curve.predicted, [(layer + 1) * float(n) ** (1 - 2 * layer) for n in widths])
        assert (curve.name, curve.relation, curve.tolerance) == (f"layer {layer}", "=", 0.3)
        assert_close(centred.measured, values + 1000)
        assert_close(centred.predicted, [np.nan, *[(values[0] + 1000) / 2] * 2])
        assert (centred.name, centred.relation) == (f"layer {layer}, A − 11ᵀ/T", "≥")
        assert (centred.panel, centred.ordering, centred.tolerance) == (1, False, 0)
        assert [*curve.x] == [*centred.x] == [*widths]


def test_centred_weights_are_those_minus_the_mean_token():
    key, n = jax.random.key(3), 5
    centred = rc.network.Mixing(identity=0.0, weights=1.0, uniform=-1.0)
    state, expected = np.eye(n), []
    for (weights,) in np.asarray(mixing.draw_markov(key, 3, n)):
        state = (weights - 1 / n) @ state
        sizes = np.linalg.svd(state, compute_uv=False)
        expected.append(np.sum(sizes**4) / sizes[0] ** 4 - 1)
    assert_close(mixing.pass_markov(key, n, centred), expected, rtol=1e-6)


def test_curves_of_tied_weights_say_when_tokens_become_equal():
    """By eigenvectors of I + A ⊗ W in full, beside what the curves compute from A and W apart."""
    n, d, seed = 4, 3, 6
    curves = mixing.tied_curves(seed, n=n, d=d)
    for place, (name, sign) in enumerate((("W ⪰ 0", 1), ("W ⪯ 0", -1))):
        by_layer, last, equal = curves[3 * place : 3 * place + 3]
        assert [c.name for c in (by_layer, last, equal)] == [
            f"{name}: residual ratio by layer",
            f"{name}: residual ratio",
            f"{name}: tokens equal",
        ]
        assert [c.panel for c in (by_layer, last, equal)] == [0, 1, 2]
        predicted = []
        for draw in range(4):
            keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), draw), 3)
            a = np.exp(np.asarray(jax.random.normal(keys[0], (n, n))))
            a = a / a.sum(axis=1, keepdims=True)
            root = np.asarray(jax.random.normal(keys[1], (d, d)))
            w = sign * root @ root.T / np.linalg.norm(root @ root.T, ord=2)
            values, vectors = np.linalg.eig(np.eye(n * d) + np.kron(a, w.T))
            dominant = vectors[:, np.abs(values).argmax()].reshape(n, d)
            predicted.append(np.abs(dominant - dominant.mean(axis=0)).max() < 1e-7)
            if draw == 0:
                x = np.asarray(jax.random.normal(keys[2], (n, d)))
                ratios = []
                for _ in range(401):
                    centred = x - x.mean(axis=0)
                    ratios.append(np.linalg.norm(centred) / np.linalg.norm(x))
                    x = x + a @ x @ w
                    x = x / np.linalg.norm(x)
                steps = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 400]
                assert by_layer.x.tolist() == steps
                expected = np.maximum(np.array(ratios)[steps], 1e-17)
                assert_close(by_layer.measured, expected, rtol=1e-6, atol=1e-9)
        assert_close(equal.predicted, predicted)
        assert_close(equal.measured, [float(value < 1e-6) for value in last.measured])
        assert equal.relation == "=" and equal.tolerance == 0
        assert last.relation == by_layer.relation == "none"
