"""The closed forms of score variances against mpmath, and against scores that are drawn."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from refusals import each_is_refused

import rank_collapse as rc
from rank_collapse.network.attention import attention_scores
from rank_collapse.theory.score_overlap import overlap_ratios, score_overlap, score_variance


def test_additive_against_sums_on_a_fine_grid():
    """The trapezoidal rule, whose error for such integrals falls exponentially."""
    z, width = np.linspace(-9, 9, 1201, retstep=True)
    weights = width * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    tanh = np.tanh(z[:, None] + z[None, :])
    total = weights @ tanh**2 @ weights
    between = weights @ (tanh @ weights) ** 2
    with mpmath.workdps(20):
        root = mpmath.sqrt(2)
        exact = 2 * mpmath.quad(lambda z: mpmath.tanh(root * z) ** 2 * mpmath.npdf(z), [0, 4, 12])
    assert total == pytest.approx(float(exact), rel=1e-12)
    found = score_variance(7, "additive")
    assert found.total == pytest.approx(total, rel=1e-6)
    assert found.within_rows == pytest.approx(total - between, rel=1e-6)
    assert score_variance(7, "additive", temperature=0.5).total == 4 * found.total


@pytest.mark.parametrize(
    "d_k, options",
    [
        (6, {"scale": False}),
        (48, {"scale": False, "temperature": 3.0}),
        (48, {}),
        (6, {"score": "additive"}),
        (48, {"score": "additive", "temperature": 0.2}),
    ],
)
def test_scores_of_many_draws_have_the_variance_of_the_law(d_k, options):
    """Queries and keys as they are, W = I; v is drawn anew for every table of 8 × 24 scores."""
    keys = jax.random.split(jax.random.key(d_k), 3)
    draws = 600
    q = jax.random.normal(keys[0], (draws, 8, d_k))
    k = jax.random.normal(keys[1], (draws, 24, d_k))
    v = jax.random.normal(keys[2], (draws, 1, d_k)) / jnp.sqrt(d_k)
    same = jnp.eye(d_k)[None]

    def scores(q, k, v):
        params = rc.AttentionParams(w_q=same, w_k=same, w_v=same, w_o=same, v_score=v)
        return attention_scores(params, q, k, **options)[0]

    found = np.asarray(jax.jit(jax.vmap(scores))(q, k, v), float)
    total = (found**2).mean(axis=(1, 2))  # of mean 0
    within = found.var(axis=2, ddof=1).mean(axis=1)
    for values, wanted in zip((total, within), score_variance(d_k, **options), strict=True):
        error = values.std() / np.sqrt(draws)
        assert error < 0.06 * wanted
        assert abs(values.mean() - wanted) < 4 * error


@pytest.mark.parametrize(
    ("n", "variance", "c"),
    [
        (2, 8.0, 0.5),
        (3, 1.0, 0.0),
        (17, 4.0, 0.99),
        (64, 16.0, 0.99),
        (8, 9.0, -0.5),
        (5, 100.0, 0.2),
        (64, 60.0, 0.5),
    ],
)
def test_overlaps_of_rows_of_weights(n, variance, c):
    """The integrals by other rules, and rows that are drawn."""
    rng, draws = np.random.default_rng(n), 100_000
    z = rng.standard_normal((2, draws, n))
    scores = np.sqrt(variance) * np.stack([z[0], c * z[0] + np.sqrt(1 - c * c) * z[1]])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p, q = weights / weights.sum(axis=-1, keepdims=True)
    own, pair = score_overlap(n, variance, c)
    unit = variance * (1 - 1 / n) / n
    of_row, of_distance = (float(r) for r in overlap_ratios(n, variance, c))
    for found, values, more in (
        (own, (p * p).sum(axis=1), 0),
        (pair, (p * q).sum(axis=1), 0),
        (1 / n + unit * of_row, (p * p).sum(axis=1), 0.02 * (variance > 16)),
        ((1 - c) * unit * of_distance, ((p - q) ** 2).sum(axis=1) / 2, 0.02 * (variance > 16)),
    ):
        error = values.std() / np.sqrt(draws) + more * values.mean()
        assert abs(float(found) - values.mean()) < 4 * error
    if variance > 16 or c < 0:
        return
    # both scores of a key as what they share and what they do not, by the trapezoidal rule, as are
    # ln t and ln t'
    grid = np.linspace(-8.5, 8.5, 121)
    density = np.exp(-(grid**2) / 2) / np.exp(-(grid**2) / 2).sum()
    x, step = np.linspace(-30, 22, 151, retstep=True)
    shared, own_part = (np.sqrt(variance * a) * grid for a in (c, 1 - c))
    once, none = np.empty((2, len(x), len(grid)))
    for i, s in enumerate(shared):
        tw = np.exp(np.minimum(x[:, None] + s + own_part[None, :], 700))
        once[:, i], none[:, i] = (tw * np.exp(-tw)) @ density, np.exp(-tw) @ density
    both = (none * density) @ none.T
    exact = n * step**2 * np.sum((once * density) @ once.T * both ** (n - 1))
    assert float(pair) == pytest.approx(exact, rel=2e-5)


def test_overlaps_of_uniform_and_of_sharp_weights_and_of_one_key():
    np.testing.assert_allclose(score_overlap(9, 0.0, 0.5), 1 / 9, rtol=1e-5)
    np.testing.assert_allclose(score_overlap(1, 2.0, 0.5), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(overlap_ratios(1, 2.0, 0.5), 1.0)
    np.testing.assert_allclose(*score_overlap(9, 1.0, 1.0), rtol=1e-5)
    for variance in (0.0, 1e-12, 1e-3):
        np.testing.assert_allclose(overlap_ratios(9, variance, 0.5), 1.0, rtol=2e-3)
    # at equal rows the derivative by c of a quadrature of its own nodes
    own, near = (np.float64(a) for a in score_overlap(17, 4.0, 0.99))
    slope = (own - near) / 0.01 / (4 * (1 - 1 / 17) / 17)
    np.testing.assert_allclose(overlap_ratios(17, 4.0, 0.99)[1], slope, rtol=1e-3)


def test_what_is_refused():
    each_is_refused(
        (lambda: score_variance(0), "d_k=0"),
        (lambda: score_variance(4, "cosine"), "score='cosine'"),
    )
