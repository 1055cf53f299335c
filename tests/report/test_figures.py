"""What figures show: curves, bands, colours, panels, axes; nothing is laid out."""

import matplotlib
import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from rank_collapse.report import figures
from rank_collapse.report.metrics import metrics_figure
from tests.support.closeness import assert_close
from tests.support.shown_figures import edges_of, new_axes, titles


def test_a_figure_has_the_size_of_its_panels():
    fig, axes = figures.figure(2, 3, width=2.0, height=1.5, sharey=True)
    assert axes.shape == (2, 3) and tuple(fig.get_size_inches()) == (6, 3)
    assert axes[0, 0].get_shared_y_axes().joined(axes[0, 0], axes[1, 2])
    spines = axes[1, 1].spines
    assert [s.get_visible() for s in (spines["top"], spines["right"], spines["left"])] == [0, 0, 1]
    fig, _ = figures.panels(2, 3, width=1.0, height=0.5)
    assert tuple(fig.get_size_inches()) == (2, 0.5)


def test_what_is_styled_draws_in_this_style_and_leaves_the_readers():
    before = matplotlib.rcParams["legend.frameon"]
    styled = figures.styled(lambda name, more=0: matplotlib.rcParams[name] + more)
    assert styled("font.size", more=1) == 10 and not styled("legend.frameon")
    assert matplotlib.rcParams["legend.frameon"] == before


def test_panels_fill_rows_and_those_beyond_are_hidden():
    for count, columns, shape in ((1, 3, (1, 1)), (3, 3, (1, 3)), (4, 3, (2, 3)), (5, 2, (3, 2))):
        _, axes = figures.panels(count, columns)
        assert axes.shape == shape
        assert [ax.get_visible() for ax in axes.flat] == [i < count for i in range(axes.size)]


def test_colours_begin_again_and_shades_go_from_dark_to_light():
    count = len(figures.COLORS)
    assert figures.color(count + 2) == figures.COLORS[2] != figures.color(count - 1)
    dark, _, light = figures.shades(3)
    assert sum(dark[:3]) < sum(light[:3])
    assert dark == colormaps["viridis"](0.0) and light == colormaps["viridis"](0.85)


def test_a_band_is_one_deviation_of_the_seeds_and_absent_of_one_seed():
    ax = new_axes()
    figures.band(ax, [1, 2], [[1.0, 2.0], [3.0, 6.0]], "admin", 9)
    assert edges_of(ax) == {1: (1, 3), 2: (2, 6)}
    (line,) = ax.lines
    assert line.get_label() == "Admin" and line.get_color() == figures.COLORS[1]
    assert line.get_marker() == figures.MARKERS[1]
    assert to_hex(ax.collections[0].get_facecolor()[0]) == figures.COLORS[1].lower()
    one = new_axes()
    figures.band(one, [1, 2], [[1.0, 2.0]], color="red")
    assert not one.collections and one.lines[0].get_color() == "red"


@pytest.mark.parametrize("draw", [figures.band, figures.log_band])
def test_a_line_marks_the_points_that_it_does_not_show(draw):
    ax = new_axes()
    values = np.array([[1.0, np.nan, 2.0, 3.0, np.nan, 4.0]])
    draw(ax, range(6), values, marker="")
    draw(ax, range(6), values)
    draw(ax, [1], values[:, :1], marker="")
    draw(ax, [1, 2], values[:, 2:4], marker="")
    marks = [(line.get_marker(), line.get_markevery()) for line in ax.lines]
    assert marks == [("o", [0, 5]), (figures.MARKERS[0], None), ("o", [0]), ("", None)]


def test_a_band_of_logarithms_is_a_factor_above_and_below():
    ax = new_axes()
    figures.log_band(ax, [1], np.array([[1.0], [16.0]]), "admin", 2, linestyle=":")
    factor = np.exp(np.std(np.log([1.0, 16.0])))
    assert_close(edges_of(ax)[1], [4 / factor, 4 * factor])
    (line,) = ax.lines
    assert_close(line.get_ydata(), [4])
    assert (line.get_label(), line.get_linestyle()) == ("Admin", ":")
    assert line.get_color() == figures.COLORS[2] and line.get_marker() == figures.MARKERS[2]
    face = ax.collections[0].get_facecolor()[0]
    assert to_hex(face) == figures.COLORS[2].lower() and face[3] == pytest.approx(0.2)


def test_a_legend_lies_below_the_axes():
    ax = new_axes()
    ax.plot([0, 1], label="a")
    figures.finish_axes([ax], "layer")
    anchor, legend = ax.get_legend().get_bbox_to_anchor(), ax.get_legend()
    points = (ax.bbox.y0 - anchor.y0) * 72 / ax.figure.dpi
    assert points == pytest.approx(32) and ax.get_xlabel() == "layer"
    assert anchor.x0 == pytest.approx((ax.bbox.x0 + ax.bbox.x1) / 2)
    assert legend.get_texts()[0].get_text() == "a"
    ax.figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert box.y1 <= ax.xaxis.get_tightbbox().y0 and box.height > 0
    unnamed = new_axes()
    unnamed.plot([0, 1])
    figures.finish_axes([unnamed], "layer")
    assert unnamed.get_legend() is None


@pytest.mark.parametrize(
    ("layers", "labels"), [(1, []), (2, [0, 1]), (8, [*range(8)]), (12, [0, 2, 3, 5, 6, 8, 9, 11])]
)
def test_at_most_eight_layers_are_drawn_the_first_and_the_last_among_them(layers, labels):
    rows = [{"step": 0, "a": np.arange(layers, dtype=float)}, {"step": 0, "loss": 1.0}]
    fig = metrics_figure(rows)
    assert titles(fig) == ["loss", "a"]
    values = [line.get_ydata()[0] for line in fig.axes[1].lines]
    assert values == (labels or [0])
    colors = [line.get_color() for line in fig.axes[1].lines]
    assert colors == figures.shades(len(colors))
    legend = [t.get_text() for one in fig.legends for t in one.get_texts()]
    assert legend == [f"layer {i}" for i in labels]


def test_a_band_is_of_the_values_that_are_known():
    values = np.array([[1.0, 2.0, 4.0], [3.0, 4.0, np.nan]])
    _, axes = figures.figure()
    figures.band(axes[0, 0], [1, 2, 3], 2 * values, "y", 1, lw=4)
    (line,) = axes[0, 0].lines
    np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3])
    np.testing.assert_array_equal(line.get_ydata(), [4, 6, 8])
    assert line.get_linewidth() == 4


def test_a_band_of_logarithms_has_a_gap_where_a_seed_has_none():
    _, axes = figures.figure()
    figures.log_band(axes[0, 0], np.arange(3), np.array([[1.0, 4.0, 0.0], [4.0, 9.0, 2.0]]))
    (line,) = axes[0, 0].lines
    assert_close(line.get_ydata(), [2, 6, np.nan])


def test_layers_are_whole_numbers_on_every_panel():
    axes = Figure().subplots(1, 2)
    for ax in axes:
        ax.plot([0, 1], [0, 1], label="a curve")
    figures.finish_axes(list(axes), "layer")
    for ax in axes:
        assert all(tick == round(tick) for tick in ax.get_xticks())
        assert any(tick != round(tick) for tick in ax.get_yticks())
        figures.integer_ticks(ax, vertical=True)
        assert all(tick == round(tick) for tick in ax.get_yticks())
