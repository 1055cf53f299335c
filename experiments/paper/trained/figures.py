"""The figures of run_trained."""

import json
from importlib import resources
from typing import Any

import numpy as np

from experiments.paper.trained.measure import VARIANTS
from rank_collapse.pretrained import PUBLISHED
from rank_collapse.report import figures

TITLES = {
    "alone": "attention alone",
    "mlps": "attention and MLPs",
    "skips": "attention and skips",
    "whole": "whole network",
}
LAYER = "layer"


def published() -> dict[str, dict[str, np.ndarray]]:
    """{model: {variant: log10 of the residual ratio by layer}}, pretrained BERT and ALBERT."""
    text = resources.files("rank_collapse").joinpath("data/published_residual_curves.json")
    curves = json.loads(text.read_text("utf-8"))["curves"]
    return {
        name: {v: np.log10(values) for v, values in curves[name]["pretrained"].items()}
        for name in list(PUBLISHED)[:2]
    }


def logarithmic(ax: Any) -> None:
    """An axis of decimal logarithms that fall exponentially themselves."""
    ax.set_yscale("symlog", linthresh=1)
    ax.set(xlabel=LAYER, ylabel="log10 of the residual ratio")
    figures.integer_ticks(ax)


def trained_figure(results: Any, setup: Any) -> Any:
    """Trained networks, means over texts. Left: the residual ratio by layer, of attention alone
    (solid) and of the whole network (dashed). Right: how far the loss of all paths through at most
    k heads, attention recomputed, lies above the whole network's."""
    fig, ((left, right),) = figures.figure(1, 2, width=4.6, height=3.6)
    for index, network in enumerate(setup.networks):
        found, depth = results[network.label], network.source.config.depth
        for name, dash in {"alone": "-", "whole": "--"}.items():
            mean = found[f"log10_ratio/{name}"].mean(axis=0)
            about = {"color": figures.color(index), "linestyle": dash, "markersize": 3}
            label = f"{network.label} ({depth} layers)" if name == "alone" else None
            left.plot(mean, marker="o" if name == "alone" else "", label=label, **about)
        if "paths/loss" in found:
            above = found["paths/loss_recomputed"] - found["paths/loss"][:, None]
            lengths = found["paths/lengths"][0]
            figures.band(right, lengths, above, f"{network.label}", index)
    logarithmic(left)
    left.set(title="Attention alone (solid), whole network (dashed)")
    right.set(
        title="Short paths suffice",
        xlabel="longest path: no more than k heads",
        ylabel="loss above the whole network's, nats",
    )
    figures.integer_ticks(right)
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    return fig


def residuals_figure(results: Any, setup: Any) -> Any:
    """The residual ratio by layer in four variants of the same weights: trained (solid), weights
    of the same shape at random (dotted); in grey the published curves of pretrained BERT and
    ALBERT (base)."""
    fig, axes = figures.panels(len(VARIANTS), 2, width=4.4, height=3.2)
    for ax, (name, variant) in zip(axes.flat, VARIANTS.items(), strict=True):
        for model, curves in published().items():
            ax.plot(curves[variant], color="0.6", linewidth=1, label=f"{model}, published")
        for index, network in enumerate(setup.networks):
            found = results[network.label]
            figures.band(
                ax,
                np.arange(found[f"log10_ratio/{name}"].shape[1]),
                found[f"log10_ratio/{name}"],
                network.label,
                index,
            )
            drawn = found[f"random/log10_ratio/{name}"].mean(axis=0)
            ax.plot(drawn, color=figures.color(index), linestyle=":")
        logarithmic(ax)
        ax.set(title=TITLES[name])
    axes[0, 0].legend(fontsize=6)
    return fig


def paths_figure(results: Any, setup: Any) -> Any:
    """Share of right tokens of all paths through at most k heads: with the attention, norms and
    gates of the whole network (frozen, dotted), or with those of these paths alone (solid). The
    horizontal line is the whole network."""
    there = [n for n in setup.networks if "paths/loss" in results[n.label]]
    fig, axes = figures.panels(len(there), 4, width=3, height=2.6)
    for ax, network in zip(axes.flat, there, strict=False):
        found = results[network.label]
        lengths = found["paths/lengths"][0]
        for index, (kind, dash) in enumerate({"recomputed": "-", "frozen": ":"}.items()):
            values = found[f"paths/right_{kind}"]
            figures.band(ax, lengths, values, kind, index, linestyle=dash)
        ax.axhline(found["paths/right"].mean(), color="0.6")
        ax.set(title=network.label, xlabel="longest path, heads", ylabel="share of right tokens")
        figures.integer_ticks(ax)
    axes[0, 0].legend()
    return fig


def spikes_figure(results: Any, setup: Any) -> Any:
    """Left: the largest entry of a hidden state over the median one, by layer. Right: the share of
    a layer's heads of which one token gets more than .3 of the attention (mean over queries)."""
    fig, ((left, right),) = figures.figure(1, 2, width=4.4, height=3.2)
    there = [n for n in setup.networks if "spikes/spike_entry" in results[n.label]]
    for index, network in enumerate(there):
        found = results[network.label]
        entry, sink = found["spikes/spike_entry"], found["sinks/largest_column"] > 0.3
        figures.band(left, np.arange(entry.shape[1]), entry, network.label, index)
        share = sink.mean(axis=2)
        figures.band(right, np.arange(1, share.shape[1] + 1), share, network.label, index)
    left.set(xlabel=LAYER, ylabel=r"max$|x_{ij}|$ / median$|x_{ij}|$", yscale="log")
    right.set(xlabel=LAYER, ylabel="share of heads that are sinks")
    figures.integer_ticks(left, right)
    left.legend(fontsize=7)
    return fig
