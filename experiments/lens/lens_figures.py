"""Figures of run_lens: shares by path length, frozen and exact, ranks by distance."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from experiments.lab import labelled
from experiments.lens import influence
from experiments.lens.lens_results import PLACE, list_ranks
from experiments.trained.opened_networks import Network
from rank_collapse.report import figures


@figures.styled
def shares_figure(results: xr.Dataset, networks: Sequence[Network]):
    """How a change of an early state influences the last states of later tokens; each panel shows
    one network. We change the state along a random direction. The influence is a sum of parts, one
    part for each path length. The path length (horizontal axis) is the number of attentions on a
    path. The vertical axis shows the share of each part in the influence: the projection of the
    part on the sum of all parts, divided by the norm of this sum. Shares add up to 1. The line
    “exact” shows the parts of the exact Jacobian. The line “frozen” shows the parts of the sum over
    paths with fixed attention weights. Bands are one standard deviation over texts."""
    return plot_lengths(results, networks, "share", "share of the sum")


@figures.styled
def sizes_figure(results: xr.Dataset, networks: Sequence[Network]):
    """How much the parts of an influence cancel; each panel shows one network. Each part belongs to
    one path length, which is the number of attentions on a path (horizontal axis). The vertical
    axis shows the norm of each part, divided by the norm of the sum of all parts. Where parts
    cancel, these quotients add up to more than 1. The line “exact” shows the parts of the exact
    Jacobian, and the line “frozen” shows the parts of the frozen sum. Each panel has its own
    vertical scale. Bands are one standard deviation over texts."""
    return plot_lengths(results, networks, "size", "size over that of the sum")


def plot_lengths(results: xr.Dataset, networks: Sequence[Network], name: str, ylabel: str):
    """Plots a measure of the parts by path length, exact and frozen, in a panel for each network.

    Args:
        results: The results.
        networks: The networks and their texts.
        name: "share" or "size".
        ylabel: Label of the vertical axes.
    """
    first = results.isel(start=0, drop=True).sel(**PLACE, drop=True)
    fig, axes = figures.panels(len(networks), 3, width=4.0, height=3.0)
    for ax, network in zip(axes.flat, networks, strict=False):
        values = first.sel(network=network.label)
        for index, kind in enumerate(influence.KINDS):
            curve = values[f"{name}_{kind}"].dropna("length", how="all")
            curve = curve.transpose("seed", "length")
            figures.band(ax, curve.length.values, curve, kind, index)
        ax.set(title=network.label, xlabel="path length", ylabel=ylabel)
        figures.integer_ticks(ax)
    axes[0, 0].legend()
    return fig


@figures.styled
def cosine_figure(results: xr.Dataset, networks: Sequence[Network]):
    """Cosine between the frozen sum and the exact Jacobian (vertical axis), by the layer after
    which we change the state of one token (horizontal axis). Each panel shows one network. Dashed
    lines compare the last state of the changed token, and solid lines compare the last states of
    all later tokens. Colours stand for the direction of the change: “random” is a random direction,
    “state” is the direction of the state itself, and “next” is the row of the language-model head
    for the next token. Bands are one standard deviation over texts."""
    fig, axes = figures.panels(len(networks), 3, width=4.0, height=3.0)
    for ax, network in zip(axes.flat, networks, strict=False):
        values = results.sel(network=network.label)
        layers = values.from_layer.mean("seed").values
        for index, direction in enumerate(influence.DIRECTIONS):
            for position, style in zip(influence.POSITIONS, ("--", "-"), strict=True):
                curve = values.cosine.sel(direction=direction, position=position)
                if not np.isfinite(curve).any():
                    continue
                label = f"{direction}, {position}"
                curve = curve.transpose("seed", "start")
                figures.band(ax, layers, curve, label, index, linestyle=style)
        ax.axhline(0, color="gray", linewidth=0.5)
        ax.set(title=network.label, xlabel="layer", ylabel="cosine", ylim=(-1.05, 1.05))
        figures.integer_ticks(ax)
    curves = {}  # {label: handle}, each once
    for ax in axes.flat:
        handles, labels = ax.get_legend_handles_labels()
        curves |= dict(zip(labels, handles, strict=True))
    fig.legend(curves.values(), curves, loc="outside lower center", ncols=3)
    return fig


@figures.styled
def ranks_figure(results: xr.Dataset, networks: Sequence[Network]):
    """Effective rank of the exact Jacobian, divided by the width of the states (vertical axis);
    each line is one network. The Jacobian maps a change of the state of one token to the change of
    the last state of another token. The distance between these two tokens is on the horizontal
    axis. The effective rank is exp of the entropy of the singular values, which are first divided
    by their sum."""
    ranks = list_ranks(results).dropna("start", how="all")
    if not ranks.size:
        return None
    widths = {network.label: network.source.config.d_model for network in networks}
    shares = ranks / xr.DataArray([*widths.values()], {"network": [*widths]}, "network")
    fig, _ = labelled.plot_facets(
        shares.isel(start=0, drop=True).dropna("seed", how="all"),
        "distance",
        "network",
        ylabel="effective rank over width",
        style=lambda index, _: {"linestyle": "-" if index < len(figures.COLORS) else "--"},
    )
    fig.axes[0].set_xlabel("distance in tokens")
    fig.legend(loc="outside right upper")
    return fig
