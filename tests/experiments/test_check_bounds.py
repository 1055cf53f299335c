"""The lemma and the bounds on random draws: counted, written, and able to fail."""

import jax
import mpmath
import numpy as np
import pytest

import rank_collapse as rc
from experiments import check_bounds
from experiments.paper.bounds.draws import FREE, SPREAD, Case, two_heads
from tests.support.closeness import assert_close
from tests.support.runs import result_of, rows, run

CASES = (Case(8, 12, 3), Case(3, 4, 1, mask="causal"))


ARGUMENTS = ("--num_draws=400", "--seed=1", "--sizes=40000,256")


@pytest.mark.full
def test_lemma_and_bounds_hold_wherever_the_condition_does(tmp_path, monkeypatch):
    monkeypatch.setattr(check_bounds, "CASES", CASES)
    names = ",".join(case.name for case in CASES)
    assert run(check_bounds, [*ARGUMENTS, f"--cases={names}"], tmp_path) == 0
    experiment = check_bounds
    results, setup = result_of(experiment, tmp_path)
    counts = check_bounds.count_violations(results["draws"].values())
    heads = counts["head_cases"], counts["head_refused"]
    assert (counts["draws"], sum(heads)) == (400, 2 * 200 * (3 + 1))
    assert heads[0] > 100 and heads[1] > 0
    assert not any(counts[f"{name}_violations"] for name in ("lemma", *check_bounds.LEAST))
    assert 0 < counts["gamma_min"] < counts["gamma_max"] and counts["head_min"] > 0
    # the check can fail: without the condition the lemma does not hold
    assert counts["lemma_violations_elsewhere"] > 0
    # bounds without a condition: given on every draw of the first case, refused under the mask
    names = ("mean_head", "mean_layer", "diameter", "layer", "stack")
    assert [counts[f"{name}_cases"] for name in names] == [2 * 200 * 3, 400, 400, 400, 200]
    assert counts["mean_head_refused"] == 2 * 200 and counts["diameter_refused"] == 400
    assert counts["mean_head_min"] > 0
    medians = [counts[f"{w}_admissible_median"] for w in ("mean_head", "head")]
    assert medians[0] < medians[1]

    def estimate_claims(broken=None):
        """With one violation of a bound among the draws of the first case."""
        draws = dict(results["draws"])
        if broken:
            name = f"{broken}_tightness"
            values, ok = draws[CASES[0]][name].copy(), draws[CASES[0]][f"{broken}_ok"]
            values[np.unravel_index(ok.argmax(), ok.shape)] = -1
            draws[CASES[0]] = draws[CASES[0]] | {name: values}
        return [row.estimate for row in experiment.judge_claims(results | {"draws": draws}, setup)]

    # the construction of two heads is above the published bound and changes no count
    built = [construction["over_published"] for construction in results["built"]]
    assert built[0] < 1 < built[1]
    assert estimate_claims() == [0, 0, 0, 0]
    assert estimate_claims("head") == [0, 1, 0, 0]
    assert estimate_claims("published_layer") == [0, 0, 1, 0]
    assert estimate_claims("published_stack") == [0, 0, 0, 1]
    measured = [row.measured for row in experiment.compare_results(results, setup)]
    assert measured[:9] == [0] * len(FREE) + built
    assert measured[9:11] == [counts["head_min"], counts["head_max"]]
    table = rows(tmp_path)
    assert [r["mask"] for r in table] == ["none", "causal"]
    assert sum(int(r["head_cases"]) for r in table) == heads[0]


def test_counts_are_of_what_the_condition_covers():
    flat = {
        "head_ok": [True, True, False],
        "head_tightness": [1.0, -1.0, -2.0],
        "lemma_excess": [-1.0, 2.0, 3.0],
        "gamma": [0.5, 0.25, 9.0],
        "published_layer_ok": [False],
        "published_layer_tightness": [-1.0],
        "published_stack_ok": [True],
        "published_stack_tightness": [-0.5],
        "layer_tightness": [0.5, np.nan],
        "stack_tightness": [-0.25],
        "mean_head_tightness": [0.5, -0.5, np.nan],
        "mean_layer_tightness": [0.25],
        "diameter_layer_tightness": [np.nan],
        "cubic_diameter_layer_tightness": [1.0],
        "diameter_tightness": [-1e-15],
    }
    counts = check_bounds.count_violations(
        [{name: np.array(values)[None] for name, values in flat.items()}]
    )
    assert (
        counts.items()
        >= {
            "layer_cases": 1,
            "layer_refused": 1,
            "layer_violations": 0,
            "stack_cases": 1,
            "stack_violations": 1,
            "head_cases": 2,
            "head_refused": 1,
            "head_violations": 1,
            "lemma_violations": 1,
            "lemma_violations_elsewhere": 1,
            "published_layer_cases": 0,
            "published_layer_violations": 0,
            "published_stack_cases": 1,
            "published_stack_violations": 1,
            "gamma_min": 0.25,
            "gamma_max": 0.5,
            "head_min": -1,
            "published_layer_min": None,
            "diameter_layer_min": None,
            "mean_head_cases": 2,
            "mean_head_refused": 1,
            "mean_head_violations": 1,
            "diameter_violations": 0,
            "mean_head_admissible_median": 0,
        }.items()
    )


@pytest.mark.parametrize("width", [2, pytest.param(200, marks=pytest.mark.full)])
def test_the_construction_is_that_of_its_dense_network(width, x64):
    """`two_heads` has one feature in place of matrices [d, d]. The residual is no smaller around
    the certified center of least ‖.‖_{1,∞}."""
    x, w_q, w_o = np.zeros((2, width)), np.zeros((2, width, 1)), np.ones((2, 1, width))
    x[:, 0] = 1, -1
    w_q[:, 0] = 1
    w_o[0] = np.sqrt(width) * np.eye(1, width)
    heads = rc.network.AttentionParams(w_q=w_q, w_k=SPREAD / 2 * w_q, w_v=w_q, w_o=w_o)
    params = rc.network.TransformerParams(
        layers=rc.network.BlockParams(attention=jax.tree.map(lambda a: a[None], heads))
    )
    config = rc.san(1, 2, width, d_qk=1, d_v=1)
    report = jax.jit(rc.bound_report)(params, x, config)
    assert_close(10**report.log10_spread, SPREAD, rtol=1e-12)
    published, sums = report.published_layer, report.layer
    ratios = two_heads(width)
    for name, lhs, rhs in (
        ("over_published", published.log10_lhs, published.log10_rhs),
        ("over_first", published.log10_lhs, published.log10_rhs_first),
        ("over_sums", sums.log10_lhs, sums.log10_rhs),
    ):
        assert_close(ratios[name], 10 ** (lhs[0] - rhs[0]), rtol=1e-11)


@pytest.mark.parametrize("width", [4096, 16384, 40000, 200000])
def test_the_construction_in_closed_form(width):
    ratios, d = two_heads(width), mpmath.mpf(width)
    with mpmath.workdps(30):
        moved = mpmath.tanh(mpmath.mpf(SPREAD) / 2) / (mpmath.mpf(SPREAD) / 2)
        closed = moved * (d**0.25 + d**-0.25)
        over = {"over_published": closed / (8 * mpmath.sqrt(2)), "over_first": closed / 16}
    assert {n: ratios[n] > 1 for n in over} == {
        "over_published": width > 15928,
        "over_first": width > 64731,
    }
    for name, value in over.items():
        assert_close(ratios[name], float(value), rtol=1e-13)
