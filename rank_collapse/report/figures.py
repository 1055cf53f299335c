"""How figures look, and the figures that several experiments share.

Every function takes plain arrays and returns a matplotlib Figure; no global state, no pyplot.
Colours are those of Okabe and Ito, which colour-blind readers tell apart; lines also differ in
marker or dash.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
}


def styled(draw: Callable) -> Callable:
    """Decorator: a function that draws does so in this package's style, legends included."""

    @functools.wraps(draw)
    def wrapped(*args, **kwargs):
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return wrapped


@styled
def figure(rows: int = 1, columns: int = 1, width: float = 4.2, height: float = 3.1, **options):
    """A Figure and its axes [rows, columns] in this package's style.

    Args:
        rows, columns: Panels.
        width, height: Inches of one panel.
        options: For `Figure.subplots`, such as sharey=True.
    """
    fig = Figure(figsize=(width * columns, height * rows))
    return fig, fig.subplots(rows, columns, squeeze=False, **options)


def color(index: int) -> str:
    """The index-th colour, beginning again after the last."""
    return COLORS[index % len(COLORS)]


def shades(count: int) -> list[Any]:
    """Colours for an ordered quantity, dark to light."""
    return [mpl.colormaps["viridis"](v) for v in np.linspace(0.0, 0.85, count)]


def band(
    ax: Axes, x: Any, values: Any, label: str | None = None, index: int = 0, **options: Any
) -> None:
    """Mean over seeds as a line, ± one standard deviation as a band.

    Args:
        ax: Where to draw.
        x: Positions [k].
        values: [s, k]; NaN is left out.
        label: In the legend.
        index: Which colour and marker.
        options: For `Axes.plot`.
    """
    with np.errstate(invalid="ignore"):
        values = np.ma.masked_invalid(np.asarray(values, float))
        mean = values.mean(axis=0).filled(np.nan)
        deviation = values.std(axis=0).filled(np.nan)
    style = {"color": color(index), "marker": MARKERS[index % len(MARKERS)]} | options
    ax.plot(x, mean, label=label, **style)
    if len(values) > 1:
        ax.fill_between(
            x, mean - deviation, mean + deviation, color=style["color"], alpha=0.2, linewidth=0
        )


@styled
def residual_ratio_figure(
    curves: Mapping[str, Mapping[str, Any]], ylabel: str, title: str = ""
) -> Figure:
    """The paper's figure: relative residual by layer, linear axis, one panel per group.

    Args:
        curves: {panel: {curve: values [s, L + 1]}}.
        ylabel: What is drawn, with its norm.
        title: Above all panels.
    """
    fig, axes = figure(1, len(curves), width=3.6, height=3.0, sharey=True)
    for ax, (panel, group) in zip(axes[0], curves.items(), strict=True):
        for index, (label, values) in enumerate(group.items()):
            values = np.asarray(values)
            band(ax, np.arange(values.shape[1]), values, label, index)
        ax.set(xlabel="layer", title=panel, ylim=(-0.03, None))
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel(ylabel)
    axes[0, -1].legend(loc="best")
    fig.suptitle(title) if title else None
    return fig


