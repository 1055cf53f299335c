"""Theorems: outcomes follow from curves, and networks are those that the theorems ask for."""

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

    def compare(panel, relation, predicted):
        curve = Curve("c", [0, 1, 2, 3], predicted, [5.0, 1.0, 4.0, 2.0], relation)
        row = run_theorems.compare_curve("t", curve, panel)
        assert (row.quantity, row.source) == ("t, c", "theorem")
        return row.measured, row.published, row.note

    median = "y, median of 4 draws; values 1 to 5"
    assert compare(draws, "none", 0.0) == (3, 0, median)
    assert compare(draws, "none", np.nan) == (3, None, median)
    assert compare(draws, "≥", 2.0) == (1, 2, "y where draw is 1; claim: at least")
    assert compare(layers, "none", np.nan) == (2, None, "y where x is 3")
    assert compare(layers, "≤", 2.0) == (5, 2, "y where x is 0; claim: at most")


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
