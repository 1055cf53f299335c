"""The figures of run_path_chains: the paper's box plots, and what each path length adds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.path_chains.measure import SAMPLES
from experiments.path_chains.results import CHAINS, law_of
from rank_collapse.network.config import TransformerConfig
from rank_collapse.paths.enumeration import count_paths
from rank_collapse.report import figures


def figures_of(results: dict[str, Any], config: TransformerConfig) -> dict[str, Callable]:
    """What draws the paper's box plots, and contributions by length with what predicts them."""
    return {
        "path_chains": partial(chain_figure, results),
        "path_lengths": partial(length_figure, results, config),
    }


@figures.styled
def chain_figure(results: dict[str, Any]) -> Figure:
    """Box plots by path length on a logarithmic axis; seeds and paths pooled."""
    fig, axes = figures.figure(1, 2, sharey=True)
    for ax, (name, title) in zip(axes[0], CHAINS.items(), strict=True):
        values = np.maximum(np.swapaxes(results[name], 0, 1), np.finfo(float).tiny)
        values = values.reshape(len(values), -1)
        boxes = ax.boxplot(
            list(values), positions=np.arange(1, len(values) + 1), patch_artist=True,
            flierprops={"marker": ".", "markersize": 2, "markeredgecolor": "#8A8A8A"},
            medianprops={"color": "black"},
        )  # fmt: skip
        for box in boxes["boxes"]:
            box.set(facecolor=figures.color(5), linewidth=0.8)
        ax.set(yscale="log", xlabel="path length", title=title)
    axes[0, 0].set_ylabel(r"$\|\mathrm{res}(P_{path})\|_{1,\infty}\,/\,\|P_{path}\|_{1,\infty}$")
    return fig


@figures.styled
def length_figure(results: dict[str, Any], config: TransformerConfig) -> Figure:
    """Exact contribution by length, counting beside size, and the error of sampling."""
    law, k = law_of(results, config), np.arange(config.depth + 1)
    fig, axes = figures.figure(1, 3, width=3.9, height=3.3)
    ax = axes[0, 0]
    figures.band(ax, k, results["log10_norm"], r"$\|C_k\|$, measured", 0)
    figures.band(ax, k, results["log10_residual"], r"$\|\mathrm{res}(C_k)\|$, measured", 1)
    laws = ((law.one, r"one $\alpha$"), (law.by_layer, r"$\alpha_l$"))
    for index, (predicted, label) in enumerate(laws):
        predicted = np.asarray(predicted)
        style = {"color": "black", "linestyle": ("--", ":")[index], "marker": ""}
        shown = predicted > results["log10_residual"].min() - 6
        ax.plot(k[shown], predicted[shown], label=f"predicted, {label}", **style)
    ax.set(ylabel=r"$\log_{10}\|\cdot\|_{1,\infty}$", title="all paths of one length")
    ax = axes[0, 1]
    counts = np.array([float(c) for c in count_paths(config.depth, config.num_heads)])
    ax.bar(k, counts / counts.sum(), width=0.85, color=figures.color(5), label="share of paths")
    for index, name in enumerate(("log10_norm", "log10_residual")):
        size = 10 ** (results[name] - results[name].max(axis=1, keepdims=True))
        share = size / size.sum(axis=1, keepdims=True)
        label = ("share of the norms", "share of the residuals")[index]
        figures.band(ax, k, share, label, index)
    ax.set(ylabel="share", title="counted and weighed")
    ax.set_ylim(0, 1.35 * ax.get_ylim()[1])  # room for the legend
    ax = axes[0, 2]
    for index, size in enumerate(SAMPLES):
        error = results["estimate_error"][:, index]
        error = np.moveaxis(error, 1, 2).reshape(-1, config.depth)
        style = {"color": figures.color(index), "marker": figures.MARKERS[index]}
        ax.plot(k[1:], np.median(error, axis=0), label=f"{size} sampled paths", **style)
        low, high = np.quantile(error, (0.25, 0.75), axis=0)
        ax.fill_between(k[1:], low, high, color=style["color"], alpha=0.2, linewidth=0)
    ax.axhline(1, color="#555555", lw=0.9, ls="--")
    ax.set(yscale="log", ylabel="relative error", title="a sum estimated from few paths")
    for ax in axes[0]:
        ax.set_xlabel("path length")
        figures.integer_ticks(ax)
        ax.legend(loc="best", fontsize=7)
    return fig
