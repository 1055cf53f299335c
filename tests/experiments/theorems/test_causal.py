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
