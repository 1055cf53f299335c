"""Layers that move tokens off a line."""

import tomllib

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments.theorems import one_layer
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_collinear_tokens_leave_their_line():
    """The smallest counterexample by hand: LayerNorm of (1, k, 0)."""
    assert one_layer.affine_rank(one_layer.COLLINEAR) == 1
    normed = one_layer.normalise_tokens(one_layer.COLLINEAR, "layer")
    expected = one_layer.COLLINEAR - one_layer.COLLINEAR.mean(axis=1, keepdims=True)
    expected /= expected.std(axis=1, keepdims=True)
    assert_close(normed, expected, atol=1e-9)
    assert one_layer.affine_rank(normed) == 2


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_of_tokens_are_those_of_numpy(kind):
    x = np.random.default_rng(0).normal(2, 1, (5, 4))
    shifted = x - x.mean(axis=1, keepdims=True) if kind == "layer" else x
    expected = shifted / np.sqrt((shifted**2).mean(axis=1, keepdims=True))
    assert_close(one_layer.normalise_tokens(x, kind), expected, atol=1e-9)


def test_shares_of_published_models():
    """Their sums are the mean path lengths of the published configurations."""
    published = {"bloom-7b1": (30, 3.6213576), "mpt-7b": (32, 4.2280776)}
    for name, (depth, total) in published.items():
        shares = tomllib.loads(one_layer.SHARES.read_text("utf-8"))[name]["shares"]
        assert len(shares) == depth and sum(shares) == pytest.approx(total, abs=1e-4)
        row = one_layer.published_row(name, 20)
        assert row.shape == (20,) and row.sum() == pytest.approx(1) and (row > 0).all()


def test_alibi_is_by_distance_alone():
    """One layer of two heads of slopes 1/16 and 1/256, by hand."""
    rows = []
    for slope in (2.0**-4, 2.0**-8):
        weights = np.exp(-slope * np.arange(4)[::-1])
        rows.append(weights / weights.sum())
    expected = 0.7 * np.eye(4)[-1] + 0.3 * np.mean(rows, axis=0)
    measured = one_layer.rollout_row([0.3], 2, 4)
    assert_close(measured, expected, rtol=1e-12)


def test_the_last_row_of_a_random_network_is_that_of_numpy():
    """The same draw: causal heads on normed states, and shares of norms."""
    key, n, d, depth, heads = jax.random.key(2), 6, 8, 3, 4
    measured = one_layer.last_row(key, n=n, d=d, depth=depth)
    config = rc.san_skip(depth, heads, d, norm_placement="pre", norm="rms", mask="causal")
    key_p, key_x = jax.random.split(key)
    attention = rc.init(key_p, config).layers.attention
    x, rows = np.asarray(jax.random.normal(key_x, (n, d))), np.eye(n)
    for layer in range(depth):
        normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + config.norm_eps)
        branch, mean = np.zeros_like(x), np.zeros((n, n))
        for h in range(heads):
            q, k, v, o = (np.asarray(getattr(attention, f"w_{w}"))[layer, h] for w in "qkvo")
            weights = np.exp(normed @ q @ (normed @ k).T / np.sqrt(k.shape[1])) * np.tri(n)
            weights /= weights.sum(axis=1, keepdims=True)
            branch, mean = branch + weights @ normed @ v @ o, mean + weights / heads
        sizes = np.linalg.norm(branch, axis=1), np.linalg.norm(x, axis=1)
        share = np.mean(sizes[0] / (sizes[0] + sizes[1]))
        rows, x = ((1 - share) * np.eye(n) + share * mean) @ rows, x + branch
    assert_close(measured, rows[-1], rtol=1e-5)


def test_rows_of_published_models_have_two_ends():
    for name in ("bloom-7b1", "mpt-7b"):
        assert (one_layer.ends_over_middle(one_layer.published_row(name, 256)) > 1).all()


def test_norms_of_jacobians_are_those_of_differences(monkeypatch):
    monkeypatch.setattr(one_layer, "NUMBERS", (2, 3))
    (curve,) = one_layer.lipschitz_curves(4, draws=3)
    d, radius, largest = 2, 2.0, []
    for n in (2, 3):
        norms = []
        for key in jax.random.split(jax.random.key(4), 3):
            key_a, key_x = jax.random.split(key)
            a = np.asarray(jax.random.normal(key_a, (d, d)))
            a = a / np.linalg.norm(a, ord=2)
            x = np.asarray(jax.random.normal(key_x, (n, d)))
            x = radius * x / np.linalg.norm(x, axis=1, keepdims=True)

            def attend(flat, n=n, a=a):
                x = flat.reshape(n, d)
                weights = np.exp(x @ a @ x.T)
                return (weights @ x / weights.sum(axis=1, keepdims=True)).ravel()

            shifts = 1e-6 * np.eye(n * d)
            columns = [(attend(x.ravel() + s) - attend(x.ravel() - s)) / 2e-6 for s in shifts]
            norms.append(np.linalg.norm(np.transpose(columns), ord=2))
        largest.append(max(norms))
    assert_close(curve.measured, largest, rtol=1e-6)
    bounds = [np.sqrt(3) * np.sqrt(radius**4 * (4 * n + 1) + n) for n in (2, 3)]
    assert_close(curve.predicted, bounds)
    assert (curve.name, curve.relation, curve.x) == ("largest of 3 draws", "≤", (2, 3))