@styled
def path_share_figure(
    shares: Mapping[str, Sequence[float]],
    laws: Mapping[str, Sequence[float]],
    title: str = "",
    columns: int = 3,
) -> Figure:
    """Share of paths by length as bars, with a law as dots, one panel per architecture.

    Args:
        shares: {architecture: share of paths of length 0 .. L}.
        laws: The same of the law drawn beside.
        title: Above all panels.
        columns: Panels in a row.
    """
    columns = min(columns, len(shares))
    rows = -(-len(shares) // columns)
    fig, axes = figure(rows, columns, width=3.3, height=2.1)
    for ax in axes.flat[len(shares) :]:
        ax.set_visible(False)
    for ax, (name, share) in zip(axes.flat, shares.items(), strict=False):
        lengths = np.arange(len(share))
        ax.bar(lengths, share, width=0.85, color=color(5), label="counted")
        ax.plot(lengths, laws[name], ".", color=color(1), markersize=3.5, label="binomial")
        ax.set_title(name, fontsize=9)
        ax.xaxis.get_major_locator().set_params(integer=True)
    for ax in axes[:, 0]:
        ax.set_ylabel("share of paths")
    for ax in axes[-1]:
        ax.set_xlabel("path length")
    axes[0, 0].legend(loc="upper left")
    fig.suptitle(title) if title else None
    return fig


@styled
def log_residual_figure(
    measured: Mapping[str, Mapping[str, Any]],
    layer_bounds: Mapping[str, Mapping[str, Any]],
    stack_bounds: Mapping[str, Mapping[str, Any]],
    plain: Mapping[str, Mapping[str, Any]] | None = None,
    title: str = "",
) -> Figure:
    """log10 of the residual by layer, the 3^L line, the bounds, and what plain arithmetic sees.

    The axis of log10‖res‖ is itself logarithmic away from 0, on which the doubly exponential law
    log‖res‖ ∝ 3^l is a straight line.

    Args:
        measured: {panel: {curve: log10 ‖res‖ [s, L + 1]}}; the 3^l line is drawn through the end of
            the first curve that falls like it.
        layer_bounds: {panel: {curve: log10 of a layer's bound from the layer before [s, L + 1]}}.
        stack_bounds: The same of the theorem for all layers so far; it leaves the axis where it
            says nothing.
        plain: {panel: {curve: log10 ‖res‖ as an ordinary forward pass gives it}}.
        title: Above all panels.
    """
    fig, axes = figure(1, len(measured), width=3.9, height=3.4, sharey=True)
    lowest, highest = -1.0, 1.0
    for ax, (panel, group) in zip(axes[0], measured.items(), strict=True):
        ax.set_yscale("symlog", linthresh=1.0, linscale=0.6)
        anchored = False
        for index, (label, values) in enumerate(group.items()):
            values = np.asarray(values, float)
            layers = np.arange(values.shape[1])
            lowest, highest = min(lowest, values.min()), max(highest, values.max())
            band(ax, layers, values, label, index)
            if plain is not None:
                options = {"linestyle": ":", "marker": "", "linewidth": 1.1, "color": color(index)}
                note = "the same, plain arithmetic" if index == 0 else None
                ax.plot(layers, np.mean(plain[panel][label], axis=0), label=note, **options)
            mean = values.mean(axis=0)
            falls = mean < -3.0
            if not anchored and falls[-2:].all() and mean[-1] < 2.5 * mean[-2]:
                start = int(np.argmax(falls))
                line = mean[-1] * 3.0 ** (layers[start:] - layers[-1])
                ax.plot(layers[start:], line, "k--", lw=1, label=r"$\propto 3^{l}$", zorder=5)
                anchored = True
            for kind, found, dashes in (
                ("layer bound", layer_bounds, (0, (5, 1, 1, 1))),
                ("stack bound", stack_bounds, (0, (1, 2, 5, 2))),
            ):
                if label in found.get(panel, {}):
                    options = {"linestyle": dashes, "marker": "", "color": color(index)}
                    mean = np.mean(found[panel][label], axis=0)
                    ax.plot(layers, mean, linewidth=1, label=f"{kind}, {label}", **options)
        ax.set(xlabel="layer", title=panel)
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylim(10 * lowest, 5 * highest)
    axes[0, 0].set_ylabel(r"$\log_{10} \|\mathrm{res}(X^l)\|_{1,\infty}$")
    _legend_outside(fig, axes[0, 0])
    fig.suptitle(title) if title else None
    return fig


@styled
def local_rate_figure(rates: Mapping[str, Mapping[str, Any]], title: str = "") -> Figure:
    """Local rate log‖res_{l+1}‖ / log‖res_l‖ by layer, with the rates 1 and 3.

    Args:
        rates: {panel: {curve: [s, L]}}; NaN where the rate means nothing.
        title: Above all panels.
    """
    fig, axes = figure(1, len(rates), width=3.6, height=2.8, sharey=True)
    for ax, (panel, group) in zip(axes[0], rates.items(), strict=True):
        for level, text in ((3.0, "3: doubly exponential"), (1.0, "1: exponential or none")):
            ax.axhline(level, color="#555555", lw=0.9, ls="--")
            ax.annotate(
                text, (1.0, level), xycoords=("axes fraction", "data"), xytext=(0, -2),
                textcoords="offset points", ha="right", va="top", fontsize=7, color="#555555",
            )  # fmt: skip
        for index, (label, values) in enumerate(group.items()):
            values = np.asarray(values, float)
            if np.isfinite(values).any():
                band(ax, np.arange(1, values.shape[1] + 1), values, label, index)
        ax.set(xlabel="layer", title=panel, ylim=(0, 4))
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel(r"$\log\|\mathrm{res}(X^{l})\| \,/\, \log\|\mathrm{res}(X^{l-1})\|$")
    _legend_outside(fig, axes[0, -1])
    fig.suptitle(title) if title else None
    return fig


@styled
def sweep_figure(
    curves: Mapping[str, Mapping[str, Any]], swept: str, ylabel: str, title: str = ""
) -> Figure:
    """One panel per network, one shade per swept value.

    Args:
        curves: {panel: {swept value: values [s, L + 1]}}.
        swept: What is swept, as the legend's title.
        ylabel: What is drawn.
        title: Above all panels.
    """
    columns = min(4, len(curves))
    rows = -(-len(curves) // columns)
    fig, axes = figure(rows, columns, width=3.0, height=2.7, sharey=True)
    for ax in axes.flat[len(curves) :]:
        ax.set_visible(False)
    for ax, (panel, group) in zip(axes.flat, curves.items(), strict=False):
        for (label, values), shade in zip(group.items(), shades(len(group)), strict=True):
            band(ax, np.arange(np.shape(values)[1]), values, label, color=shade, marker="")
        ax.set(xlabel="layer", title=panel)
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel(ylabel)
    axes[0, -1].legend(title=swept, loc="best")
    fig.suptitle(title) if title else None
    return fig


def _legend_outside(fig, ax):
    """The legend of one panel to the right of all, where it hides nothing."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside right center", fontsize=7.5)
