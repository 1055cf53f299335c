"""The verdicts of the trained experiments: each can be any of the three."""

import numpy as np
import pytest

from experiments.run_sort import EXPERIMENT
from experiments.shell import paper
from experiments.trained.paths import carried_length, enough, warnings_of

SEEDS = 4


def summary(carried=1.0, needed=1, short_less_long=0.5, sets=(0.3, 0.9, 0.4, 0.2), seeds=SEEDS):
    """Of a network of depth 3 with 2 heads, whose paths have a mean length of 2."""
    wobble = 0.01 * np.arange(seeds)
    over = {"mean": list(sets), "std": [0.0] * 4}
    return {
        "metric": "accuracy", "depth": 3, "heads": 2, "lengths": [0, 1, 2, 3],
        "paths_there_are": [1, 6, 12, 8],
        "whole": {"accuracy": {"mean": 0.95, "interval": [0.94, 0.96]}},
        "baselines": {"majority": {"mean": 0.6}, "random": {"mean": 0.5}},
        "published": {"whole": 0.9, "baseline": 0.54},
        "offset": {"mean": 0.7}, "exact": over, "truncated": over, "sets": {"20": over},
        "covariance": {"mean": [0.2, 0.5, 0.3, 0.0]}, "cancellation": {"mean": 1.5},
        "by_seed": {
            "carried_length": (carried + wobble).tolist(), "enough": [needed] * seeds,
            "short_less_long": [[short_less_long + w] * 4 for w in wobble],
            "whole": [0.95] * seeds, "baseline": [0.6] * seeds,
            "sets": {"20": [[a + w for a in sets] for w in wobble]},
        },
    }  # fmt: skip


def verdicts(found):
    names = {statement.text: name for name, statement in paper.PAPER.items()}
    return [(names[c.statement.split(" [")[0]], c.verdict) for c in EXPERIMENT.claims(found)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["supported"] * 5),
        (
            {"carried": 2.5, "needed": 3, "short_less_long": -0.5},
            ["contradicted"] * 3 + ["supported"] * 2,
        ),
        # the accuracy comes early but for a rest that long paths bring
        ({"needed": 3}, ["supported", "contradicted"] + ["supported"] * 3),
        ({"sets": (0.3, 0.65, 0.7, 0.8)}, ["supported"] * 3 + ["contradicted"] * 2),
        # falling, but no better than a guess: nothing is there that could fall
        ({"sets": (0.3, 0.5, 0.4, 0.3)}, ["supported"] * 3 + ["contradicted", "undecided"]),
        (
            {"carried": 1.99, "short_less_long": 0.16},
            ["undecided", "supported", "undecided"] + ["supported"] * 2,
        ),
        # more than the longest lengths, but little of what has been learned
        ({"short_less_long": 0.03}, ["supported"] * 2 + ["contradicted"] + ["supported"] * 2),
        ({"seeds": 2}, ["undecided"] * 5),
    ],
)
def test_verdicts(fields, expected):
    found = verdicts(summary(**fields))
    assert [v for _, v in found] == expected
    assert [n for n, _ in found] == ["short suffice"] * 3 + ["one short", "falls"]


def test_seeds_that_learned_nothing_are_left_out_and_counted():
    found = summary(seeds=5)
    found["by_seed"]["whole"][1] = found["by_seed"]["baseline"][1]
    shares = [c for c in EXPERIMENT.claims(found) if "as a share of what the whole" in c.statistic]
    assert [c.seeds for c in shares] == [4, 4]
    assert {c.why for c in shares} == {
        "1 of 5 seeds, no better than the best baseline, are left out"
    }
    assert not any("left out" in c.why for c in EXPERIMENT.claims(summary()))


def test_reading_and_table_say_what_no_path_gives():
    found = summary()
    assert "no path at all gives 0.700" in EXPERIMENT.reading(found)
    assert "cancel" not in EXPERIMENT.reading(found)
    rows = {c.quantity: c for c in EXPERIMENT.compare(found)}
    assert rows["token accuracy of the whole model"].measured == "0.950 (0.940 to 0.960)"
    best = rows["best length of sets of 20 sampled paths"]
    assert best.measured == 1 and "6 different paths" in best.note
    found["covariance"]["mean"], found["cancellation"]["mean"] = [-0.4, 1.2, 0.1, 0.1], 9.0
    assert len(warnings_of(found)) == 2 and "9.0 times" in EXPERIMENT.reading(found)
    # a share that may as well be 0 or 1 is no sign of cancelling
    found["covariance"]["interval"] = [[-0.9, 0.9, 0, 0], [0.1, 1.5, 0.2, 0.2]]
    assert len(warnings_of(found)) == 1


def test_the_length_at_which_the_accuracy_comes():
    def results(truncated, whole):
        return {
            "whole": {"accuracy": np.array([whole])}, "tokens": np.array([400.0]),
            "baselines": {"majority": np.array([0.5]), "random": np.array([0.4])},
            "truncated": {"accuracy": np.array([truncated])},
        }  # fmt: skip

    at_once = results([0.5, 0.9, 0.9, 0.9], 0.9)
    assert carried_length(at_once, "accuracy", 0) == pytest.approx(1)
    assert enough(at_once, "accuracy", 0) == 1
    spread = results([0.6, 0.7, 0.8, 0.9], 0.9)  # a quarter at each of 0, 1, 2, 3
    assert carried_length(spread, "accuracy", 0) == pytest.approx(1.5)
    assert enough(spread, "accuracy", 0) == 3
    assert enough(results([0.6, 0.88, 0.886, 0.9], 0.9), "accuracy", 0) == 2  # ± 0.015
    guessing = results([0.5, 0.5, 0.5, 0.52], 0.52)
    assert carried_length(guessing, "accuracy", 0) is enough(guessing, "accuracy", 0) is None
