"""Panels by place, curves by panel, and bands of logarithms."""

import numpy as np

from rank_collapse.report import figures


def test_panels_lie_where_their_places_say():
    _, axes, own = figures.grid([("b", 2), ("a", 2), ("b", 1)])
    assert axes.shape == (2, 2)
    assert own == [axes[0, 0], axes[1, 0], axes[0, 1]]  # as they come first, not sorted


def test_a_curve_for_each_label():
    values = np.array([[1.0, 2.0, 4.0], [3.0, 4.0, np.nan]])
    groups = {"left": {"x": values}, "right": {"x": values, "y": 2 * values}}
    _, axes = figures.curves(groups, first=1, ylabel="size", style=lambda i, n: {"lw": 1 + i + n})
    assert [ax.get_title() for ax in axes.flat] == ["left", "right"]
    (line, other) = axes[0, 1].lines
    np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3])
    np.testing.assert_array_equal(other.get_ydata(), [4, 6, 8])  # of those that are known
    assert other.get_linewidth() == 4 and axes[0, 0].get_ylabel() == "size"


def test_a_band_of_logarithms_has_a_gap_where_a_seed_has_none():
    _, axes = figures.figure()
    figures.log_band(axes[0, 0], np.arange(3), np.array([[1.0, 4.0, 0.0], [4.0, 9.0, 2.0]]))
    (line,) = axes[0, 0].lines
    np.testing.assert_allclose(line.get_ydata(), [2, 6, np.nan])
