"""Panels by two values, and points with intervals, for the figures of several experiments."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from rank_collapse.report.figures import MARKERS, Axes, color, figure
from rank_collapse.report.intervals import Interval
from rank_collapse.report.wording import words


def place_grid(places: Sequence[tuple[Hashable, Hashable]], **options: float | bool | str):
    """Makes `figure` with a row and a column for each first and each second value of the places.

    Args:
        places: (row value, column value) of each panel.
        options: See `figure`.

    Returns:
        The figure, its axes [rows, columns], and the axes of each place.
    """
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    fig, axes = figure(len(rows), len(columns), **options)
    return fig, axes, [axes[rows.index(row), columns.index(column)] for row, column in places]


def outer_labels(axes: np.ndarray, xlabel: str, ylabel: str = "") -> None:
    """Set labels of the bottom row and, if there is one, of the first column of axes."""
    for ax in axes[-1]:
        ax.set_xlabel(xlabel)
    if ylabel:
        for ax in axes[:, 0]:
            ax.set_ylabel(ylabel)


def draw_interval(
    ax: Axes, x: float, mean: float, ends: Interval, label: str | None = None, index: int = 0
) -> None:
    """Plot a point with its interval, if that is finite.

    Args:
        ax: Axes to draw on.
        x, mean: The point.
        ends: Ends of the interval.
        label, index: See `band`.
    """
    errors = [[max(mean - ends.low, 0.0)], [max(ends.high - mean, 0.0)]] if ends.is_finite else None
    ax.errorbar(
        [x],
        [mean],
        errors,
        color=color(index),
        marker=MARKERS[index % len(MARKERS)],
        capsize=3,
        linestyle="none",
        label=words(label),
    )


def quartiles(
    ax: Axes,
    x: np.ndarray,
    values: np.ndarray,
    label: str | None = None,
    index: int = 0,
    **options: Any,
) -> None:
    """Plot the median of values [s, k] as a line and their quartiles as a band.

    Args:
        ax, x, values, label, index, options: See `band`.
    """
    style = {"color": color(index), "marker": MARKERS[index % len(MARKERS)]} | options
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=0)
    ax.plot(x, middle, label=words(label), **style)
    ax.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
