"""Where panels of experiments' figures lie."""

import numpy as np
from matplotlib.colors import to_hex

from experiments.lab import plots
from rank_collapse.report import figures
from rank_collapse.report.intervals import Interval
from tests.support.closeness import assert_close
from tests.support.shown_figures import edges_of, new_axes


def test_panels_lie_where_their_places_say():
    _, axes, panels = plots.place_grid([("b", 2), ("a", 2), ("b", 1)], sharey=True)
    assert axes.shape == (2, 2) and axes[0, 0].get_shared_y_axes().joined(*axes[:, 1])
    assert panels == [axes[0, 0], axes[1, 0], axes[0, 1]]  # as they come first, not sorted


def test_only_outer_axes_have_labels():
    _, axes, _ = plots.place_grid([("b", 2), ("a", 2), ("b", 1)])
    plots.outer_labels(axes, "layer", "loss")
    labels = [[(ax.get_xlabel(), ax.get_ylabel()) for ax in row] for row in axes]
    assert labels == [[("", "loss"), ("", "")], [("layer", "loss"), ("layer", "")]]
    _, axes, _ = plots.place_grid([("b", 2)])
    plots.outer_labels(axes, "layer")
    assert axes[0, 0].get_ylabel() == ""


def test_a_point_has_the_ends_of_its_interval():
    ax = new_axes()
    plots.draw_interval(ax, 2.0, 0.5, Interval(0.125, 0.75), "post", 1)
    plots.draw_interval(ax, 3.0, 0.5, Interval(), index=2)
    plots.draw_interval(ax, 4.0, 0.5, Interval(0.6, 0.4))  # the mean is no end of it
    (first, second, third) = ax.containers
    (segment,) = first.lines[2][0].get_segments()
    assert_close(segment, [[2, 0.125], [2, 0.75]])
    assert first.get_label() == "Post-LN" and not second.lines[2]
    assert_close(third.lines[2][0].get_segments()[0], [[4, 0.5], [4, 0.5]])
    points = [c.lines[0] for c in ax.containers]
    assert [p.get_xydata().tolist() for p in points] == [[[x, 0.5]] for x in (2, 3, 4)]
    assert [p.get_marker() for p in points] == [figures.MARKERS[i] for i in (1, 2, 0)]
    assert points[0].get_color() == figures.color(1)


def test_a_band_holds_the_middle_half():
    ax, values = new_axes(), np.random.default_rng(2).lognormal(size=(9, 3))
    plots.quartiles(ax, np.array([1, 2, 4]), values, "san", 2, lw=3)
    ordered = np.sort(values, axis=0)
    (line,) = ax.lines
    assert_close(line.get_xydata(), np.stack([[1, 2, 4], ordered[4]], axis=1))
    assert (line.get_label(), line.get_linewidth()) == ("attention alone", 3)
    assert line.get_color() == figures.color(2)
    assert to_hex(ax.collections[0].get_facecolor()[0]) == to_hex(figures.color(2))
    plots.quartiles(ax, np.array([1, 2, 4]), values, index=1, color="#123456")
    assert to_hex(ax.collections[1].get_facecolor()[0]) == ax.lines[1].get_color() == "#123456"
    ax.collections[1].remove()
    for place, x in enumerate((1, 2, 4)):
        assert_close(edges_of(ax)[x], (ordered[2, place], ordered[6, place]))
