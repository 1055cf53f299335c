"""The thresholds that a run passes, its picture, and panels, curves and bands of figures."""

import numpy as np
import pytest

from rank_collapse.measures.table import COLLAPSE
from rank_collapse.report.alarms import Threshold, find_alarms
from rank_collapse.report.metrics import by_step, metrics_figure

ROWS = [
    {"step": 2, "seed": 1, "loss": 1.0, "residual_ratio": np.array([0.5, 0.001, 0.3])},
    {"step": 1, "seed": 1, "loss": 2.0, "residual_ratio": np.array([0.5, 0.2, 0.3])},
    {"step": 3, "seed": 1, "loss": np.nan, "residual_ratio": np.array([0.1, 1e-5, 1e-9])},
    {"step": 3, "seed": 0, "loss": 0.1, "token_cosine": np.nan},
]


def test_the_first_step_and_the_worst_layer_are_named():
    alarm, lost = find_alarms(ROWS, COLLAPSE)
    assert (alarm.step, alarm.layer, alarm.seed, alarm.value) == (2, 1, 1, 0.001)
    text = "step 2: residual_ratio 0.001 below 0.01 at layer 1 of seed 1 (rank collapse)"
    assert str(alarm) == text
    assert str(lost) == "step 3: loss nan is not finite of seed 1 (divergence)"
    spiked = {**ROWS[0], "spiked": np.array([0.0, 0.75, 0.0])}
    other = {**ROWS[0], "spiked": np.array([1.0, 0.25, 1.0])}  # of another layer
    assert str(find_alarms([spiked], COLLAPSE)[0]) == text[:-1] + ", of one token)"
    assert str(find_alarms([other], COLLAPSE)[0]) == text


# a metric, a value that is an alarm, one that is none, what the alarm means
BOUNDS = [
    ("residual_ratio", 0.0099, 0.01, "rank collapse"),
    ("token_cosine", np.cos(np.radians(7.9)), 0.99, "rank collapse"),
    ("attention_entropy", 0.0499, 0.05, "entropy collapse"),
    ("attention_entropy_least", 0.0499, 0.05, "entropy collapse of a head"),
    ("batch_residual_ratio", 0.00099, 0.001, "collapse over the batch"),
    ("loss", np.inf, 1e300, "divergence"),
    ("loss", np.nan, 0.0, "divergence"),
    ("loss", -np.inf, -1e300, "divergence"),
]


@pytest.mark.parametrize(("name", "bad", "good", "meaning"), BOUNDS)
def test_a_run_is_watched_for_each_kind_of_collapse(name, bad, good, meaning):
    for metric in (name, f"decoder.{name}"):
        (alarm,) = find_alarms([{"step": 7, metric: bad}, {"step": 3, metric: good}], COLLAPSE)
        assert (alarm.step, alarm.metric, alarm.layer, alarm.seed) == (7, metric, None, None)
        side = "is not finite" if name == "loss" else ("above" if bad > good else "below")
        assert str(alarm).startswith(f"step 7: {metric} {bad:.3g} {side} ")
        assert str(alarm).endswith(f"({meaning})")
    assert {t.name for t in COLLAPSE} == {bound[0] for bound in BOUNDS}


def test_alarms_come_by_step_and_say_what_was_passed():
    bounds = [Threshold("a", 2.0, above=True), Threshold("b", 0.125, meaning="low")]
    rows = [
        {"step": 5, "a": np.array([1.0, 4.0, 3.0])},
        {"step": 4, "seed": 2, "b": 0.0625, "a": [2.0, np.nan]},
        {"step": 6, "seed": 2, "a": 9.0, "b": 0.0},
    ]
    assert [*map(str, find_alarms(rows, bounds))] == [
        "step 4: b 0.0625 below 0.125 of seed 2 (low)",
        "step 5: a 4 above 2 at layer 1",
        "step 6: a 9 above 2 of seed 2",
    ]


def test_a_ratio_is_of_one_token_in_most_examples_of_its_own_part():
    low = {"step": 1, "encoder.residual_ratio": 1e-3, "spiked": 1.0}
    for shares in ({}, {"encoder.spiked": 0.5}):
        (alarm,) = find_alarms([low | shares], COLLAPSE)
        assert not alarm.spiked
    for share in (0.51, np.array([0.51])):
        (alarm,) = find_alarms([low | {"encoder.spiked": share}], COLLAPSE)
        assert alarm.spiked and str(alarm).endswith("(rank collapse, of one token)")
    by_layer = {"step": 1, "residual_ratio": [1e-3, 1e-4], "spiked": 1.0}  # a share of one layer
    (alarm,) = find_alarms([by_layer], COLLAPSE)
    assert alarm.layer == 1 and not alarm.spiked
    no_meaning = find_alarms([low], [Threshold("encoder.residual_ratio", 0.01)])[0]
    assert str(no_meaning) == "step 1: encoder.residual_ratio 0.001 below 0.01"


