"""Figures of run_circle: which seeds they show, and how they name the networks."""

import itertools

import numpy as np
import pytest

from experiments.circle import circle_figures
from experiments.run_circle import COMPARED
from tests.support.closeness import assert_close
from tests.support.figures_as_data import describe


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


def make_walks(seed, num_seeds=4, num_steps=5):
    """Draws walks of a case: the last seed diverged, and every second one of the others falls."""
    rng = np.random.default_rng(seed)
    distances = np.geomspace(0.5, rng.uniform(0.1, 0.4, num_seeds), num_steps).T
    distances[::2] = np.geomspace(0.6, 1e-7, num_steps)
    return {
        "trajectory": rng.uniform(-0.4, 0.4, (num_seeds, num_steps, 2, 2)),
        "distance": distances,
        "log10_distance": np.log10(distances),
        "error": rng.uniform(0, 0.1, num_seeds),
        "head_gap": rng.normal(size=(num_seeds, num_steps, 2, 2)),
        "jacobian_across": rng.uniform(0.1, 0.6, (num_seeds, 1, 1)) * np.eye(2),
        "equal_points_moved": np.zeros(num_seeds),
        "diverged_at": np.where(np.arange(num_seeds) == num_seeds - 1, 2, -1),
    }


@pytest.mark.parametrize("draw", ["trajectories_figure", "distance_figure"])
def test_titles_of_neighbouring_panels_do_not_overlap(draw):
    """The names of all variants that are compared, with the largest width and most seeds."""
    names = [f"{variant}, d=128" for variant in COMPARED["all"]]
    results = {name: make_walks(i, 129) for i, name in enumerate(names)}
    fig = getattr(circle_figures, draw)(results)
    fig.canvas.draw()
    extents = [ax.title.get_window_extent() for ax in fig.axes]
    assert len(extents) == len(names) == 7
    for left, right in itertools.pairwise(extents):
        assert left.x1 + 3 < right.x0


def test_a_panel_names_the_first_seed_that_fell_of_those_that_did_not_diverge():
    case = make_walks(0)
    case["diverged_at"] = np.array([2, -1, -1, -1])
    (ax,) = circle_figures.trajectories_figure({"base, d=32": case}).axes
    assert ax.get_title().endswith("\nseed 2; 1 of 3 fell")
    assert_close(ax.lines[1].get_xydata(), case["trajectory"][2, :, 0])


def test_golden_figures_of_several_variants_and_widths(golden):
    """Some variants have one width alone, and the cases are in the order of neither."""
    names = ("mlp, d=64", "base, d=32", "attention, d=6", "base, d=64", "mlp, d=32")
    results = {name: make_walks(i, 4 + i) for i, name in enumerate(names)}
    drawn = {
        "shares": circle_figures.shares_figure(results),
        "steps": circle_figures.steps_figure(results),
        "trajectories": circle_figures.trajectories_figure(results),
        "distance": circle_figures.distance_figure(results),
    }
    text = "".join(f"== {name}\n{describe(figure)}" for name, figure in drawn.items())
    golden("circle_figures.txt", text)
