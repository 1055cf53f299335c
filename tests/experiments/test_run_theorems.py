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
from experiments.theorems import causal, draws, initial, layers, mixing
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
)
from experiments.verdicts import STATEMENTS
from tests.support.closeness import assert_close
from tests.support.runs import rows, run

pytestmark = pytest.mark.usefixtures("x64")


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
    points = [line for line in first.lines if line.get_marker() != "None"]
    assert [list(line.get_ydata()) for line in points] == [[0.1, 0.2, 0.5], [0.3]]
    styles = [line.get_linestyle() for line in first.lines if line not in points]
    assert styles == ["-", "--", "--"]
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
        assert_close(values, expected, rtol=1e-6)
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
    uniform = [initial.pass_heads(key, h, depth=2, d=16, uniform=True) for h in (1, 4)]
    assert initial.compare_heads(key, 1, 4, depth=2, d=16, uniform=True) == pytest.approx(
        float(jnp.log((1 - uniform[1][-1]) / (1 - uniform[0][-1])))
    )
    assert abs(initial.compare_heads(key, 1, 4, depth=2, d=16)) > 1e-3


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
