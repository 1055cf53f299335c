"""Figures of metrics: means of seeds, scales, thresholds, layers and names."""

import numpy as np
import pytest

from rank_collapse.measures.table import Threshold
from rank_collapse.report import metrics
from rank_collapse.report.metrics import by_step, metrics_figure
from tests.support.shown_figures import edges_of, titles


def rows_of(name, values, seed=0):
    return [{"step": i, "seed": seed, name: v} for i, v in enumerate(values)]


def test_a_metric_is_the_mean_of_its_seeds_and_their_range():
    rows = rows_of("a", [1.0, 2.0]) + rows_of("a", [3.0, np.nan], seed=1) + rows_of("b", [1.0, 2.0])
    first, second = metrics_figure(rows).axes
    np.testing.assert_array_equal(first.lines[0].get_xydata(), [[0, 2], [1, 2]])
    assert edges_of(first) == {0: (1, 3), 1: (2, 2)}
    assert not second.collections and first.get_xlabel() == second.get_xlabel() == "step"
    for ax in (first, second):
        assert all(tick == round(tick) for tick in ax.get_xticks())
    rows += rows_of("a", [1.0, 2.0, 3.0])
    steps, values = by_step(rows, "b")  # of which the second seed and the last step have none
    assert values.shape == (1, 2, 1) and steps.tolist() == [0, 1]
    rows = rows_of("a", [1.0, np.array([2.0, 3.0])])
    for ordered in (rows, rows[::-1]):
        np.testing.assert_array_equal(by_step(ordered, "a")[1], [[[1, np.nan], [2, 3]]])
    _, values = by_step(rows_of("a", [40.0], seed=40) + rows_of("a", [3.0], seed=3), "a")
    assert values.ravel().tolist() == [3, 40]


def test_a_metric_is_logarithmic_above_two_decades_where_all_is_above_0():
    values = {"a": [1.0, 101.0], "b": [1.0, 99.0], "c": [0.0, 101.0], "d": [1.0, np.inf, 2.0]}
    rows = [row for name, column in values.items() for row in rows_of(name, column)]
    scales = [ax.get_yscale() for ax in metrics_figure(rows).axes if ax.get_visible()]
    assert scales == ["log", "linear", "linear", "linear"]


def test_panels_are_three_in_a_row_and_the_legend_of_layers_stands_below_them():
    layers = np.arange(3.0)
    fig = metrics_figure([{"step": 0, "a": layers, "b": 1.0, "c": layers, "d": 2.0}])
    assert fig.axes[0].get_gridspec().get_geometry() == (2, 3)
    assert tuple(fig.get_size_inches()) == pytest.approx((3 * 3.4, 2 * 2.5))
    fig.draw_without_rendering()
    (legend,) = fig.legends
    lowest = min(ax.get_tightbbox().y0 for ax in fig.axes if ax.get_visible())
    assert 0 <= legend.get_window_extent().y0 < legend.get_window_extent().y1 <= lowest


def test_of_many_layers_eight_are_drawn_that_are_evenly_apart():
    """The nearest whole numbers to eight even steps, from the first layer to the last."""
    (ax,) = metrics_figure([{"step": 0, "a": np.arange(30.0)}]).axes
    chosen = [0, 4, 8, 12, 17, 21, 25, 29]
    assert [line.get_label() for line in ax.lines] == [f"layer {layer}" for layer in chosen]
    assert [line.get_ydata().item() for line in ax.lines] == chosen


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
