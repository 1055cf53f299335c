"""The lemma and the bounds on random draws: counted, written, and able to fail."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import check_bounds
from experiments.bounds.random_draws import FREE, Case
from tests.support.executors import replace_executor
from tests.support.runs import result_of, rows, run

CASES = (Case(8, 12, 3), Case(3, 4, 1, mask="causal"))


ARGUMENTS = ("--num_draws=400", "--seed=1", "--sizes=40000,256")


@pytest.mark.full
def test_lemma_and_bounds_hold_wherever_the_condition_does(tmp_path, monkeypatch):
    monkeypatch.setattr(check_bounds, "CASES", CASES)
    names = ",".join(case.name for case in CASES)
    assert run(check_bounds, [*ARGUMENTS, f"--cases={names}"], tmp_path) == 0
    experiment = check_bounds
    results, _ = result_of(experiment, tmp_path)
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
        return [row.estimate for row in experiment.judge_claims(results | {"draws": draws})]

    # the construction of two heads is above the published bound and changes no count
    built = [construction["over_published"] for construction in results["built"]]
    assert built[0] < 1 < built[1]
    assert estimate_claims() == [0, 0, 0, 0]
    assert estimate_claims("head") == [0, 1, 0, 0]
    assert estimate_claims("published_layer") == [0, 0, 1, 0]
    assert estimate_claims("published_stack") == [0, 0, 0, 1]
    measured = [row.measured for row in experiment.compare_results(results)]
    assert measured[:9] == [0] * len(FREE) + built
    assert measured[9:11] == [counts["head_min"], counts["head_max"]]
    table = rows(tmp_path)
    assert [r["mask"] for r in table] == ["none", "causal"]
    assert sum(int(r["head_cases"]) for r in table) == heads[0]


# One network that violates some of its bounds, and lacks others
MADE_UP = {
    "head_ok": [True, True, False],
    "head_tightness": [1.0, -1.0, -2.0],
    "lemma_excess": [0.0, 2.0, 3.0],
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


def test_counts_are_of_what_the_condition_covers():
    counts = check_bounds.count_violations(
        [{name: np.array(values)[None] for name, values in MADE_UP.items()}]
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


def test_draws_of_all_blocks_are_joined_and_cut_to_their_number(monkeypatch):
    """Nine draws of two kinds of networks of two heads, five each, in blocks of three."""
    (case, other), drawn = CASES, []
    values = np.arange(12.0).reshape(2, 3, 2)

    def measure(function, cases, *, keys, **options):
        assert keys.shape == (2, 3)
        ((name, floats),) = cases.items()
        drawn.append((name, floats, keys))
        sign = 1 if name == case.name else -1
        return {name: {"gamma": sign * values, "excess": values[..., 0]}}

    monkeypatch.setattr(check_bounds, "BLOCK", 3)
    monkeypatch.setattr(check_bounds, "two_heads", lambda width: width)
    options = SimpleNamespace(num_draws=9, cases=["a", "b"], seed=7, sizes=[4, 2])
    replace_executor(monkeypatch, check_bounds, options, None, "3 draws each", 4, measure=measure)
    results = check_bounds.measure(options, {1: case, 3: other}, None)
    assert results["built"] == [2, 4]
    draws = results["draws"][case]
    np.testing.assert_array_equal(draws["gamma"], np.arange(10.0).reshape(5, 2))
    np.testing.assert_array_equal(draws["excess"], np.arange(0.0, 10, 2))
    np.testing.assert_array_equal(results["draws"][other]["gamma"], -draws["gamma"])
    case_keys = jax.random.split(jax.random.key(7), len(check_bounds.CASES))
    for (name, floats, keys), one, place in zip(drawn, CASES, (1, 3), strict=True):
        assert (name, floats) == (one.name, None)
        assert (keys.ravel() == jax.random.split(case_keys[place], 6)).all()


def test_each_statement_has_the_violations_of_its_own_bound():
    draws = {name: np.array(values)[None] for name, values in MADE_UP.items()}
    built = [{"width": 4, "over_published": 1.5, "over_first": 0.5, "over_sums": 0.25}]
    without = draws | {"lemma_excess": np.zeros((1, 3))}
    results = {"draws": {CASES[0]: draws, CASES[1]: without}, "built": built}
    lemma, head, layer, stack = check_bounds.judge_claims(results)
    assert [row.estimate for row in (lemma, head, layer, stack)] == [1, 2, None, 2]
    notes = ["of 4 cases", "of 4 cases", "its condition held in no case", "of 2 cases"]
    assert [row.note for row in (lemma, head, layer, stack)] == notes
    assert [row.num_made for row in (lemma, head, layer, stack)] == [2] * 4
    comparisons = list(check_bounds.compare_results(results))
    violations = {"stack": 2, "mean_head": 2}
    assert [c.measured for c in comparisons[: len(FREE)]] == [violations.get(n, 0) for n in FREE]
    assert comparisons[0].note.startswith("derived here; of 2 cases, no number in 2: ")
    construction = comparisons[len(FREE)]
    assert (construction.measured, construction.published) == (1.5, "at most 1")
    assert construction.note.startswith("with γ = 1 0.5, ") and construction.note.endswith(" 0.25")
    assert [c.measured for c in comparisons[len(FREE) + 1 :]] == [-1, 1, 0, 0, 0.25, 0.5]


def test_a_bound_that_is_claimed_nowhere_has_no_line():
    """Blue squares are the paper's bounds, red dots ours; γ is that of admissible heads."""
    draws = {name: np.array(values)[None] for name, values in MADE_UP.items()}
    fig = check_bounds.tightness_figure({"draws": {CASES[0]: draws}})
    ax, heads = fig.axes
    labels = [text.get_text().partition(":")[0] for text in ax.get_yticklabels()]
    claimed = [
        name for name in check_bounds.LEAST if name not in ("published_layer", "diameter_layer")
    ]
    assert labels == [check_bounds.BOUNDED[name].partition(":")[0] for name in claimed]
    bars, middles = ax.lines[:-1:2], ax.lines[1:-1:2]
    is_ours = [name in FREE for name in claimed]
    assert [line.get_marker() for line in middles] == ["o" if ours else "s" for ours in is_ours]
    assert len({(ours, line.get_color()) for ours, line in zip(is_ours, bars, strict=True)}) == 2
    assert [float(line.get_xdata()[0]) for line in middles][:2] == [0, -0.5]
    assert [float(line.get_ydata()[0]) for line in middles] == [*range(len(claimed))]
    assert bars[0].get_xdata() == pytest.approx([-0.9, 0.9])
    assert sum(patch.get_height() for patch in heads.patches) == 2
    nowhere = {
        name: values & False if name.endswith("_ok") else values * np.nan
        for name, values in draws.items()
    }
    assert check_bounds.tightness_figure({"draws": {CASES[1]: nowhere}}) is None
