"""The figures of run_trained."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.trained.opened_networks import Network
from experiments.trained.text_measures import ABLATED, AS_PUBLISHED
from experiments.trained.trained_results import Arrays, length_laws, needed_lengths
from rank_collapse.pretrained import PUBLISHED, published_curves
from rank_collapse.printed import format_count
from rank_collapse.report import figures
from rank_collapse.report.path_lengths import plot_length_laws
from rank_collapse.report.wording import words

TITLES = {name: words(variant) for name, variant in ABLATED.items()}

LOGARITHMIC = dict.fromkeys(("alone", "mlps"), lambda logs: logs)


def logarithmic(ax: figures.Axes, **labels: Any) -> None:
    """Makes an axis one of decimal logarithms that fall exponentially themselves."""
    ax.set_yscale("symlog", linthresh=1)
    ax.set(xlabel="layer", ylabel=r"log$_{10}$ of the residual ratio", **labels)
    figures.integer_ticks(ax)


def describe_network(network: Network) -> str:
    """Names a network with its number of layers."""
    config = network.source.config
    causal = ", causal" * (config.mask == "causal")
    return f"{network.label} ({format_count(config.depth, 'layer')}{causal})"


@figures.styled
def trained_figure(results: Mapping[str, Arrays], networks: list[Network]) -> figures.Figure:
    """Trained networks; lines are means over texts. Left: log10 of the residual ratio (vertical
    axis) by layer (horizontal axis), for attention alone (solid) and for the full model (dashed).
    Right: loss of a network truncated to paths through at most k heads, minus the loss of the full
    model (vertical axis), by k (horizontal axis). The truncated network computes its attention
    weights again, from these paths. Bands on the right are one standard deviation over texts."""
    fig, ((residual_ax, loss_ax),) = figures.figure(1, 2, width=4.6, height=3.6)
    for index, network in enumerate(networks):
        arrays, color = results[network.label], figures.color(index)
        attention_alone, whole_network = (
            arrays[f"log10_ratio/{name}"].mean(axis=0) for name in ("alone", "whole")
        )
        style = {"color": color, "marker": "o", "markersize": 3}
        residual_ax.plot(attention_alone, label=describe_network(network), **style)
        residual_ax.plot(whole_network, color=color, linestyle="--")
        if "paths/loss" in arrays:
            excess = arrays["paths/loss_recomputed"] - arrays["paths/loss"][:, None]
            figures.band(loss_ax, arrays["paths/lengths"][0], excess, network.label, index)
    logarithmic(residual_ax, title="attention alone (solid), full model (dashed)")
    loss_ax.set(
        title="loss without longer paths",
        xlabel="longest path: at most k heads",
        ylabel="loss above the full model's, nats",
    )
    figures.integer_ticks(loss_ax)
    for ax in (residual_ax, loss_ax):
        ax.legend(fontsize=7)
    return fig


@figures.styled
def path_lengths_figure(results: Mapping[str, Arrays], networks: list[Network]) -> figures.Figure:
    """How much weight each path length has in trained networks; each panel shows one network. The
    path length (horizontal axis) is the number of heads on a path. The vertical axis shows the
    share of each length in the weight of all paths. Each line weights the paths in another way.
    “Counted”: each path has the weight 1. “Rollout”: the weight of a path is a product with one
    factor for each layer. If the path takes a head in a layer, the factor is the share of attention
    in the sum of attention and skip, divided by the number of heads. If the path takes the skip,
    the factor is the share of the skip in this sum. “Exact sums by norm”: the weight of a length is
    the norm of the sum over all paths of this length. The dashed line is the smallest k at which
    frozen paths of at most k heads have about the loss of the full model, in the median text. A
    panel without a dashed line has no such k among the measured lengths. Bands are one standard
    deviation over texts."""
    networks = [n for n in networks if "paths/loss" in results[n.label]] or networks[:1]
    fig, axes = figures.panels(len(networks), 2, width=4.6, height=3.0)
    for ax, network in zip(axes.flat, networks, strict=False):
        measured = results[network.label]
        if "paths/loss" in measured:
            needed = float(np.median(needed_lengths(measured)))
            plot_length_laws(ax, length_laws(measured, network.source.config), needed)
        ax.set_title(describe_network(network))
    return fig


@figures.styled
def residuals_figure(results: Mapping[str, Arrays], networks: list[Network]) -> figures.Figure:
    """Residual ratio (vertical axis) by layer (horizontal axis) in four variants of the same
    trained networks; each panel shows one variant. Lines are means over texts. Solid lines are
    networks with trained weights, and dotted lines are networks of the same shape with random
    weights. The dashed line is albert-reactions if, as in the published code, the skips of its MLP
    sublayers stay. The upper panels show networks without skips, and their axis is the logarithm of
    the residual ratio. Grey lines are the published curves of the pretrained base versions of BERT
    and ALBERT, at layers where the published value is above 0."""
    fig, axes = figures.panels(len(ABLATED), 2, width=4.4, height=3.2)
    for ax, (name, variant) in zip(axes.flat, ABLATED.items(), strict=True):
        show = LOGARITHMIC.get(name, lambda logs: 10**logs)
        for model, label in (("bert-base-cased", "published"), ("albert-base-v2", "")):
            values = np.array(published_curves(PUBLISHED[model], 12)["pretrained"][variant])
            values = np.log10(np.where(values > 0, values, np.nan))
            ax.plot(show(values), color="0.6", label=label)
        for index, network in enumerate(networks):
            arrays, color = results[network.label], figures.color(index)
            ratio_name = f"log10_ratio/{name}"
            curves = {ratio_name: "-", f"random/{ratio_name}": ":", ratio_name + AS_PUBLISHED: "--"}
            for curve, dash in curves.items():
                if curve in arrays:
                    label = network.label if dash == "-" else ""
                    mean = show(arrays[curve]).mean(axis=0)
                    ax.plot(mean, color=color, linestyle=dash, label=label)
        if name in LOGARITHMIC:
            logarithmic(ax, title=TITLES[name])
        else:
            ax.set(title=TITLES[name], xlabel="layer", ylabel="residual ratio", ylim=(0, None))
            figures.integer_ticks(ax)
    axes[0, 0].legend(fontsize=6)
    return fig
