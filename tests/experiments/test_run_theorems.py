"""Theorems: outcomes follow from curves, and networks are those that the theorems ask for."""

import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_theorems
from experiments.lab.experiment import read_run
from experiments.run_theorems import THEOREMS
from experiments.theorems import causal, draws, initial, layers, mixing, networks, sphere
from experiments.theorems.drawing import plot_theorem
from experiments.theorems.statements import (
    BEYOND,
    FAILS,
    HOLDS,
    LOOSE,
    OPEN,
    Curve,
    Panel,
    judge,
    load_curves,
    save_curves,
)
from experiments.verdicts import STATEMENTS
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
        Curve("a/b", [1, 2], np.nan, [3.0, 4.0], "≥", 0.5, beyond=True, ordering=True, panel=2),
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
    first, second, third = np.asarray(mixing.draw_markov(key, 3, 6))[:, 0]
    products = [first, second @ first, third @ second @ first]
    sizes = [np.linalg.svd(p, compute_uv=False) for p in products]
    expected = [np.sum(s**4) / s[0] ** 4 - 1 for s in sizes]
    assert_close(mixing.pass_markov(key, 6), expected, rtol=1e-9)


def test_a_panel_has_one_quantity_as_points_over_lines():
    panels = (Panel("n", "cosine", "x"), Panel("mask", "factor", names=("none", "causal")))
    curves = [
        Curve("flow", [1, 2, 4], [0.1, 0.2, 0.4], [0.1, 0.2, 0.5]),
        Curve("bound", [2], 0.9, [0.3], "≤"),
        Curve("the same points", [1, 2], [0.3, 0.3], [0.1, 0.2], "≥"),
        Curve("alone", [0, 1], np.nan, [7, 8], "none", panel=1),
    ]
    theorem = run_theorems.THEOREMS["masks"]._replace(panels=panels)
    first, second = plot_theorem(theorem, curves).axes
    assert (first.get_xlabel(), first.get_ylabel()) == ("n", "cosine")
    points = [line for line in first.lines if line.get_marker() not in ("None", "_")]
    assert [list(line.get_ydata()) for line in points] == [[0.1, 0.2, 0.5], [0.3]]
    styles = [line.get_linestyle() for line in first.lines if line not in points]
    assert styles == ["-", "None", "--"]  # the bound at one point is a mark there
    assert [line.get_ydata()[0] for line in first.lines if line.get_marker() == "_"] == [0.9]
    (alone,) = plot_theorem(theorem._replace(panels=panels[:1]), curves[1:2]).axes
    assert [line.get_linestyle() for line in alone.lines] == ["None", "--"]  # across the panel
    assert [label.get_text() for label in first.get_xticklabels()] == ["1", "2", "4"]
    assert [label.get_text() for label in second.get_xticklabels()] == ["none", "causal"]
    assert len(second.lines) == 1 and second.get_ylabel() == "factor"


def test_every_panel_has_a_curve_and_every_curve_a_panel():
    """Of the theorems that are quickest; the full tests have all."""
    for name in ("masks", "affine_rank", "position"):
        check_panels(run_theorems.THEOREMS[name], run_theorems.THEOREMS[name].curves(5))


def check_panels(theorem, curves):
    assert {curve.panel for curve in curves} == set(range(len(theorem.panels)))
    assert len({curve.name for curve in curves}) == len(curves)


def test_registered_settings_are_those_that_are_measured():
    for key, statistic in draws.STATISTICS.items():
        statement = STATEMENTS[key]
        assert [*statistic.settings] == [*statement.settings], key
        assert statement.experiments == ("run_theorems",) and statistic.theorem in THEOREMS
    listed = {key for key, *_ in draws.list_draws({"width": 0, "noise": 0})}
    assert listed == {"width law", "noise apart"}


def test_statements_are_judged_by_their_draws(tmp_path):
    flags = ["--theorems=width", "--num_seeds=2", "--seed=5"]
    assert run(run_theorems, flags, tmp_path) == 0
    (point,) = read_run(run_theorems, tmp_path).points
    for layer in (1, 2, 3):
        values = point.results.draws["width law", f"layer {layer}"]
        keys = [jax.random.fold_in(jax.random.key(5), seed) for seed in range(2)]
        expected = [mixing.pass_markov(key, 256)[layer - 1] for key in keys]
        expected = np.array(expected) / ((layer + 1) * 256.0 ** (1 - 2 * layer))
        assert_close(values, expected, rtol=1e-3)  # 1 is subtracted
    table = [r for r in rows(tmp_path) if r["curve"].startswith("statement")]
    assert len(table) == 6 and {r["theorem"] for r in table} == {"width"}


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


def test_heads_differ_where_attention_is_not_uniform():
    """With uniform attention H heads are one head of the same values: nothing can depend on H."""
    key = jax.random.key(1)
    sizes, keys = {"depth": 2, "d": 16}, jax.random.split(key, 3)
    apart = {
        h: np.mean([1 - initial.pass_heads(one, h, **sizes)[-1] for one in keys]) for h in (1, 4)
    }
    measured = initial.compare_heads(key, 1, 4, networks=3, **sizes)
    assert measured == pytest.approx(np.log(apart[4] / apart[1])) and abs(measured) > 1e-3


def test_shares_of_published_models():
    """Their sums are the mean path lengths of the published configurations."""
    published = {"bloom-7b1": (30, 3.6213576), "mpt-7b": (32, 4.2280776)}
    for name, (depth, total) in published.items():
        shares = tomllib.loads(layers.SHARES.read_text("utf-8"))[name]["shares"]
        assert len(shares) == depth and sum(shares) == pytest.approx(total, abs=1e-4)
        row = layers.published_row(name, 20)
        assert row.shape == (20,) and row.sum() == pytest.approx(1) and (row > 0).all()


def test_alibi_is_by_distance_alone():
    """One layer of two heads of slopes 1/16 and 1/256, by hand."""
    rows = []
    for slope in (2.0**-4, 2.0**-8):
        weights = np.exp(-slope * np.arange(4)[::-1])
        rows.append(weights / weights.sum())
    expected = 0.7 * np.eye(4)[-1] + 0.3 * np.mean(rows, axis=0)
    measured = layers.rollout_row([0.3], 2, 4)
    assert_close(measured, expected, rtol=1e-12)


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
    curves = run_theorems.THEOREMS[name].curves(1)
    check_panels(run_theorems.THEOREMS[name], curves)
    outcome = judge(curves)
    assert outcome.verdict == expected.get(name, HOLDS), outcome
