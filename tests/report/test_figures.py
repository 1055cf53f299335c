"""What figures show: curves, bands, colours, panels, axes; nothing is laid out."""

import matplotlib
import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_hex

import rank_collapse as rc
from rank_collapse.measures.table import Threshold
from rank_collapse.report import figures, metrics
from rank_collapse.report.depth import PANELS, depth_figure
from rank_collapse.report.metrics import by_step, metrics_figure
from rank_collapse.report.path_lengths import path_length_figure, plot_length_laws
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


def profiled(**measures):
    """Returns the panels of a profile, by their label."""
    return {ax.get_ylabel(): ax for ax in rc.plot(measures).axes if ax.get_visible()}


def test_a_profile_is_logarithmic_where_it_spans_more_than_a_decade_and_none_is_below_0():
    axes = profiled(
        a=[1.0, 11.0], b_c=[1.0, 10.0], c=[-1.0, 1.0, 100.0], d=[0.0, 1.0, 11.0], e=[0.0, 1.0, 5.0]
    )
    scales = {name: ax.get_yscale() for name, ax in axes.items()}
    linear = dict.fromkeys(("b c", "c", "e"), "linear")
    assert scales == linear | dict.fromkeys("ad", "log")
    assert all(ax.get_xlabel() == "layer" for ax in axes.values())
    assert axes["a"].get_gridspec().get_geometry() == (2, 3)


def test_layers_are_shaded_where_rounding_decides_any_example():
    measures = {"residual_ratio": np.ones((3, 2)), "token_cosine": np.ones((3, 2))}
    rounding = np.array([[False, False], [False, True], [True, True]])
    for ax in rc.plot(rc.Profile(measures, rounding)).axes[:2]:
        spans = [patch.get_extents().transformed(ax.transData.inverted()) for patch in ax.patches]
        assert_close([[s.x0, s.x1] for s in spans], [[0.5, 1.5], [1.5, 2.5]])


def test_panels_of_one_profile_differ_in_colour_and_profiles_keep_theirs_in_every_panel():
    one = {"a": [1.0, 2.0], "b": [1.0, 2.0]}
    assert [ax.lines[0].get_color() for ax in rc.plot(one).axes] == [*figures.COLORS[:2]]
    for ax in rc.plot([one, one]).axes:
        assert [line.get_color() for line in ax.lines] == [*figures.COLORS[:2]]


LAW = np.array([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]])


def test_path_lengths_begin_at_0_and_the_needed_one_is_dashed():
    ax = new_axes()
    plot_length_laws(ax, {"norms": LAW, "losses": LAW[:1]}, 0)
    norms, losses, needed = ax.lines
    assert_close(norms.get_xydata(), [[0, 0.3], [1, 0.4], [2, 0.3]])
    assert_close(losses.get_ydata(), LAW[0])
    assert norms.get_color() != losses.get_color() and norms.get_label() == "norms"
    assert list(needed.get_xdata()) == [0, 0] and needed.get_linestyle() == "--"
    assert ax.get_ylim()[0] == 0 and ax.get_xlabel() == "path length: number of heads"
    assert [t.get_text() for t in ax.get_legend().get_texts()][-1] == "the loss needs"
    assert len(path_length_figure({"norms": LAW}).axes[0].lines) == 1


def test_a_depth_report_has_a_panel_each_the_last_layer_at_the_right():
    depth, rng = 2, np.random.default_rng(0)
    of_states = {"residual_ratio", "spike_share", "loss_up_to", "lens_kl", "frozen_kl"}
    names = {name for curves, _, _ in PANELS.values() for name in curves} - {"mlp_cosine"}
    measures = {n: rng.uniform(0.1, 1, (3, depth + (n in of_states))) for n in names}
    later = np.zeros((3, depth, depth))
    later[:, 0, 1] = 1, 2, 6
    fig = depth_figure(measures | {"later": later}, {"norms": LAW}, 2)
    axes = dict(zip(PANELS, fig.axes, strict=False))
    for title, (curves, ylabel, logarithmic) in PANELS.items():
        ax, shown = axes[title], [name for name in curves if name in measures]
        assert (ax.get_title(), ax.get_ylabel()) == (title, ylabel)
        assert ax.get_yscale() == ("log" if logarithmic else "linear")
        for line, name in zip(ax.lines, shown, strict=True):
            assert line.get_label() == curves[name]
            first = 0 if name in of_states else 1
            np.testing.assert_array_equal(line.get_xdata(), range(first, depth + 1))
            assert_close(line.get_ydata(), measures[name].mean(axis=0))
    assert axes["loss"].get_xlabel() == "layer, or path length k"
    assert axes["attention"].get_xlabel() == "layer"
    assert sum(ax.get_visible() for ax in fig.axes) == len(PANELS) + 2 + 1  # and the colour bar
    mesh = fig.axes[len(PANELS)]
    shown = mesh.collections[0].get_array()
    assert shown[0, 1] == 3 and np.ma.getmaskarray(shown).sum() == 3
    assert_close(mesh.collections[0].get_coordinates()[0, :, 0], [0.5, 1.5, 2.5])
    assert mesh.yaxis_inverted() and mesh.get_ylabel() == "layer that is left out"
    assert list(fig.axes[len(PANELS) + 1].lines[-1].get_xdata()) == [2, 2]