def test_nothing_there_passes_nothing():
    assert find_alarms([], [Threshold("loss", 1.0)]) == []
    assert find_alarms([{"step": 1, "loss": np.nan}], [Threshold("loss", 1.0)]) == []
    for bound, count in ((1.0, 1), (np.inf, 0)):  # infinity is a value
        alarms = find_alarms([{"step": 1, "loss": np.inf}], [Threshold("loss", bound, above=True)])
        assert len(alarms) == count
    assert (
        find_alarms([{"step": 1, "residual_ratio": np.array([0.5])}], COLLAPSE) == []
    )  # there is no loss


def test_tokens_that_are_equal_but_for_a_few_are_an_alarm():
    """The long token holds the ratio; the bulk is below the threshold, in its worst layer."""
    row = {"step": 4, "residual_ratio": [0.9, 1.3, 1.2], "bulk_ratio": [0.8, 0.005, 0.002]}
    (alarm,) = find_alarms([row], COLLAPSE)
    assert str(alarm).startswith(
        "step 4: residual_ratio 0.002 below 0.01 at layer 2 (rank collapse"
    )
    assert str(alarm).endswith("of all tokens but a few)")
    assert find_alarms([row | {"bulk_ratio": [0.8, 0.7, 0.7]}], COLLAPSE) == []
    part = {
        "step": 4,
        "encoder.residual_ratio": 1.3,
        "encoder.bulk_ratio": 0.001,
        "bulk_ratio": 1.0,
    }
    (alarm,) = find_alarms([part], COLLAPSE)
    assert alarm.uses_bulk and alarm.metric == "encoder.residual_ratio"
    (alarm,) = find_alarms([{"step": 4, "residual_ratio": 0.001, "bulk_ratio": 0.0009}], COLLAPSE)
    assert not alarm.uses_bulk and alarm.value == 0.001


@pytest.mark.parametrize(("ratio", "bulk"), [(0.5, [0.001]), ([0.5, 0.4, 0.3], [0.001, 0.001])])
def test_a_bulk_of_other_layers_decides_nothing(ratio, bulk):
    assert find_alarms([{"step": 1, "residual_ratio": ratio, "bulk_ratio": bulk}], COLLAPSE) == []


def test_a_part_of_a_network_has_the_thresholds_of_the_whole_or_its_own():
    rows = [{"step": 1, "encoder.residual_ratio": 1e-3, "decoder.residual_ratio": 1e-3}]
    alarms = find_alarms(rows, COLLAPSE)
    assert [a.metric for a in alarms] == ["encoder.residual_ratio", "decoder.residual_ratio"]
    assert str(alarms[1]).startswith("step 1: decoder.residual_ratio 0.001 below 0.01")
    thresholds = [Threshold("residual_ratio", 0.01), Threshold("encoder.residual_ratio", 1e-5)]
    assert [a.metric for a in find_alarms(rows, thresholds)] == ["decoder.residual_ratio"]


def test_by_step_leaves_gaps_where_a_seed_has_none():
    steps, values = by_step(ROWS, "residual_ratio")
    assert steps.tolist() == [1, 2, 3] and values.shape == (1, 3, 3)
    steps, values = by_step(ROWS, "loss")
    np.testing.assert_array_equal(values[..., 0], [[np.nan, np.nan, 0.1], [2.0, 1.0, np.nan]])


def test_the_figure_has_a_panel_each_with_its_threshold():
    fig = metrics_figure(ROWS, [Threshold("residual_ratio", 0.01)])
    panels = [ax for ax in fig.axes if ax.get_visible()]
    assert [ax.get_title() for ax in panels] == ["residual ratio", "loss", "token cosine"]
    ratio = panels[0]
    assert ratio.get_yscale() == "log" and len(ratio.lines) == 3 + 1


def test_the_first_alarms_are_those_of_a_loop_over_all_rows():
    """The loop goes row by row and threshold by threshold, on values of every kind."""
    rng = np.random.default_rng(0)
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0, 2.0, 3.0])
    rows = [
        {"step": step, "seed": seed, "a": rng.choice(odd, size=3), "b": float(rng.choice(odd))}
        for step in rng.permutation(20).tolist()
        for seed in range(20)
    ]
    thresholds = [
        Threshold("a", 0.5),
        Threshold("b", 2.0, above=True),
        Threshold("b", 0.0),
        Threshold("a", np.inf, above=True, finite=True),
        Threshold("b", 1.5, above=True, finite=True),
    ]

    def worst(values, threshold):
        finite = [v for v in values if np.isfinite(v)]
        if threshold.finite and len(finite) < len(values):
            return next(v for v in values if not np.isfinite(v))
        sign = 1 if threshold.above else -1
        passed = [v for v in values if sign * v > sign * threshold.value]
        return (max if threshold.above else min)(passed) if passed else None

    expected = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        for threshold in thresholds:
            value = worst(np.atleast_1d(row[threshold.name]), threshold)
            if value is not None:
                expected.setdefault((threshold, row["seed"]), (row["step"], value))
    alarms = {(a.threshold, a.seed): (a.step, a.value) for a in find_alarms(rows, thresholds)}
    assert alarms.keys() == expected.keys() and len(alarms) > 50
    np.testing.assert_array_equal([alarms[k] for k in expected], list(expected.values()))