def test_entropy_and_cosine_by_the_spread_of_scores_are_those_of_numpy(monkeypatch):
    monkeypatch.setattr(one_layer, "SPREADS", (0.0, 2.0))
    seed, n, d, depth = 5, 4, 3, 2
    entropy, cosine = one_layer.spread_curves(seed, n=n, d=d, depth=depth)
    keys = jax.random.split(jax.random.key(seed), 4)
    start = np.asarray(jax.random.normal(keys[0], (n, d)))
    basis, _ = np.linalg.qr(np.asarray(jax.random.normal(keys[1], (d, d))))
    deviations = np.asarray(jax.random.normal(keys[2], (d,)))
    deviations = (deviations - deviations.mean()) / deviations.std()
    value = np.asarray(jax.random.normal(keys[3], (d, d))) / np.sqrt(d)
    for place, spread in enumerate((0.0, 2.0)):
        scores = basis @ np.diag(1 + spread * deviations) @ basis.T
        assert np.trace(scores) == pytest.approx(d)
        x = start
        for layer in range(depth):
            weights = np.exp(x @ scores @ x.T / np.sqrt(d))
            weights = weights / weights.sum(axis=1, keepdims=True)
            if layer == 0:
                first = -np.sum(weights * np.log(weights), axis=1).mean()
            x = x + weights @ x @ value
            x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        expected = np.mean([unit[i] @ unit[j] for i in range(n) for j in range(i)])
        assert_close(entropy.measured[place], first, rtol=1e-4)
        assert_close(cosine.measured[place], expected, rtol=1e-3)
    assert entropy.x == cosine.x == (0.0, 2.0) and (entropy.panel, cosine.panel) == (0, 1)
    assert (entropy.name, cosine.name) == ("first layer", "after 6 layers")
    assert entropy.relation == cosine.relation == "none"


@pytest.mark.full
def test_ranks_are_counted_after_the_mean_and_the_norm():
    """By singular values in NumPy: the affine rank grows, the matrix rank under RMSNorm stays."""
    small, layer, rms, spans = one_layer.affine_rank_curves(3, n=6, d=7)
    ranks = {"before": [], "after": [], "matrix": [], "normed": []}

    def count(a):
        return int((np.linalg.svd(a, compute_uv=False) > 1e-9).sum())

    for rank in (1, 2, 3):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(3), rank), 3)
        shapes = [(6, rank), (rank, 7), (1, 7)]
        a, b, mean = map(np.asarray, map(jax.random.normal, keys, shapes))
        x = mean + a @ b
        centred = x - x.mean(axis=1, keepdims=True)
        normed = centred / centred.std(axis=1, keepdims=True)
        ranks["before"].append(count(x - x.mean(axis=0)))
        ranks["after"].append(count(normed - normed.mean(axis=0)))
        ranks["matrix"].append(count(x))
        ranks["normed"].append(count(x / np.sqrt((x**2).mean(axis=1, keepdims=True))))
    assert (layer.predicted, layer.measured) == (ranks["before"], ranks["after"])
    assert (rms.predicted, rms.measured) == (ranks["matrix"], ranks["normed"])
    assert (ranks["before"], ranks["after"]) == ([1, 2, 3], [2, 3, 4])
    assert (small.predicted, small.measured) == (1, [2]) and rms.instead and not layer.instead
    assert spans.x == spans.predicted == (2, 4, 6, 8) and spans.measured[:2] == [4, 7]
    assert (spans.relation, spans.panel, rms.panel, layer.panel) == ("≤", 2, 1, 0)


def test_ends_are_beside_the_middle_half():
    row = np.array([3.0, 9.0, 2.0, 1.0, 4.0, 2.5, 8.0, 6.0])
    assert_close(one_layer.ends_over_middle(row), [3 / 4, 6 / 4])


@pytest.mark.full
def test_curves_of_the_position_are_of_the_last_row():
    random, ends, bloom, mpt = one_layer.position_curves(2, n=8)
    row = np.asarray(one_layer.last_row(jax.random.key(2), n=8))
    assert_close(random.measured, row)
    assert [*random.x] == list(range(8)) and random.relation == "none"
    assert_close(ends.measured, [row[0], row[7]])
    assert (ends.x, ends.relation, ends.ordering) == ([0, 7], "≥", True)
    assert_close(ends.predicted, max(row[2:6]))
    for curve, name in ((bloom, "bloom-7b1"), (mpt, "mpt-7b")):
        assert curve.name == name and curve.panel == 1 and len(curve.x) == 256
        assert_close(curve.measured, one_layer.published_row(name, 256))
