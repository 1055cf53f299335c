"""Panels of run_theorems have one quantity."""

import numpy as np
import pytest

from experiments import run_theorems
from experiments.theorems.drawing import plot_theorem
from experiments.theorems.outcomes import Curve, Panel

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
    points = [line for line in first.lines if line.get_marker() not in ("None", "_")]
    assert [list(line.get_ydata()) for line in points] == [[0.1, 0.2, 0.5], [0.3]]
    styles = [line.get_linestyle() for line in first.lines if line not in points]
    assert styles == ["-", "None", "--"]  # the bound at one point is a mark there
    assert [line.get_ydata()[0] for line in first.lines if line.get_marker() == "_"] == [0.9]
    (alone,) = plot_theorem(theorem._replace(panels=panels[:1]), curves[1:2]).axes
    assert [line.get_linestyle() for line in alone.lines] == ["None", "--"]  # across the panel
    assert [label.get_text() for label in first.get_xticklabels()] == ["1", "2", "4"]
    assert [label.get_text() for label in second.get_xticklabels()] == ["none", "causal"]
    assert len(second.lines) == 1 and second.get_ylabel() == "factor"


def test_a_bound_is_a_mark_beside_a_line_that_begins_later():
    """A prediction that lacks its first number is a line as well; one without any is none."""
    theorem = run_theorems.THEOREMS["masks"]._replace(panels=(Panel("n", "cosine"),))
    bound = Curve("bound", [2], 0.9, [0.3], "≤")
    for predicted, style in (([np.nan, 0.2], "None"), ([np.nan, np.nan], "--")):
        other = Curve("other", [1, 2], predicted, [0.1, 0.2], "none")
        (ax,) = plot_theorem(theorem, [other, bound]).axes
        assert ax.lines[-1].get_linestyle() == style
        assert ax.lines[-1].get_ydata()[0] == 0.9


@pytest.mark.parametrize(
    ("places", "are_whole"), [((0, 2, 4), True), ((0, 0.25, 1), False), ((0.5, 1.5), False)]
)
def test_ticks_are_whole_where_all_places_are(places, are_whole):
    theorem = run_theorems.THEOREMS["masks"]._replace(panels=(Panel("time", "cosine"),))
    (ax,) = plot_theorem(theorem, [Curve("flow", places, places, places)]).axes
    ax.figure.canvas.draw()
    ticks = ax.get_xticks()
    assert all(tick == round(tick) for tick in ticks) is are_whole


@pytest.mark.parametrize(("count", "are_named"), [(8, True), (9, False)])
def test_few_places_of_a_logarithmic_axis_are_named(count, are_named):
    x = np.arange(2, 2 + count)
    theorem = run_theorems.THEOREMS["masks"]._replace(panels=(Panel("n", "cosine", "x"),))
    (ax,) = plot_theorem(theorem, [Curve("flow", x, x, x)]).axes
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert (labels == [f"{place}" for place in x]) is are_named
    assert (len(ax.xaxis.get_minorticklocs()) == 0) is are_named
