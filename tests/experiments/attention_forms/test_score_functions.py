"""Variances of scores: against mpmath, sums on a fine grid, and draws."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import rank_collapse as rc
from experiments.attention_forms import score_functions as measured
from experiments.attention_forms.score_functions import score_variance
from rank_collapse.network.attention import attention_scores
from tests.support.closeness import assert_close


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
    variance = score_variance(7, "additive")
    assert variance.total == pytest.approx(total, rel=1e-6)
    assert variance.within_rows == pytest.approx(total - between, rel=1e-6)
    assert score_variance(7, "additive", temperature=0.5).total == 4 * variance.total


@pytest.mark.full
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
    identity = jnp.eye(d_k)[None]

    def compute_scores(q, k, v):
        params = rc.network.AttentionParams(
            w_q=identity, w_k=identity, w_v=identity, w_o=identity, v_score=v
        )
        return attention_scores(params, q, k, **options)[0]

    scores = np.asarray(jax.jit(jax.vmap(compute_scores))(q, k, v), float)
    total = (scores**2).mean(axis=(1, 2))  # of mean 0
    within = scores.var(axis=2, ddof=1).mean(axis=1)
    for values, expected in zip((total, within), score_variance(d_k, **options), strict=True):
        error = values.std() / np.sqrt(draws)
        assert error < 0.06 * expected
        assert abs(values.mean() - expected) < 4 * error


def test_dot_products_vary_by_their_width_unless_they_are_scaled():
    """All of it within rows."""
    for options, variance in (
        ({}, 1),
        ({"scale": False}, 7),
        ({"temperature": 2.0}, 1 / 4),
        ({"scale": False, "temperature": 2.0}, 7 / 4),
    ):
        assert score_variance(7, **options) == (variance, variance)
    widths = (4, 9)
    laws = {name: form.laws(widths) for name, form in measured.FORMS.items()}
    for law in measured.LAWS:
        assert_close(laws["dot"][law], widths)
        assert_close(laws["scaled_dot"][law], [1, 1])
        assert laws["additive"][law][0] == laws["additive"][law][1]
    assert_close(laws["additive_matched"]["variance_within_rows_law"], widths)
    assert np.all(laws["additive_matched"]["variance_law"] > widths)


def test_draws_are_parts_of_one_array_over_the_root_of_the_width(monkeypatch):
    """Values, their goal and additive scores have variance 1/d; queries and keys have 1."""
    normals = np.arange(1.0, 1 + (3 * 5 + 4 + 1) * 4, dtype=np.float32).reshape(-1, 4)
    monkeypatch.setattr(measured.jax.random, "normal", lambda key, shape: normals.reshape(shape))
    q, k, goal, params = measured.draw(None, 4, 5)
    assert_close(q, normals[:5])
    assert_close(k, normals[5:10])
    assert_close(goal, normals[10:15] / 2)
    assert_close(params.w_v, normals[None, 15:19] / 2)
    assert_close(params.v_score, normals[19:] / 2)
    for weights in (params.w_q, params.w_k, params.w_o):
        assert_close(weights, np.eye(4)[None])


def test_gradients_are_those_of_the_definition_written_out(x64):
    """∂L/∂s = P ∘ (A − Σ_j P A), A = G Vᵀ, and ∂L/∂q by the chain rule of each score."""
    key = jax.random.key(1)
    measures = jax.jit(measured.make_measure(5, 4, 0.5))(key, None)
    q, k, goal, params = measured.draw(key, 5, 4)
    q, k, goal, v = (np.asarray(a, float) for a in (q, k, goal, params.v_score[0]))
    pairs = np.tanh(q[:, None] + k[None])
    a = goal @ (k @ np.asarray(params.w_v[0], float)).T
    for name, form in measured.FORMS.items():
        form_measures, factor = measures[name], 1 / form.options(5)["temperature"]
        additive = form.score == "additive"
        scores = factor * (pairs @ v if additive else q @ k.T)
        e = np.exp(scores)
        p = e / e.sum(axis=1, keepdims=True)
        score_gradient = p * (a - (p * a).sum(axis=1, keepdims=True))
        score_jacobian = (1 - pairs**2) * v if additive else np.broadcast_to(k[None], pairs.shape)
        query_gradient = factor * np.einsum("ij,ija->ia", score_gradient, score_jacobian)
        for quantity, gradient in (
            ("score_gradient", score_gradient),
            ("query_gradient", query_gradient),
        ):
            norms = np.linalg.norm(gradient, axis=1)
            assert float(form_measures[quantity]) == pytest.approx(
                np.sqrt((norms**2).mean()), rel=1e-4
            )
            assert float(form_measures[f"median_{quantity}"]) == pytest.approx(
                np.median(norms), rel=1e-4
            )
        within = scores.var(axis=1).mean()
        assert float(form_measures["variance"]) == pytest.approx(scores.var(), rel=1e-4)
        assert float(form_measures["variance_within_rows"]) == pytest.approx(within, rel=1e-4)
        assert float(form_measures["saturated"]) == np.mean(p.max(axis=1) > 0.5)
        assert float(form_measures["largest_weight"]) == pytest.approx(p.max(axis=1).mean())
        entropy = -(p * np.log(p)).sum(axis=1).mean()
        assert float(form_measures["entropy"]) == pytest.approx(entropy, rel=1e-4)
        assert set(form_measures) == set(measured.MEASURES)


@pytest.mark.full
def test_queries_keys_and_goals_are_drawn_with_the_variances_said():
    q, k, goal, params = measured.draw(jax.random.key(0), 200, 300)
    for array, variance in (
        (q, 1),
        (k, 1),
        (goal, 1 / 200),
        (params.w_v, 1 / 200),
        (params.v_score, 1 / 200),
        (k @ params.w_v[0], 1),
    ):
        tolerance = 5 * np.sqrt(2 / min(array.size, 40000))
        assert float(jnp.var(array)) == pytest.approx(variance, rel=tolerance)
    assert abs(np.corrcoef(q.ravel(), k.ravel())[0, 1]) < 0.02
    # matched additive scores vary within a row as dot products do, on average over draws of v
    for name in ("dot", "additive_matched"):
        within = [np.var(compute_scores(name, seed), axis=1).mean() for seed in range(32)]
        error = np.std(within, ddof=1) / 32**0.5
        assert abs(np.mean(within) - 200 * 59 / 60) < 4 * error < 0.15 * 200


def compute_scores(name, seed):
    q, k, _, params = measured.draw(jax.random.key(seed), 200, 60)
    return attention_scores(params, q, k, **measured.FORMS[name].options(200))[0]
