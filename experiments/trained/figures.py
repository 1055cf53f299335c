"""Figures of the experiments on paths by length, from the results of `training.results_of`."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.trained.training import Setup, diverged, kept
from rank_collapse.report import figures


def figures_of(results: dict[str, Any], setup: Setup) -> dict[str, Callable[[], Figure]]:
    """What draws each figure, by name: ranks and α where they were measured."""
    draw = {"paths": path_figure, "loss": loss_figure, "ranks": rank_figure, "alpha": alpha_figure}
    return {
        name: functools.partial(function, results, setup)
        for name, function in draw.items()
        if name in ("paths", "loss") or name in results
    }


@figures.styled
def path_figure(results: dict[str, Any], setup: Setup) -> Figure:
    """The published figure: accuracy against path length, with what it left out."""
    fig, axes = figures.figure(1, 1, width=5.6, height=3.8)
    ax, seeds = axes[0, 0], kept(results)
    metric = next(iter(setup.metrics))
    sets = sorted(results["sets"].items(), key=lambda item: int(item[0]))
    for index, (size, values) in enumerate(sets):
        v = values[metric][seeds]  # [s, k, r]
        spread = v.transpose(0, 2, 1).reshape(-1, v.shape[1])
        ax.errorbar(
            results["lengths"] + 0.08 * (index - 0.5), spread.mean(axis=0), spread.std(axis=0),
            label=f"{size} sampled path{'s' * (int(size) > 1)}", color=figures.color(index),
            capsize=2, marker=figures.MARKERS[index], linewidth=1.0,
        )  # fmt: skip
    everything = np.arange(results["exact"][metric].shape[1])
    for index, (name, label) in enumerate(
        (("exact", "all paths of the length"), ("up_to", "all paths up to the length")), len(sets)
    ):
        figures.band(ax, everything, results[name][metric][seeds], label=label, index=index)
    whole = results["whole"][metric][seeds].mean()
    _level(ax, whole, f"whole model, measured ({whole:.2f})", "black", "-")
    means = {n: float(v[seeds].mean()) for n, v in results["baselines"].items()}
    best = max(means, key=means.get)
    _level(ax, means[best], f"{best} baseline, measured ({means[best]:.2f})", "dimgray", "--")
    for key, label in (("whole", "whole model"), ("baseline", "baseline")):
        value = setup.published[key]
        _level(ax, value, f"{label}, published ({value:g})", "tab:gray", ":")
    ax.set(xlabel="path length", ylabel="token accuracy", xticks=everything, ylim=(0, 1.02))
    ax.set_title(f"{setup.title}, {_seeds(seeds)}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    return fig


@figures.styled
def loss_figure(results: dict[str, Any], setup: Setup) -> Figure:
    """Training loss of every seed that did not diverge, and of those that did until they did."""
    fig, axes = figures.figure(1, 1)
    ax, losses, seeds, apart = axes[0, 0], results["losses"], kept(results), diverged(results)
    epochs = np.arange(1, losses.shape[1] + 1)
    figures.band(ax, epochs, losses[seeds], label=_seeds(seeds), marker="")
    for seed in apart:
        ax.plot(epochs, losses[seed], color=figures.color(1), linewidth=0.8)
    if apart:
        ax.plot([], [], color=figures.color(1), label=f"diverged: {len(apart)}")
    ax.set(xlabel="epoch", ylabel="training loss", title=setup.title)
    ax.legend()
    return fig


@figures.styled
def rank_figure(results: dict[str, Any], setup: Setup) -> Figure:
    """Ranks of hidden states and attention matrices by layer, and the residual."""
    fig, axes = figures.figure(1, 2)
    panels = (
        ("rank", axes[0, 0], "hidden states, σ > 0.5"),
        ("effective_rank", axes[0, 0], "hidden states, effective"),
        ("attention_rank", axes[0, 0], "attention matrices, effective"),
        ("residual_ratio", axes[0, 1], "hidden states"),
    )
    for index, (name, ax, label) in enumerate(panels):
        values = results["ranks"][name][kept(results)]
        first = 1 if name == "attention_rank" else 0
        layers = first + np.arange(values.shape[1])
        figures.band(ax, layers, values, label=label, index=index)
    for ax, text in zip(axes[0], ("rank", "‖res(X)‖ / ‖X‖"), strict=True):
        ax.set(xlabel="layer", ylabel=text)
        ax.legend()
    fig.suptitle(setup.title)
    return fig


@figures.styled
def alpha_figure(results: dict[str, Any], setup: Setup) -> Figure:
    """α_l, the weight of the skip, by layer."""
    fig, axes = figures.figure(1, 1)
    values = results["alpha"][kept(results)]
    figures.band(axes[0, 0], 1 + np.arange(values.shape[1]), values)
    axes[0, 0].set(xlabel="layer", ylabel="α, weight of the skip", title=setup.title, ylim=(0, 1))
    return fig


def _level(ax, value, label, color, style):
    ax.axhline(value, label=label, color=color, linestyle=style, linewidth=1.1)


def _seeds(seeds):
    return f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"
