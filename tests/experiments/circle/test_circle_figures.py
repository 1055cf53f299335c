"""Figures of run_circle: which seeds they show, and how they name the networks."""

import numpy as np

from experiments.circle import circle_figures


def test_steps_are_those_of_seeds_that_collapsed_as_predicted():
    case = {
        "predicted_steps": np.array([3.0, 4.0, np.nan, 0.2, 5.0]),
        "measured_steps": np.array([3.5, 4.5, 5.0, 1.0, np.nan]),
        "fell": np.array([True, False, True, True, True]),
    }
    none = case | {"fell": np.zeros(5, bool)}
    points = circle_figures.select_steps({("base", 32): case, ("mlp", 32): none})
    assert list(points) == [("base", 32)]
    np.testing.assert_array_equal(points["base", 32], [[3.0], [3.5]])


def test_networks_in_words():
    names = [circle_figures.describe_network(name, 64) for name in ("base", "attention+skip+mlp")]
    assert names == ["published network, width 64", "attention and skip and MLP, width 64"]
