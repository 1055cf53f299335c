"""Theorems: outcomes follow from curves, and networks are those that the theorems ask for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import run_theorems
from experiments.theorems import causal, collapse, layers, networks, sphere
from experiments.theorems.statements import (
    BEYOND,
    FAILS,
    HOLDS,
    LOOSE,
    OPEN,
    Curve,
    judge,
    load_curves,
    save_curves,
)
from tests.support.closeness import assert_close
from tests.support.runs import rows, run

pytestmark = pytest.mark.usefixtures("x64")


def test_an_outcome_follows_from_the_curves():
    equation = Curve("a", [1, 2], [3, 4], [3.001, 4])
    loose = Curve("b", [1], [10], [2], "≤", 0)
    beyond = Curve("c", [1], [1], [1], beyond=True)
    wrong = Curve("d", [1, 7], [1, 2], [1, 3])
    assert judge([equation])[:2] == (HOLDS, 1.0)
    assert judge([loose])[:2] == (LOOSE, 5.0)
    assert judge([loose._replace(ordering=True)])[:2] == (HOLDS, 1.0)
    assert judge([equation, beyond])[0] == BEYOND
    assert judge([equation, beyond._replace(measured=[2])])[0] == HOLDS
    assert judge([equation, wrong]) == (FAILS, 1.0, "d, 7: 3, claimed = 2")
    assert judge([equation, wrong._replace(instead=True)])[0] == HOLDS
    assert judge([wrong._replace(relation="none")])[0] == OPEN


def test_curves_are_saved_as_they_are():
    curves = [
        Curve("a/b", [1, 2], np.nan, [3.0, 4.0], "≥", 0.5, beyond=True, ordering=True),
        Curve("c", [1], [2], [3], instead=True),
    ]
    for curve, again in zip(curves, load_curves(save_curves(curves)), strict=True):
        assert (again.name, *again[4:]) == (curve.name, *curve[4:])
        np.testing.assert_array_equal(again.as_array(), curve.as_array())


def test_a_layer_is_a_step_on_the_sphere():
    """Against NumPy, with scores and values of every head, and a mask."""
    rng = np.random.default_rng(0)
    n, d, heads, beta, gain = 5, 3, 2, 2.0, 0.1
    a, v = rng.normal(size=(2, heads, d, d))
    x = rng.normal(size=(n, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    config = networks.make_sphere(1, d, beta, gain, num_heads=heads, mask="causal")
    state = networks.pass_states(networks.make_params(config, a, v), jnp.asarray(x), config)[1]
    branch = 0
    for head in range(heads):
        weights = np.exp(beta * x @ a[head] @ x.T) * np.tri(n)
        branch = branch + weights / weights.sum(axis=1, keepdims=True) @ x @ v[head]
    expected = x + gain * branch
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert_close(state, expected, rtol=1e-12)


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


def test_parked_tokens_are_apart_and_the_others_near():
    angles, distance = np.random.default_rng(0).uniform(0, 2 * np.pi, 300), 0.5
    centres = causal.park(angles, distance)
    gaps = np.abs(angles[:, None] - angles[centres])
    gaps = np.minimum(gaps, 2 * np.pi - gaps)
    assert (gaps.min(axis=1) <= distance).all()
    np.fill_diagonal(between := gaps[centres], np.inf)
    assert between.min() > distance and centres[0] == 0


def test_collinear_tokens_leave_their_line():
    """The smallest counterexample by hand: LayerNorm of (1, k, 0)."""
    assert layers.affine_rank(layers.COLLINEAR) == 1
    normed = layers.normalise_tokens(layers.COLLINEAR, "layer")
    expected = layers.COLLINEAR - layers.COLLINEAR.mean(axis=1, keepdims=True)
    expected /= expected.std(axis=1, keepdims=True)
    assert_close(normed, expected, atol=1e-9)
    assert layers.affine_rank(normed) == 2


def test_mixing_is_by_the_matrices_that_are_prescribed():
    key = jax.random.key(3)
    first, second, third = np.asarray(collapse.draw_markov(key, 3, 6))[:, 0]
    products = [first, second @ first, third @ second @ first]
    sizes = [np.linalg.svd(p, compute_uv=False) for p in products]
    expected = [np.sum(s**4) / s[0] ** 4 - 1 for s in sizes]
    assert_close(collapse.pass_markov(key, 6, None), expected, rtol=1e-9)


def test_one_failure_is_in_the_table(tmp_path):
    assert run(run_theorems, ["--theorems=affine_rank"], tmp_path) == 0
    table = rows(tmp_path)
    assert {row["outcome"] for row in table} == {FAILS}
    normed = [r for r in table if "LayerNorm" in r["curve"]]
    pairs = [(float(r["predicted"]), float(r["measured"])) for r in normed]
    assert pairs == [(1, 2), (2, 3), (3, 4)]
    ranks = [r for r in table if "RMSNorm" in r["curve"]]
    assert all(r["predicted"] == r["measured"] for r in ranks)


@pytest.mark.full
@pytest.mark.parametrize("name", run_theorems.THEOREMS)
def test_outcomes_are_those_of_the_page(name):
    """Of a seed that the page does not have."""
    expected = {
        "multi_head_energy": BEYOND,
        "masks": LOOSE,
        "lipschitz": LOOSE,
        "affine_rank": FAILS,
        "score_spread": OPEN,
    }
    outcome = judge(run_theorems.THEOREMS[name].curves(1))
    assert outcome.verdict == expected.get(name, HOLDS), outcome
