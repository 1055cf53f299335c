"""The figure of run_path_counts: share of paths by length, one panel per architecture."""

from collections.abc import Callable
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from experiments.path_counts.results import Tables, column
from rank_collapse.report import figures

COLUMNS = 3  # panels in a row


def figures_of(tables: Tables) -> dict[str, Callable[[], Figure]]:
    """What draws the published figure."""
    return {"path_counts": partial(share_figure, tables)}


@figures.styled
def share_figure(tables: Tables) -> Figure:
    """Shares as bars, the binomial law as dots."""
    columns = min(COLUMNS, len(tables))
    rows = -(-len(tables) // columns)
    fig, axes = figures.figure(rows, columns, width=3.3, height=2.1)
    for ax in axes.flat[len(tables) :]:
        ax.set_visible(False)
    for ax, (name, table) in zip(axes.flat, tables.items(), strict=False):
        share = column(table, "share")
        lengths = np.arange(len(share))
        ax.bar(lengths, share, width=0.85, color=figures.color(5), label="counted")
        law = column(table, "binomial")
        ax.plot(lengths, law, ".", color=figures.color(1), markersize=3.5, label="binomial")
        ax.set_title(name, fontsize=9)
        figures.integer_ticks(ax)
    for ax in axes[:, 0]:
        ax.set_ylabel("share of paths")
    for ax in axes[-1]:
        ax.set_xlabel("path length")
    axes[0, 0].legend(loc="upper left")
    return fig
