"""Figures of run_lens: shares by path length, frozen against exact, ranks by distance."""

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
    """Influence on later tokens by the number of attentions passed, along a random direction, from
    the earliest state: parts projected on their sum (shares, which add up to 1), and sizes of the
    parts over that of the sum. Bands over texts."""
    first = results.isel(start=0, drop=True).sel(**PLACE, drop=True)
    fig, axes = figures.panels(len(networks), 3, width=4.0, height=3.0)
    for ax, network in zip(axes.flat, networks, strict=False):
        values = first.sel(network=network.label)
        for index, kind in enumerate(influence.KINDS):
            for name, style in (("share", "-"), ("size", ":")):
                curve = values[f"{name}_{kind}"].dropna("length", how="all")
                label = f"{kind}, {name}"
                curve = curve.transpose("seed", "length")
                figures.band(ax, curve.length.values, curve, label, index, linestyle=style)
        ax.set(title=network.label, xlabel="path length", ylabel="over the sum")
        figures.integer_ticks(ax)
    axes[0, 0].legend(fontsize=7)
    return fig


@figures.styled
def cosine_figure(results: xr.Dataset, networks: Sequence[Network]):
    """Cosine of the frozen sum with the exact Jacobian, by the layer after which paths start; at
    the position that is changed (dashed) and at all later ones. Bands over texts."""
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
    axes[0, 0].legend(fontsize=7)
    return fig


@figures.styled
def ranks_figure(results: xr.Dataset, networks: Sequence[Network]):
    """Effective rank of the exact Jacobian over the width of the states, by distance in tokens."""
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
    )
    fig.axes[0].legend(fontsize=7)
    return fig
