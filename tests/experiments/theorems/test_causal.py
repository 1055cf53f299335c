"""Causal attention on the sphere: parked tokens and the others."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments.theorems import causal
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_parked_tokens_are_apart_and_the_others_near():
    angles, distance = np.random.default_rng(0).uniform(0, 2 * np.pi, 300), 0.5
    centres = causal.park(angles, distance)
    gaps = np.abs(angles[:, None] - angles[centres])
    gaps = np.minimum(gaps, 2 * np.pi - gaps)
    assert (gaps.min(axis=1) <= distance).all()
    np.fill_diagonal(between := gaps[centres], np.inf)
    assert between.min() > distance and centres[0] == 0


def test_the_repeated_token_counts_with_its_number():
    """Against NumPy: of k equal keys one has k times the weight."""
    key, depth = jax.random.key(0), 1
    (distance,) = causal.repeated_distances(key, (3,), depth=depth, d=8)
    config = causal.make_pre_norm(depth, 8, 4)
    key_e, key_p = jax.random.split(key)
    zero, one = np.asarray(jax.random.normal(key_e, (2, 8)))
    attention = rc.init(key_p, config).layers.attention

    def last_state(count):
        x = np.stack([*[one] * count, zero])
        normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + config.norm_eps)
        out = zero.copy()
        for h in range(4):
            q, k, v, o = (np.asarray(getattr(attention, f"w_{n}"))[0, h] for n in "qkvo")
            scores = (normed @ k) @ (normed[-1] @ q) / np.sqrt(k.shape[1])
            weights = np.exp(scores) / np.exp(scores).sum()
            out = out + weights @ normed @ v @ o
        return out

    assert_close(distance, np.linalg.norm(last_state(3) - last_state(4)), rtol=1e-5)


@pytest.mark.full
def test_tokens_meet_at_the_first_only_under_a_causal_mask():
    curves = {curve.name: curve for curve in causal.first_token_curves(2)}
    assert curves["causal, worst of the draws"].measured[-1] > 1 - 1e-6
    assert curves["no mask, worst of the draws"].measured[-1] < 0.9


@pytest.mark.full
def test_repeated_tokens_come_together_almost_by_their_law():
    (slopes,) = (c for c in causal.repeated_curves(2) if c.name == "power of k from 32 to 256")
    assert (np.abs(np.asarray(slopes.measured) + 1.9) < 0.15).all()


@pytest.mark.full
def test_the_exact_jacobian_exceeds_path_products_more_at_larger_weights():
    exact = causal.jacobian_curves(2)[1].measured
    assert 1 < exact[2] < exact[3]


@pytest.mark.full
def test_the_bound_on_the_first_token_says_nothing_and_skips_keep_the_others():
    off, shared, _ = causal.first_mass_curves(2)
    assert (off.predicted == 1).all() and off.measured[-1] < 0.01
    assert 0.92 < shared.measured[-1] < 0.96
