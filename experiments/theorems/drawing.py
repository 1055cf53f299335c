"""The figure of a theorem: a panel for each quantity, measured points over predicted lines."""

from collections.abc import Sequence

import numpy as np

from experiments.theorems.outcomes import Curve, Panel, Theorem
from rank_collapse.report import figures

LINES = {"=": "-", "≤": "--", "≥": "--", "none": ":"}  # by relation
MOST_TICKS = 8  # places of measured points that a logarithmic axis names
COLUMNS = 3


@figures.styled
def plot_theorem(theorem: Theorem, curves: Sequence[Curve]):
    """Plots the curves of a theorem, each in the panel of its quantity.

    Args:
        theorem: Has the panels.
        curves: Curves of the theorem.

    Returns:
        The figure.
    """
    fig, axes = figures.panels(len(theorem.panels), COLUMNS, height=3.7)
    for number, (ax, panel) in enumerate(zip(axes.flat, theorem.panels, strict=False)):
        plot_panel(ax, panel, [curve for curve in curves if curve.panel == number])
    fig.suptitle(theorem.statement, fontsize=10, wrap=True)
    return fig


def plot_panel(ax: figures.Axes, panel: Panel, curves: Sequence[Curve]) -> None:
    """Plots the curves of one quantity.

    A prediction at a single point is drawn across the panel, unless another curve has a line there.
    Points of an earlier curve are not drawn again.

    Args:
        ax: Axes.
        panel: Labels of the panel.
        curves: Curves of the panel.
    """
    plotted: list[np.ndarray] = []
    num_lines = sum(not np.isnan(curve.as_array()[:, 1]).all() for curve in curves)
    for index, curve in enumerate(curves):
        x, predicted, measured = curve.as_array().T
        color, points = figures.color(index), np.stack([x, measured])
        is_new = not any(set(map(tuple, points.T)) <= set(map(tuple, old.T)) for old in plotted)
        plotted.append(points)
        label = curve.name
        if is_new:
            marker = figures.MARKERS[index % len(figures.MARKERS)]
            ax.plot(x, measured, marker, color=color, markersize=4, label=label)
            label = None
        line = {"color": color, "lw": 1.2, "linestyle": LINES[curve.relation], "label": label}
        if np.isnan(predicted).all():
            continue
        if panel.names or (len(x) == 1 and num_lines > 1):
            ax.plot(x, predicted, "_", color=color, markersize=18, markeredgewidth=1.5)
        elif len(x) == 1:
            ax.axhline(predicted[0], **line)
        else:
            ax.plot(x, predicted, zorder=1, **line)
    for axis in panel.log:
        getattr(ax, f"set_{axis}scale")("log")
    places = np.unique(np.concatenate([curve.as_array()[:, 0] for curve in curves]))
    if panel.names:
        ax.set_xticks(range(len(panel.names)), panel.names)
        ax.margins(x=0.15)
    elif "x" in panel.log and len(places) <= MOST_TICKS:
        ax.set_xticks(places, [f"{place:g}" for place in places])
        ax.xaxis.minorticks_off()
    elif "x" not in panel.log and np.all(places == places.astype(int)):
        figures.integer_ticks(ax)
    ax.set(xlabel=panel.x, ylabel=panel.y)
    figures.legend_below(ax)
