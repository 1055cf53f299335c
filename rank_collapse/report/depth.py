"""The figure of a depth report: the use of each layer of a language model."""

from collections.abc import Mapping

import numpy as np

from rank_collapse.report import figures
from rank_collapse.report.figures import Figure
from rank_collapse.report.path_lengths import plot_length_laws

# {title: ({measure: label}, vertical axis, whether it is logarithmic)}
PANELS = {
    "logit lens": (
        {"lens_kl": "recomputed norm", "frozen_kl": "frozen norm"},
        "KL to the output, nats",
        False,
    ),
    "overlap of five words": (
        {"lens_overlap": "recomputed norm", "frozen_overlap": "frozen norm"},
        "share of the output's",
        False,
    ),
    "branch and stream": (
        {"attention_cosine": "attention", "mlp_cosine": "MLP", "layer_cosine": "layer"},
        "mean cosine",
        False,
    ),
    "size of branches": (
        {"attention_ratio": "attention", "mlp_ratio": "MLP"},
        "‖branch‖ / ‖stream‖",
        True,
    ),
    "without the layer": (
        {"error": "change of the output", "block_influence": "1 − cos of the layer"},
        "relative size",
        True,
    ),
    "residual of tokens": (
        {
            "residual_ratio": "of the stream",
            "read_residual_ratio": "of what is read",
            "spike_share": "share of the largest token",
        },
        "residual ratio",
        False,
    ),
    "attention": (
        {"first_column": "weight on the first token", "entropy": "entropy, nats"},
        "mean over heads",
        False,
    ),
    "loss": (
        {"loss_without": "without the layer", "loss_up_to": "by paths of up to k heads"},
        "nats a token",
        False,
    ),
}


@figures.styled
def depth_figure(
    measures: Mapping[str, np.ndarray],
    length_laws: Mapping[str, np.ndarray],
    needed_length: float | int,
) -> Figure:
    """Plot the use of each layer of a language model, and the lengths of its paths.

    Args:
        measures: {name: array}, `DepthReport.measures` of b texts and L layers. "later" has a
            matrix over pairs of layers for each text, [b, L, L]: the layer that is left out, then
            the later layer that changes. The other arrays that are drawn are [b, L] or [b, L + 1].
        length_laws: {weighting: [b, L + 1]}, `DepthReport.length_laws`.
        needed_length: Longest paths that the loss needs.
    """
    fig, axes = figures.panels(len(PANELS) + 2, 3, width=3.4, height=3.0)
    depth = measures["error"].shape[1]
    for ax, (title, (curves, ylabel, logarithmic)) in zip(axes.flat, PANELS.items(), strict=False):
        for index, (name, label) in enumerate(curves.items()):
            if name in measures:  # a network without MLPs has none of theirs
                values = measures[name]
                layers = np.arange(depth + 1 - values.shape[1], depth + 1)
                figures.band(ax, layers, values, label, index)
        ax.set(title=title, ylabel=ylabel, yscale="log" if logarithmic else "linear")
        figures.finish_axes([ax], "layer" if title != "loss" else "layer, or path length k")
    ax = axes.flat[len(PANELS)]
    later = measures["later"].mean(axis=0)
    edges = np.arange(depth + 1) + 0.5
    mesh = ax.pcolormesh(edges, edges, np.ma.masked_equal(later, 0), cmap="viridis", vmin=0)
    ax.set(title="change of later layers", xlabel="later layer", ylabel="layer that is left out")
    ax.invert_yaxis()
    figures.integer_ticks(ax, vertical=True)
    fig.colorbar(mesh, ax=ax)
    plot_length_laws(axes.flat[len(PANELS) + 1], length_laws, needed_length)
    return fig
