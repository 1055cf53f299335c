"""How figures look: colours, markers, panels, bands over seeds; each experiment draws its own.

No global state, no pyplot.
Colours are those of Okabe and Ito, which colour-blind readers distinguish; lines also differ in
marker or dash.
"""

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from rank_collapse.annotations import AnyArray
from rank_collapse.report.wording import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:  # matplotlib is imported by what draws: it takes half a second, which `--help` need not
    Axes = Figure = Any

COLORS = (
    "#0072B2",  # blue
    "#D55E00",  # vermilion
    "#009E73",  # green
    "#CC79A7",  # purple
    "#E69F00",  # orange
    "#56B4E9",  # sky blue
    "#000000",
    "#8A8A8A",
)
DARK_GREY = "#555555"  # of lines to compare with
LIGHT_GREY = "#E3E3E3"  # of the grid, and of shaded ranges
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": LIGHT_GREY,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
}


P = ParamSpec("P")
R = TypeVar("R")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function that draws a figure, so that it uses this package's style, legends
    included."""

    @functools.wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        """Draws in the style of this package."""
        import matplotlib as mpl

        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return wrapped


@styled
def figure(rows: int = 1, columns: int = 1, width: float = 4.2, height: float = 3.1, **options):
    """Makes a Figure and its axes [rows, columns] in this package's style.

    Args:
        rows, columns: Rows and columns of panels.
        width, height: Inches of one panel.
        options: Options of `Figure.subplots`, such as sharey=True.
    """
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width * columns, height * rows))
    return fig, fig.subplots(rows, columns, squeeze=False, **options)


def integer_ticks(*axes: Axes, vertical: bool = False) -> None:
    """Set ticks of the horizontal axis to whole numbers: layers, path lengths.

    Args:
        *axes: Axes with ticks.
        vertical: Whether the vertical axis has such ticks, too.
    """
    for ax in axes:
        for axis in (ax.xaxis, ax.yaxis)[: 1 + vertical]:
            axis.get_major_locator().set_params(integer=True)


def color(index: int) -> str:
    """Returns the index-th colour, beginning again after the last."""
    return COLORS[index % len(COLORS)]


def shades(count: int) -> list[Any]:
    """Returns colours for an ordered quantity, dark to light."""
    from matplotlib import colormaps

    return [colormaps["viridis"](v) for v in np.linspace(0.0, 0.85, count)]


def mark_isolated(values: AnyArray) -> dict[str, Any]:
    """Returns options of `Axes.plot` that mark the points of a line without finite neighbours.

    A line does not show them.

    Args:
        values: Values of the line [k].
    """
    is_finite = np.pad(np.isfinite(values), 1)
    isolated = np.flatnonzero(is_finite[1:-1] & ~is_finite[:-2] & ~is_finite[2:])
    return {"marker": "o", "markevery": isolated.tolist()} if isolated.size else {}


def band(
    ax: Axes,
    x: AnyArray,
    values: AnyArray,
    label: str | None = None,
    index: int = 0,
    **options: object,
) -> None:
    """Plot the mean over seeds as a line, ± one standard deviation as a band.

    Args:
        ax: Axes to draw on.
        x: Positions [k].
        values: [s, k]; NaN is left out.
        label: Label in the legend, in the words of `WORDS`.
        index: Index of the colour and marker.
        options: Options of `Axes.plot`.
    """
    with np.errstate(invalid="ignore"):
        values = np.ma.masked_invalid(np.asarray(values, float))
        mean = values.mean(axis=0).filled(np.nan)
        deviation = values.std(axis=0).filled(np.nan)
    style = {"color": color(index), "marker": MARKERS[index % len(MARKERS)]} | options
    style |= {} if style["marker"] else mark_isolated(mean)
    ax.plot(x, mean, label=words(label), **style)
    if len(values) > 1:
        ax.fill_between(
            x, mean - deviation, mean + deviation, color=style["color"], alpha=0.2, linewidth=0
        )


def panels(count: int, columns: int, **options: object):
    """Makes `figure` with `count` panels, at most `columns` in a row; the axes beyond are hidden.

    Args:
        count, columns: Numbers of panels.
        options: See `figure`.

    Returns:
        (the figure, all its axes [rows, columns]).
    """
    columns = min(columns, count)
    fig, axes = figure(-(-count // columns), columns, **options)
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    return fig, axes


def log_band(
    ax: Axes,
    x: AnyArray,
    values: AnyArray,
    label: str | None = None,
    index: int = 0,
    **options: object,
) -> None:
    """Plot the geometric mean over seeds as a line, a deviation of the logarithm as a band.

    Leaves a gap where a seed has no number above 0; `band` takes the mean of the seeds that have
    one.

    Args:
        ax, x, values, label, index, options: See `band`.
    """
    logs = np.log(np.where(values > 0, values, np.nan))
    mean, deviation = logs.mean(axis=0), logs.std(axis=0)
    style = {"color": color(index), "marker": MARKERS[index % len(MARKERS)]} | options
    style |= {} if style["marker"] else mark_isolated(mean)
    ax.plot(x, np.exp(mean), label=words(label), **style)
    low, high = np.exp(mean - deviation), np.exp(mean + deviation)
    ax.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)


def legend_below(ax: Axes, points: float = 32) -> None:
    """Puts the legend under the horizontal axis and its label, where it hides no curve.

    A panel without labelled curves gets no legend.
    """
    from matplotlib.transforms import ScaledTranslation

    handles, labels = ax.get_legend_handles_labels()
    if not handles:
        return
    below = ax.transAxes + ScaledTranslation(0, -points / 72, ax.figure.dpi_scale_trans)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 0}
    ax.legend(handles, labels, bbox_transform=below, **place)


def finish_axes(axes: Iterable[Axes], xlabel: str) -> None:
    """Set the label, ticks and legend of panels over layers or path lengths."""
    integer_ticks(*axes)
    for ax in axes:
        ax.set_xlabel(xlabel)
        legend_below(ax)
