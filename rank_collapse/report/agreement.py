"""The figure "Where do two runs part?"."""

from collections.abc import Mapping, Sequence

import numpy as np

from rank_collapse.report import figures
from rank_collapse.report.figures import Figure

# {column of the table: (legend, line style)}
LINES = {
    "error_in": ("comes in", ":"),
    "predicted": ("rounding explains", "--"),
    "added": ("the sublayer adds", "-"),
}
TITLES = {"attention": "attention", "mlp": "MLP", "layer": "state after the layer"}


@figures.styled
def agreement_figure(
    columns: Mapping[str, np.ndarray], fault: tuple[int, str] | None = None
) -> Figure:
    """Plot the relative errors by layer, a panel for each part of a layer.

    Args:
        columns: {column: values of all sublayers}, with "layer" and "part" among them.
        fault: Layer and part of the first sublayer at fault, which is marked.
    """
    parts: Sequence[str] = [part for part in TITLES if part in set(columns["part"])]
    fig, axes = figures.figure(1, len(parts), width=4.0, height=3.0, sharey=True)
    for ax, part in zip(axes[0], parts, strict=True):
        rows = np.flatnonzero(np.asarray(columns["part"]) == part)
        layers = np.asarray(columns["layer"])[rows]
        for index, (name, (label, style)) in enumerate(LINES.items()):
            values = np.asarray(columns[name], float)[rows]
            values = np.where(values > 0, values, np.nan)  # the same numbers have no logarithm
            ax.plot(
                layers,
                values,
                style,
                marker=figures.MARKERS[index],
                color=figures.color(index),
                label=label,
            )
        if fault is not None and fault[1] == part:
            ax.axvline(fault[0], color=figures.DARK_GREY, linestyle="-.", label="the runs part")
        ax.set(title=TITLES[part], yscale="log")
    axes[0, 0].set_ylabel("relative error, median over tokens")
    figures.finish_axes(axes[0], "layer")
    return fig
