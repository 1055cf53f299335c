"""The figures of run_stability: dependency, output change, gradients, and the one law.

Each takes the results of all networks, see `results`.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from experiments.stability.dependency import dependency
from experiments.stability.stability_results import (
    UPDATES,
    VISIBLE,
    ByCase,
    branch_counts,
    by_design,
    depth_curve,
    first_and_last,
    law_values,
)
from experiments.verdicts.share_intervals import geometric_mean
from rank_collapse.printed import format_count
from rank_collapse.report import figures
from rank_collapse.report.wording import words

DASHES = {"O(N)": ":", "O(log N)": "--", "O(1)": "-."}


def plot_law(ax: figures.Axes, x: ArrayLike, y: ArrayLike, index: int, **options: Any) -> None:
    """Plots the prediction for a design as a dotted line."""
    ax.plot(x, y, **{"color": figures.color(index), "ls": ":", "lw": 1.2} | options)


def expected_apart(measures: dict[str, np.ndarray]) -> np.ndarray:
    """Computes the law's 1 − token cosine by layer, mean over seeds."""
    return np.exp(measures["expected_log_apart"].astype(float)).mean(axis=0)


@figures.styled
def one_law_figure(results: ByCase) -> figures.Figure:
    """Left: 1 − mean token cosine (vertical axis) by layer (horizontal axis), in the deepest
    networks. It is 0 if all tokens have the same direction. Each colour is one residual design.
    Markers are geometric means over the measured networks, and bands are one standard deviation.
    Thin dotted lines show the smallest and the largest value of all networks. Solid lines are
    predictions of our law, which uses only the gains of skips and branches. Right: squared change
    of the output by a random update of all weights. The vertical axis is the measured change, and
    the horizontal axis is the change that the same law predicts. Each marker is one design with one
    number of layers, a geometric mean over seeds. On the dashed line, prediction and measurement
    are equal."""
    fig, ((collapse, change),) = figures.figure(1, 2, width=4.4, height=3.5)
    for index, (name, networks) in enumerate(by_design(results).items()):
        _, deep = first_and_last(networks)
        apart = np.where(deep["apart"] > VISIBLE, deep["apart"], np.nan)
        layers = np.arange(apart.shape[1])
        spacing = max(1, layers[-1] // 12)
        marks = {"linestyle": "", "markevery": (index % spacing, spacing)}
        figures.log_band(collapse, layers, apart, name, index, **marks)
        plot_law(collapse, layers, expected_apart(deep), index, ls="-", lw=1.0)
        for end in (np.min, np.max):
            plot_law(collapse, layers, end(apart, axis=0), index, ls=":", lw=0.5)
        expected = geometric_mean(depth_curve(networks, "expected_change"))
        measured = geometric_mean(depth_curve(networks, "change.random"))
        marker = figures.MARKERS[index % len(figures.MARKERS)]
        change.plot(expected, measured, color=figures.color(index), marker=marker, linestyle="")
    collapse.set(
        yscale="log",
        xlabel="layer",
        ylabel=r"1 $-$ token cosine",
        title="tokens: networks, and the law (lines)",
    )
    figures.integer_ticks(collapse)
    collapse.set_ylim(max(collapse.get_ylim()[0], VISIBLE / 10), 2)
    change.set(title=r"output change, every depth", ylabel=r"measured $E|\delta \hat x|^2/d$")
    change.set(xscale="log", yscale="log", xlabel="expected from the law")
    change.plot(*2 * [change.get_xlim()], color=figures.DARK_GREY, lw=0.9, ls="--")
    collapse.legend(loc="lower left")
    return fig


@figures.styled
def dependency_figure(results: ByCase) -> figures.Figure:
    """How much the stream (the sum of the input and all branches so far) depends on each branch.
    Each panel is the shallowest network of one residual design. The colour in row i and column j is
    β_ij. Its square β_ij² is the share of the variance of the stream after branch i that comes from
    branch j. Column 0 is the input."""
    designs = by_design(results)
    fig, axes = figures.figure(1, len(designs), width=2.7, height=3.0, sharey=True)
    for ax, (name, networks) in zip(axes[0], designs.items(), strict=True):
        shallow = first_and_last(networks)[0]
        values = np.mean([np.sqrt(dependency(s)) for s in shallow["shares"]], axis=0)
        hidden = np.triu(np.ones(values.shape, bool), 1)
        image = ax.imshow(np.ma.masked_array(values, hidden), vmin=0, vmax=1, cmap="viridis")
        ax.grid(visible=False)
        figures.integer_ticks(ax, vertical=True)
        ax.set_title(
            f"{words(name)}, {format_count(next(iter(networks)).depth, 'layer')}", fontsize=8
        )
        ax.set_xlabel("branch j (0: input)")
    axes[0, 0].set_ylabel(r"$\beta_{ij}$ after branch i")
    fig.colorbar(image, ax=axes, shrink=0.7)
    return fig


@figures.styled
def output_change_figure(results: ByCase) -> figures.Figure:
    """Squared change of the output (vertical axis) by the number N of branches (horizontal axis).
    Every weight matrix changes by the same relative size e. Left: random changes. Right: steps
    along the gradient. Each colour is one residual design, and each curve is divided by the
    measured value of its design at the smallest N. Bands are one standard deviation of the
    logarithm over seeds. Black lines are the three published laws O(N), O(log N) and O(1). Thin
    dotted lines on the left are the change that our law expects. Thin dotted lines on the right are
    a lower bound of the change: e² (Σ‖W‖‖∂W‖)²/‖u‖². Here Σ adds up all weight matrices W, ∂W is
    the gradient of the loss with respect to W, and u is its gradient with respect to the output."""
    fig, (axes,) = figures.figure(1, 2, width=4.0, height=3.5)
    designs = by_design(results)
    branches = branch_counts(next(iter(designs.values())))
    for ax, update in zip(axes, UPDATES, strict=True):
        for index, (name, networks) in enumerate(designs.items()):
            values = depth_curve(networks, f"change.{update}")
            first = geometric_mean(values)[0]
            figures.log_band(ax, branches, values / first, name, index)
            expected = depth_curve(networks, "expected_change").mean(axis=0)
            bound = geometric_mean(depth_curve(networks, "gradient_bound"))
            reference = expected / expected[0] if update == "random" else bound / first
            plot_law(ax, branches, reference, index, ls=(0, (1, 1)), lw=0.8)
        for name, values in law_values(branches).items():
            line = {"color": "black", "lw": 0.9, "ls": DASHES[name], "label": name}
            ax.plot(branches, values / values[0], **line)
        ax.set(
            xscale="log",
            yscale="log",
            xlabel="residual branches N",
            ylabel=r"$E|\delta \hat x|^2$, 1 at the smallest N",
            title=f"{update} update of equal relative size",
        )
        ax.set_xticks(branches, labels=[str(n) for n in branches])
        ax.set_xticks([], minor=True)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return fig
