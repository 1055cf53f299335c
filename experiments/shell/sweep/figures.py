"""The figure of a sweep: a curve over one axis, a heat map over two, panels over more."""

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.shell.sweep.grid import Axis, Cell
from rank_collapse.report import figures
from rank_collapse.report.figures import Axes, Figure
from rank_collapse.report.statistics import SHARES, mean_and_ends

COLUMNS = 3
SPREAD = 8  # between the ends of an axis that is drawn in logarithms


@figures.styled
def grid_figure(
    axes: Sequence[Axis],
    cells: Mapping[str, Cell],
    values: Mapping[str, Mapping[str, float]],
    shown: str,
) -> Figure:
    """Means over seeds and their 95 % intervals by cell; cells without a number are left empty.

    Args:
        axes, cells: The grid.
        values: {cell: {seed: value}} of those that are done: of the seeds that have a number.
        shown: What the values are.
    """
    column, *conditions = (part.strip() for part in shown.split(","))
    label = column + (f" ({', '.join(conditions)})" if conditions else "")
    axes = [axis for axis in axes if len(axis.values) > 1] or list(axes[:1])
    share = column in SHARES
    found = {
        tuple(tuple(cell.values[n] for n in axis.names) for axis in axes): (
            list(values[name].values()) if name in values else None
        )
        for name, cell in cells.items()
    }
    if len(axes) == 1:
        fig, panels = figures.figure()
        own = [found[value,] or [] for value in axes[0].values]
        curve(panels[0, 0], axes[0], own, label, share=share)
        return fig
    *outer, rows, columns = axes
    points = list(itertools.product(*(axis.values for axis in outer)))
    size = {"width": max(4.2, len(columns.values)), "height": max(3.1, 0.6 * len(rows.values))}
    fig, panels = figures.panels(len(points), COLUMNS, **size)
    means = [np.mean(own) for own in found.values() if own]
    limits = min(means, default=0.0), max(means, default=1.0)
    for panel, point in zip(panels.flat, points, strict=False):
        own = {key[-2:]: v for key, v in found.items() if key[:-2] == point}
        image = heat_map(panel, rows, columns, own, limits, share=share)
        titles = (f"{a.label} = {':'.join(v)}" for a, v in zip(outer, point, strict=True))
        panel.set_title(", ".join(titles))
    fig.colorbar(image, ax=panels, label=label)
    return fig


def curve(
    ax: Axes, axis: Axis, values: Sequence[Sequence[float]], label: str, *, share: bool
) -> None:
    """Means over one axis with their intervals, and the seeds as points behind."""
    numbers = numbers_of(axis)
    x = np.arange(len(axis.values)) if numbers is None else np.asarray(numbers)
    order = np.argsort(x)
    for at, own in zip(x, values, strict=True):
        ax.plot([at] * len(own), own, ".", color=figures.color(7), alpha=0.5)
    known = [mean_and_ends(own, share=share) if own else [None] * 3 for own in values]
    mean, *ends = np.array(known, float)[order].T  # None becomes NaN, a gap
    ax.plot(x[order], mean, color=figures.color(0), marker="o")
    ax.fill_between(x[order], *ends, color=figures.color(0), alpha=0.2, linewidth=0)
    if numbers is None:
        ax.set_xticks(x, [":".join(value) for value in axis.values])
    elif min(numbers) > 0 and max(numbers) / min(numbers) >= SPREAD:
        ax.set_xscale("log")
    ax.set(xlabel=axis.label, ylabel=label)


def heat_map(
    ax: Axes, rows: Axis, columns: Axis, found: Mapping, limits: tuple[float, float], *, share: bool
) -> object:
    """Means over two axes as colours, with their intervals written in; returns the image.

    Args:
        ax: The panel.
        rows, columns: The axes.
        found: {(row, column): values of the seeds}; None of a cell that failed.
        limits: Of the colours.
        share: Whether the values are shares.
    """
    places = list(itertools.product(rows.values, columns.values))
    means = [np.mean(found[place]) if found[place] else np.nan for place in places]
    table, middle = np.reshape(means, (len(rows.values), -1)), (limits[0] + limits[1]) / 2
    image = ax.imshow(table, aspect="auto", vmin=limits[0], vmax=limits[1], cmap="viridis")
    for (i, j), place in zip(np.ndindex(table.shape), places, strict=True):
        if own := found[place]:
            mean, low, high = mean_and_ends(own, share=share)
            text = f"{mean:.3g}" + ("" if low is None else f"\n{low:.2g} to {high:.2g}")
            color = "white" if table[i, j] < middle else "black"
            ax.text(j, i, text, ha="center", va="center", color=color, fontsize=8)
        elif own is None:
            ax.text(j, i, "failed", ha="center", va="center")
    ax.set_xticks(range(len(columns.values)), [":".join(v) for v in columns.values])
    ax.set_yticks(range(len(rows.values)), [":".join(v) for v in rows.values])
    ax.grid(False)
    ax.set(xlabel=columns.label, ylabel=rows.label)
    return image


def numbers_of(axis: Axis) -> list[float] | None:
    """The values of an axis as numbers; None of a zip, or where one is no number."""
    with contextlib.suppress(ValueError):
        numbers = [float(value) for (value,) in axis.values]
        return numbers if all(map(math.isfinite, numbers)) else None
    return None
