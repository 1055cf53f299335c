"""The verdicts of the trained experiments, which their own table may contradict."""

import pytest

from experiments.trained.entry import compare


@pytest.mark.parametrize(
    ("accuracies", "agrees"),
    [([0.3, 0.9, 0.4], True), ([0.59, 0.60, 0.5], False), ([0.3, 0.4, 0.5, 0.9], False)],
)
def test_a_short_length_that_guesses_carries_nothing(accuracies, agrees):
    lengths = list(range(len(accuracies)))
    spread = [0.01] * len(accuracies)
    found = {
        "metric": "accuracy",
        "whole": {"accuracy": {"mean": 0.95}},
        "baselines": {"majority": {"mean": 0.6}, "random": {"mean": 0.5}},
        "published": {"whole": 0.9, "baseline": 0.54},
        "lengths": lengths,
        "sets": {"5": {"mean": accuracies, "std": spread}},
    }
    assert compare(found)[-1].agrees is agrees
