"""Theorems: outcomes follow from curves, and networks are those that the theorems ask for."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import run_theorems
from experiments.lab.experiment import read_run
from experiments.theorems import mixing
from experiments.theorems.outcomes import (
    DRAW,
    FAILS,
    HOLDS,
    LOOSE,
    OPEN,
    Curve,
    Panel,
    judge,
)
from tests.support.closeness import assert_close
from tests.support.counted import record_progress
from tests.support.executors import replace_executor
from tests.support.runs import rows, run

pytestmark = pytest.mark.usefixtures("x64")


def check_panels(theorem, curves):
    assert {curve.panel for curve in curves} == set(range(len(theorem.panels)))
    assert len({curve.name for curve in curves}) == len(curves)


@pytest.mark.full
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


def test_one_failure_is_in_the_table(tmp_path):
    assert run(run_theorems, ["--theorems=affine_rank"], tmp_path) == 0
    table = rows(tmp_path)
    assert {row["outcome"] for row in table} == {FAILS}
    normed = [r for r in table if "LayerNorm" in r["curve"]]
    pairs = [(float(r["predicted"]), float(r["measured"])) for r in normed]
    assert pairs == [(1, 2), (2, 3), (3, 4)]
    ranks = [r for r in table if "RMSNorm" in r["curve"]]
    assert all(r["predicted"] == r["measured"] for r in ranks)
    spans = [r for r in table if r["curve"].startswith("tokens and their attention")]
    assert [(float(r["x"]), float(r["measured"])) for r in spans][2] == (6, 12)


def test_a_curve_is_compared_at_its_worst_point_and_draws_without_a_claim_by_their_median():
    """The last point of other curves without a claim, such as the last layer."""
    draws, layers = Panel(DRAW, "y"), Panel("x", "y")

    def compare(panel, relation, predicted, **fields):
        curve = Curve("c", [0, 1, 2, 3], predicted, [5.0, 1.0, 4.0, 2.0], relation, **fields)
        row = run_theorems.compare_curve("t", curve, panel)
        assert (row.quantity, row.source) == ("t, c", "theorem")
        return row.measured, row.published, row.note

    median = "y, median of 4 draws; values 1 to 5"
    assert compare(draws, "none", 0.0) == (3, 0, median)
    assert compare(draws, "none", np.nan) == (3, None, median)
    assert compare(draws, "≥", 2.0) == (1, 2, "y where draw is 1; claim: at least")
    assert compare(layers, "none", np.nan) == (2, None, "y where x is 3")
    assert compare(layers, "≤", 2.0) == (5, 2, "y where x is 0; claim: at most")
    beyond = "y where x is 0; claim: at most; the conditions of the theorem do not hold here"
    assert compare(layers, "≤", 2.0, beyond=True) == (5, 2, beyond)


@pytest.mark.full
@pytest.mark.parametrize("name", run_theorems.THEOREMS)
def test_outcomes_are_those_of_the_page(name):
    """Of a seed that the page does not have."""
    expected = {
        "masks": LOOSE,
        "lipschitz": LOOSE,
        "affine_rank": FAILS,
        "score_spread": OPEN,
    }
    curves = run_theorems.THEOREMS[name].curves(1)
    check_panels(run_theorems.THEOREMS[name], curves)
    outcome = judge(curves)
    assert outcome.verdict == expected.get(name, HOLDS), outcome
    assert outcome.factor >= {"masks": 1e5, "lipschitz": 10}.get(name, 1), outcome


@pytest.mark.parametrize(("relation", "place"), [("=", 2), ("≤", 0), ("≥", 2), ("none", 3)])
def test_the_shown_point_is_the_farthest_on_the_wrong_side(relation, place):
    """Relative to its prediction; of curves without one it is the last."""
    curve = Curve("a", range(4), [1.0, 100.0, 10.0, np.nan], [1.5, 120.0, 1.0, 7.0], relation)
    assert run_theorems.find_shown(curve) == place
    nothing = curve._replace(predicted=[np.nan] * 4)
    assert run_theorems.find_shown(nothing) == 3
    zero = Curve("b", [0, 1], [0.0, 10.0], [0.5, 12.0], "=")
    assert run_theorems.find_shown(zero) == 0
    below = Curve("c", [0, 1], [-10.0, -1.0], [-12.0, -1.5], relation)
    assert run_theorems.find_shown(below) == (relation != "≤")


def test_the_quick_size_leaves_out_what_takes_long():
    (flag,) = run_theorems.EXPERIMENT.presets["quick"]
    names = flag.removeprefix("--theorems=").split(",")
    assert {*run_theorems.LONG} <= {*run_theorems.THEOREMS}
    assert {*names} == {*run_theorems.THEOREMS} - {*run_theorems.LONG}


def test_draws_of_all_settings_are_counted_and_named(monkeypatch):
    """Two programs: one has two settings, whose traced sizes differ."""
    levels = []

    def measure(measure_one, cells, level):
        levels.append(level)
        return {name: measure_one(np.arange(4), traced) for name, traced in cells.items()}

    def list_draws(theorems):
        assert theorems == "theorems"
        yield "a", lambda seed, *, end: seed + end, {"one": {"end": 10}, "two": {"end": 20}}, 1
        yield "b", lambda seed: -seed, {"one": {}}, 0

    options = SimpleNamespace(num_seeds=4)
    replace_executor(monkeypatch, run_theorems, options, "folder", "draws", 4 * 3, measure=measure)
    monkeypatch.setattr(run_theorems.draws, "list_draws", list_draws)
    values = run_theorems.measure_draws(options, "theorems", "folder")
    assert {place: draws.tolist() for place, draws in values.items()} == {
        ("a", "one"): [10, 11, 12, 13],
        ("a", "two"): [20, 21, 22, 23],
        ("b", "one"): [0, -1, -2, -3],
    }
    assert levels == [1, 0]


def test_curves_and_draws_are_of_the_seed_and_in_float64(monkeypatch, tmp_path):
    """Each theorem has its own part of the folder, and statements follow from the same flags."""
    made, parts = [], []

    def make(name):
        def curves(seed):
            made.append((name, seed, jax.numpy.ones(()).dtype))
            return [Curve(name, [1], [2], [seed])]

        return run_theorems.THEOREMS["masks"]._replace(name=name, curves=curves)

    def cached(name, compute):
        parts.append(name)
        return compute()

    monkeypatch.setattr(run_theorems, "measure_draws", lambda *arguments: arguments)
    options, folder = SimpleNamespace(seed=7), SimpleNamespace(log="log", cached=cached)
    events = record_progress(monkeypatch, run_theorems)
    theorems = {name: make(name) for name in ("width", "masks")}
    with jax.enable_x64(False):
        results = run_theorems.measure(options, theorems, folder)
    assert made == [(name, 7, np.float64) for name in theorems] and parts == [*theorems]
    assert events == [(2, "theorems", "log"), "step", "step", "end"]
    assert results.draws == (options, theorems, folder)
    assert {name: curve.measured.tolist() for name, (curve,) in results.curves.items()} == {
        "width": [7],
        "masks": [7],
    }