def rows_of(name, values, seed=0):
    return [{"step": i, "seed": seed, name: v} for i, v in enumerate(values)]


def test_a_metric_is_the_mean_of_its_seeds_and_their_range():
    rows = rows_of("a", [1.0, 2.0]) + rows_of("a", [3.0, np.nan], seed=1) + rows_of("b", [1.0, 2.0])
    first, second = metrics_figure(rows).axes
    np.testing.assert_array_equal(first.lines[0].get_xydata(), [[0, 2], [1, 2]])
    assert edges_of(first) == {0: (1, 3), 1: (2, 2)}
    assert not second.collections and first.get_xlabel() == "step"
    rows += rows_of("a", [1.0, 2.0, 3.0])
    steps, values = by_step(rows, "b")  # of which the second seed and the last step have none
    assert values.shape == (1, 2, 1) and steps.tolist() == [0, 1]
    _, values = by_step(rows_of("a", [1.0, np.array([2.0, 3.0])]), "a")
    np.testing.assert_array_equal(values, [[[1, np.nan], [2, 3]]])
    _, values = by_step(rows_of("a", [40.0], seed=40) + rows_of("a", [3.0], seed=3), "a")
    assert values.ravel().tolist() == [3, 40]


def test_a_metric_is_logarithmic_above_two_decades_where_all_is_above_0():
    values = {"a": [1.0, 101.0], "b": [1.0, 99.0], "c": [0.0, 101.0], "d": [1.0, np.inf, 2.0]}
    rows = [row for name, column in values.items() for row in rows_of(name, column)]
    scales = [ax.get_yscale() for ax in metrics_figure(rows).axes if ax.get_visible()]
    assert scales == ["log", "linear", "linear", "linear"]


def test_finite_thresholds_are_lines_on_their_own_panel():
    rows = rows_of("a", [1.0]) + rows_of("b", [1.0])
    thresholds = (Threshold("a", 0.5), Threshold("a", np.inf), Threshold("c", 1.0))
    first, second = metrics_figure(rows, thresholds).axes
    assert [list(line.get_ydata()) for line in first.lines[1:]] == [[0.5, 0.5]]
    assert len(second.lines) == 1


def test_panels_of_passed_thresholds_come_first(monkeypatch):
    rows = [{"step": 0, "loss": 1.0, "a": 1.0, "b": np.array([1.0, 0.1])}]
    thresholds = (Threshold("b", 0.5), Threshold("a", 0.5))
    assert titles(metrics_figure(rows, thresholds)) == ["b", "loss", "a"]
    monkeypatch.setattr(metrics, "MOST_PANELS", 1)
    assert titles(metrics_figure(rows, thresholds)) == ["b"]


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


def test_the_first_metrics_are_drawn_losses_first_and_their_names_as_they_are(monkeypatch):
    assert metrics.MOST_PANELS == 36
    monkeypatch.setattr(metrics, "MOST_PANELS", 2)
    row = {"step": 0, "seed": 1, "m_1": 1.0, "m_0": 2.0, "val_loss": 3.0}
    assert metrics.metric_names([{"step": 0}, row]) == ["val_loss", "m_1", "m_0"]
    assert titles(metrics_figure([row])) == ["val loss", "m 1"]
    (title,) = titles(metrics_figure([{"step": 0, "$x\x07" + 90 * "y": 1.0}]))
    assert title == "$x\\x07" + 57 * "y"
    ax = metrics_figure([{"step": 0, "$x$": 1.0}]).axes[0]
    assert not ax.title.get_parse_math()
