"""Tokens on the sphere: the equiangular flow and the growth of modes."""

import jax
import numpy as np
import pytest

from experiments.theorems import prescribed_networks, sphere
from experiments.theorems.outcomes import HOLDS, judge
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_equiangular_flow_has_the_field_report_s_numbers():
    """Numbers of an independent NumPy integration."""
    expected = [0.3626, 0.8163, 0.9705, 0.9959, 0.9994, 0.9999]
    flow = sphere.equiangular_flow(np.arange(1, 7), 8, 1.0)
    assert_close(flow, expected, atol=6e-5)
    small = sphere.pass_equiangular(8, 1.0, 0.1)  # layers of a = 0.1, by the same NumPy
    assert_close(small[[0, 1, 2, 3]], [0.3336, 0.7803, 0.9598, 0.9938], atol=6e-5)


def test_modes_grow_by_their_rates():
    rates = sphere.mode_growth(16.0)
    assert_close(rates[[2, 4, 5, 6]], [0.4210, 0.7021, 0.7143, 0.6470], atol=6e-5)
    np.testing.assert_allclose(sphere.pass_modes(16.0, n=64, depth=100)[:8], rates[:8], rtol=0.03)


@pytest.mark.parametrize("name", sphere.NORMALISATIONS)
def test_energies_are_those_of_numpy(name):
    """The same draw, layer by layer in NumPy."""
    key, (heads, beta, n, d, depth) = jax.random.key(7), (3, 2.0, 5, 4, 6)
    sizes = {"heads": heads, "beta": beta, "n": n, "d": d, "depth": depth}
    measured = sphere.pass_energies(key, normalise=sphere.NORMALISATIONS[name], **sizes)
    key_m, key_x = jax.random.split(key)
    m = np.asarray(jax.random.normal(key_m, (heads, d, d))) / np.sqrt(d)
    m = (m + m.transpose(0, 2, 1)) / 2
    x, expected = np.asarray(prescribed_networks.draw_sphere(key_x, n, d)), []
    for _ in range(depth + 1):
        weights = np.exp(beta * np.stack([x @ one @ x.T for one in m]))
        expected.append(weights.sum(axis=(1, 2)) / (2 * beta * n**2))
        weights /= n if name == "no softmax" else weights.sum(axis=-1, keepdims=True)
        x = x + sphere.ENERGY_GAIN * sum(p @ x @ one for p, one in zip(weights, m, strict=True))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    assert_close(measured, expected, rtol=1e-12)


def test_a_fall_with_softmax_is_in_proportion_to_the_gain(monkeypatch):
    """In draw 4 of --seed=3000; so it is there in the limit of small gains, too."""
    key, falls = jax.random.fold_in(jax.random.key(3000), 4), []
    for gain, depth in ((0.01, 300), (0.005, 600)):
        monkeypatch.setattr(sphere, "ENERGY_GAIN", gain)
        energies = sphere.pass_energies(key, normalise=None, depth=depth)
        falls.append(float(sphere.least_increment(energies)))
    assert falls[0] < -1e-5
    assert_close(falls[1] / falls[0], 0.5, rtol=0.05)


@pytest.mark.full
def test_draws_with_softmax_do_not_decide_the_outcome():
    """At seed 3000 four heads fall, at seed 0 they do not; the statement has the draws."""
    for seed, falls in ((0, False), (3000, True)):
        curves = sphere.energy_curves(seed)
        (softmax,) = (c for c in curves if c.name == "all heads, softmax")
        assert (np.min(softmax.measured) < 0) == falls
        assert judge(curves).verdict == HOLDS
