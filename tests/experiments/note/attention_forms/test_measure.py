"""Variances of scores: against mpmath, sums on a fine grid, and draws."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import rank_collapse as rc
from experiments.note.attention_forms.measure import score_variance
from rank_collapse.network.attention import attention_scores


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
