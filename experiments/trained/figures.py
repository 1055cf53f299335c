"""Figures of the experiments on paths by length, from the results of `training.results_of`."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.trained.training import Setup, diverged, kept
from rank_collapse.report import figures


def figures_of(
    results: dict[str, Any], setup: Setup, sampled: str = "recomputed"
) -> dict[str, Callable[[], Figure]]:
    """What draws each figure, by name: ranks and α where they were measured.

    Args:
        results, setup: What is shown.
        sampled: Semantics of the sampled sets of paths.
    """
    draw = {"paths": functools.partial(path_figure, sampled=sampled), "shares": share_figure}
    draw |= {"loss": loss_figure, "ranks": rank_figure, "alpha": alpha_figure}
    return {
        name: functools.partial(function, results, setup)
        for name, function in draw.items()
        if name in ("paths", "shares", "loss") or name in results
    }


@figures.styled
def path_figure(results: dict[str, Any], setup: Setup, sampled: str = "recomputed") -> Figure:
    """Accuracy against path length: one length alone, as published, and lengths together.

    Error bars and bands are the standard deviation over seeds, repeats averaged in each; `sampled`
    is the semantics of the sampled sets.
    """
    fig, axes = figures.figure(1, 2, width=4.0, height=4.2, sharey=True)
    (one, together), seeds = axes[0], kept(results)
    metric = next(iter(setup.metrics))
    for index, (size, values) in enumerate(sorted(results["sets"].items(), key=_size)):
        v = values[metric][seeds].mean(axis=2)
        one.errorbar(
            results["lengths"] + 0.08 * (index - 0.5), v.mean(axis=0), v.std(axis=0),
            label=f"{size} sampled path{'s' * (int(size) > 1)}, {sampled}", capsize=2,
            color=figures.color(index), marker=figures.MARKERS[index], linewidth=1.0,
        )  # fmt: skip
    index = len(results["sets"])
    found = {n: results[n][metric][seeds] for n in ("exact", "up_to", "from", "truncated")}
    _band(one, found["exact"], "all paths of length k + offset, frozen", index)
    _band(together, found["truncated"], "paths up to k, self-consistent", index + 1)
    _band(together, found["up_to"], "lengths 0..k + offset, frozen", index + 2)
    _band(together, found["from"][:, ::-1], "lengths L−k..L + offset, frozen", index + 3)
    whole = results["whole"][metric][seeds].mean()
    means = {n: float(v[seeds].mean()) for n, v in results["baselines"].items()}
    best = max(means, key=means.get)
    nothing = results["offset"][metric][seeds].mean()
    for ax in (one, together):
        _level(ax, whole, f"whole model ({whole:.2f})", "black", "-")
        _level(ax, means[best], f"{best} baseline ({means[best]:.2f})", "dimgray", "--")
        _level(ax, nothing, f"no path: the offset, frozen ({nothing:.2f})", "firebrick", "-.")
        every = np.arange(found["exact"].shape[1])
        ax.set(xlabel="path length k", xticks=every, ylim=(0, 1.02))
    for key, label in (("whole", "whole model"), ("baseline", "baseline")):
        value = setup.published[key]
        _level(one, value, f"{label}, published ({value:g})", "tab:gray", ":")
    for ax in (one, together):
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=7)
    one.set(ylabel="token accuracy", title="one length")
    together.set(title="several lengths together")
    fig.suptitle(f"{setup.title}, {_seeds(seeds)}")
    return fig


@figures.styled
def share_figure(results: dict[str, Any], setup: Setup) -> Figure:
    """What each length is worth: Shapley values of the accuracy, covariance shares of the logits.

    Both of frozen sums; a covariance share outside 0..1 (dashed) says that lengths cancel.
    """
    fig, axes = figures.figure(1, 2, width=3.4, height=2.8)
    seeds, metric = kept(results), next(iter(setup.metrics))
    shapley, covariance = results["shapley"][metric][seeds], results["covariance"][seeds]
    for ax, values, label in (
        (axes[0, 0], shapley, "Shapley value of the accuracy"),
        (axes[0, 1], covariance, "covariance share of the logits"),
    ):
        lengths = np.arange(values.shape[1])
        ax.bar(lengths, values.mean(axis=0), yerr=values.std(axis=0), capsize=2,
               color=figures.color(0), alpha=0.8)  # fmt: skip
        ax.axhline(0, color="black", lw=0.8)
        ax.set(xlabel="path length k, frozen", ylabel=label, xticks=lengths)
    axes[0, 1].axhline(1, color="dimgray", lw=0.9, ls="--")
    ratio = results["cancellation"][seeds].mean()
    axes[0, 1].set_title(rf"$\Sigma\,\|C_k\| \,/\, \|Y\|$ = {ratio:.2f}")
    total = shapley.sum(axis=1).mean()
    axes[0, 0].set_title(f"sum {total:.2f}: whole model less offset")
    fig.suptitle(f"{setup.title}, {_seeds(seeds)}")
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


def _band(ax, values, label, index):
    figures.band(ax, np.arange(values.shape[1]), values, label=label, index=index)


def _size(item):
    return int(item[0])


def _level(ax, value, label, color, style):
    ax.axhline(value, label=label, color=color, linestyle=style, linewidth=1.1)


def _seeds(seeds):
    return f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"
