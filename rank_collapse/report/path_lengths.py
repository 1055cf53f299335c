"""The figure "How long are the paths?"."""

from collections.abc import Mapping

import numpy as np

from rank_collapse.report import figures
from rank_collapse.report.figures import Axes, Figure


def plot_length_laws(
    ax: Axes, laws: Mapping[str, np.ndarray], needed_length: float | int | None = None
) -> None:
    """Plot the share of each path length by several weightings, bands over texts.

    Args:
        ax: Axes to draw on.
        laws: {weighting: [b, L + 1]}, of `pretrained.report.compute_length_laws`.
        needed_length: Longest paths that the loss needs, drawn as a dashed line; None for no line.
    """
    for index, (name, law) in enumerate(laws.items()):
        figures.band(ax, np.arange(law.shape[1]), law, name, index)
    if needed_length is not None:
        ax.axvline(needed_length, color=figures.DARK_GREY, linestyle="--", label="the loss needs")
    ax.set(title="how long are the paths?", ylabel="share of paths", ylim=(0, None))
    figures.finish_axes([ax], "path length: number of heads")


@figures.styled
def path_length_figure(laws: Mapping[str, np.ndarray]) -> Figure:
    """Plot `plot_length_laws` as a separate figure."""
    fig, axes = figures.figure(width=6.5, height=3.0)
    plot_length_laws(axes[0, 0], laws)
    return fig
