"""Figures of sorting, convex hull and memorization: accuracy by path length, training, ranks."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.shell import tidy
from experiments.shell.experiment import Drawing
from experiments.trained.training import Setup, diverged, kept
from rank_collapse.report import figures


def paths_figure(results: Mapping[str, Any], setup: Setup):
    """Accuracy by path length. Left: sampled sets, which attend from their own states, beside the
    exact sum over all paths of the length in the whole model's attention. Right: the network
    without paths longer than k, the sums of the k + 1 shortest and of the k + 1 longest lengths.
    Bars and bands: standard deviation over seeds."""
    fig, axes = figures.figure(1, 2, width=4.0, height=4.2, sharey=True)
    (one, together), seeds = axes[0], kept(results)
    for index, size in enumerate(sorted(results["sets"], key=int)):
        v = results["sets"][size]["accuracy"][seeds].mean(axis=2)
        one.errorbar(
            results["lengths"] + 0.08 * (index - 0.5),
            v.mean(axis=0),
            v.std(axis=0),
            label=f"{size} sampled path{'s' * (int(size) > 1)}, {setup.options.semantics}",
            capsize=2,
            color=figures.color(index),
            marker=figures.MARKERS[index],
            linewidth=1.0,
        )
    found = {n: results[n]["accuracy"][seeds] for n in ("exact", "up_to", "from", "truncated")}
    every = np.arange(found["exact"].shape[1])
    curves = (
        (one, found["exact"], "all paths of length k + offset, frozen"),
        (together, found["truncated"], "paths up to k, self-consistent"),
        (together, found["up_to"], "lengths 0..k + offset, frozen"),
        (together, found["from"][:, ::-1], "lengths L−k..L + offset, frozen"),
    )
    for index, (ax, values, label) in enumerate(curves, len(results["sets"])):
        figures.band(ax, every, values, label=label, index=index)
    whole, nothing = (results[n]["accuracy"][seeds].mean() for n in ("whole", "offset"))
    means = {n: float(v[seeds].mean()) for n, v in results["baselines"].items()}
    best = max(means, key=means.get)
    measured = [
        (whole, f"whole model ({whole:.2f})", "black", "-"),
        (means[best], f"{best} baseline ({means[best]:.2f})", "dimgray", "--"),
        (nothing, f"no path: the offset, frozen ({nothing:.2f})", "firebrick", "-."),
    ]
    published = [
        (setup.published[key], f"{label}, published ({setup.published[key]:g})", "tab:gray", ":")
        for key, label in (("whole", "whole model"), ("baseline", "baseline"))
    ]
    for ax, levels in ((one, measured + published), (together, measured)):
        for value, label, color, style in levels:
            ax.axhline(value, label=label, color=color, linestyle=style, linewidth=1.1)
        ax.set(xlabel="path length k", xticks=every, ylim=(0, 1.02))
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
    one.set(ylabel="token accuracy", title="one length")
    together.set(title="several lengths together")
    fig.suptitle(f"{setup.title}, {_seeds(seeds)}")
    return fig


def shares_figure(results: Mapping[str, Any], setup: Setup):
    """What the biases carry through the whole model's 1/σ, without any path (left), and what each
    length adds in its attention: exact Shapley values of the accuracy (middle), and covariance
    shares of the logits, the offset's first (right): one outside 0..1 says that parts cancel."""
    fig, axes = figures.figure(1, 3, width=3.1, height=2.8)
    seeds = kept(results)
    shapley, covariance = results["shapley"]["accuracy"][seeds], results["covariance"][seeds]
    best = np.max([v[seeds] for v in results["baselines"].values()], axis=0)
    alone = [best, results["offset"]["accuracy"][seeds], results["whole"]["accuracy"][seeds]]
    offset = 1 - covariance.sum(axis=1, keepdims=True)  # the shares of all parts sum to 1
    lengths = list(map(str, range(shapley.shape[1])))
    for ax, values, names, label in zip(
        axes[0],
        (np.stack(alone, axis=1), shapley, np.hstack([offset, covariance])),
        (["best\nbaseline", "offset:\nno path", "whole\nmodel"], lengths, ["offset", *lengths]),
        ("token accuracy", "Shapley value of the accuracy", "covariance share of the logits"),
        strict=True,
    ):
        ax.bar(
            names,
            values.mean(axis=0),
            yerr=values.std(axis=0),
            capsize=2,
            color=figures.color(0),
            alpha=0.8,
        )
        ax.axhline(0, color="black", lw=0.8)
        ax.set(ylabel=label)
    for ax in axes[0, 1:]:
        ax.set(xlabel="path length k, frozen")
    axes[0, 2].axhline(1, color="dimgray", lw=0.9, ls="--")
    axes[0, 2].tick_params("x", labelsize=8)
    ratio = results["cancellation"][seeds].mean()
    axes[0, 2].set_title(rf"$\Sigma\,\|C_k\| \,/\, \|Y\|$ = {ratio:.2f}")
    axes[0, 1].set_title(f"sum {shapley.sum(axis=1).mean():.2f}: whole model less offset")
    axes[0, 0].set_title("what the biases carry")
    fig.suptitle(f"{setup.title}, {_seeds(seeds)}")
    return fig


def loss_figure(results: Mapping[str, Any], setup: Setup):
    """Training loss, mean and standard deviation over seeds that did not diverge; of those that did
    until they did."""
    fig, ((ax,),) = figures.figure(1, 1)
    losses, seeds = results["losses"], kept(results)
    epochs, apart = np.arange(1, losses.shape[1] + 1), losses[diverged(results) > 0]
    figures.band(ax, epochs, losses[seeds], label=_seeds(seeds), marker="")
    lines = ax.plot(epochs, apart.T, color=figures.color(1), linewidth=0.8)
    for line in lines[:1]:
        line.set_label(f"diverged: {len(apart)}")
    ax.set(xlabel="epoch", ylabel="training loss", title=setup.title)
    ax.legend()
    return fig


def ranks_figure(results: Mapping[str, Any], setup: Setup):
    """Ranks of hidden states and attention matrices by layer, and the residual."""
    own = {name: values[kept(results)] for name, values in results["ranks"].items()}
    ranks = {
        "hidden states, σ > 0.5": own["rank"],
        "hidden states, effective": own["effective_rank"],
        "attention matrices, effective": tidy.from_one(own["attention_rank"]),
    }
    groups = {"rank": ranks, "‖res(X)‖ / ‖X‖": {"hidden states": own["residual_ratio"]}}
    fig, axes = figures.curves(groups)
    figures.finish(list(axes[0]), "layer")
    fig.suptitle(setup.title)
    return fig


def alpha_figure(results: Mapping[str, Any], setup: Setup):
    """α_l, the weight of the skip, by layer."""
    groups = {setup.title: {"": results["alpha"][kept(results)]}}
    fig, axes = figures.curves(groups, first=1, ylabel="α, weight of the skip")
    axes[0, 0].set_ylim(0, 1)
    return fig


def _seeds(seeds):
    return f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"


FIGURES = Drawing.all(paths_figure, shares_figure, loss_figure) | {
    "ranks": Drawing(ranks_figure, there=lambda results, setup: "ranks" in results),
    "alpha": Drawing(alpha_figure, there=lambda results, setup: "alpha" in results),
}
