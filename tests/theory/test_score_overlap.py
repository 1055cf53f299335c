"""Overlaps of rows of attention weights: by quadrature, by draws and in closed form."""

import jax
import numpy as np
import pytest

from rank_collapse.theory import score_overlap
from tests.support.closeness import assert_close

overlap_ratios = jax.jit(score_overlap.overlap_ratios)


def compute_overlap(n, variance, c):
    """Computes E Σ_j P_ij P_kj by the trapezoidal rule: over what both scores of a key share, over
    what each has separately, and over ln t and ln t'."""
    grid = np.linspace(-8.5, 8.5, 121)
    density = np.exp(-(grid**2) / 2) / np.exp(-(grid**2) / 2).sum()
    x, step = np.linspace(-30, 22, 151, retstep=True)
    shared, separate = (np.sqrt(variance * a) * grid for a in (c, 1 - c))
    once, none = np.empty((2, len(x), len(grid)))
    for i, s in enumerate(shared):
        tw = np.exp(np.minimum(x[:, None] + s + separate[None, :], 700))
        once[:, i], none[:, i] = (tw * np.exp(-tw)) @ density, np.exp(-tw) @ density
    both = (none * density) @ none.T
    return n * step**2 * np.sum((once * density) @ once.T * both ** (n - 1))


@pytest.mark.parametrize(
    ("n", "variance", "c", "error"),
    [
        (3, 1.0, 0.0, 5e-4),
        (17, 4.0, 0.99, 5e-4),
        (64, 16.0, 0.5, 5e-4),
        (9, 1e-3, 0.5, 5e-4),
        (8, 36.0, 0.2, 0.01),
    ],
)
def test_overlaps_of_rows_by_another_quadrature(n, variance, c, error):
    unit = variance * (1 - 1 / n) / n
    alike, apart = (compute_overlap(n, variance, a) for a in (1 - 1e-12, c))
    wanted = (alike - 1 / n) / unit, (alike - apart) / ((1 - c) * unit)
    assert_close(overlap_ratios(n, variance, c), wanted, rtol=2 * error)


def test_overlaps_of_rows_that_are_drawn():
    """Negative correlations, and variances beyond those of the quadrature above."""
    rng, count = np.random.default_rng(0), 100_000
    for n, variance, c in ((8, 9.0, -0.5), (5, 100.0, 0.2)):
        z = rng.standard_normal((2, count, n))
        scores = np.sqrt(variance) * np.stack([z[0], c * z[0] + np.sqrt(1 - c * c) * z[1]])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p, q = weights / weights.sum(axis=-1, keepdims=True)
        unit = variance * (1 - 1 / n) / n
        row_ratio, distance_ratio = (float(r) for r in overlap_ratios(n, variance, c))
        for expected, values in (
            (1 / n + unit * row_ratio, (p * p).sum(axis=1)),
            ((1 - c) * unit * distance_ratio, ((p - q) ** 2).sum(axis=1) / 2),
        ):
            error = values.std() / np.sqrt(count) + 0.02 * (variance > 16) * values.mean()
            assert abs(expected - values.mean()) < 4 * error


def test_overlaps_of_one_key_and_of_equal_weights():
    np.testing.assert_array_equal(overlap_ratios(1, 2.0, 0.5), 1.0)
    for variance in (0.0, 1e-12):
        np.testing.assert_allclose(overlap_ratios(9, variance, 0.5), 1.0, rtol=2e-3)


@pytest.mark.parametrize("count", [1.0, 1 - 1e-7, 1 + 1e-6, 1.0009])
def test_a_row_of_one_key_has_no_overlap_to_lose(count):
    """Its number of keys is 1 but for rounding, where it is 1/Σ_j p_j²."""
    assert tuple(map(float, overlap_ratios(count, 4.0, 0.5))) == (1, 1)
