"""The figures of run_collapse."""

from typing import Any

import numpy as np
import xarray as xr

from experiments.lab import labelled
from rank_collapse.measures.rounding import rounding_limit
from rank_collapse.report import figures
from rank_collapse.report.wording import name_axis

# {measure: what it is the tightness of}
TIGHTNESS = {
    "tightness_paper": "sums over heads, γ*",
    "tightness_mean": "around the mean",
    "tightness_diameter": "diameter, tanh",
    "tightness_cubic_diameter": "diameter, c diam³",
}
RATIO = r"residual ratio $\|\mathrm{res}(X^l)\|_{1,\infty} \,/\, \|X^l\|_{1,\infty}$"
NOTE = {"color": figures.DARK_GREY, "fontsize": 7}
AXES = ("norm_placement", "weight_scale", "skip_gain")
LEAST_DRAWN = -40  # log10 of the least ratio that the first figure shows


def style(index: int, count: int) -> dict[str, Any]:
    """Styles a curve: attention with MLPs lies over attention alone, which is a broad pale line."""
    return {} if index else {"linewidth": 5.0, "alpha": 0.35, "marker": ""}


def by_variant(values: xr.DataArray, **options: Any):
    """Draws curves of the variants by layer, a panel for each norm placement and swept value.

    Args:
        values: Over "seed", "layer", "variant", "norm_placement" and the swept values.
        **options: See `labelled.plot_facets`.
    """
    fig, axes = labelled.plot_facets(values, hue="variant", sharey=True, style=style, **options)
    fig.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside right center")
    return fig, axes


def can_show(results: xr.Dataset) -> bool:
    """Returns whether a figure has room for a panel for each norm placement and swept value."""
    return labelled.count_panels(results.ratio, hue="variant") <= labelled.MOST_PANELS


def name_networks(results: xr.Dataset) -> xr.Dataset:
    """Drops the swept axes that titles need not name."""
    return labelled.drop_single_axes(results, but=("norm_placement", "variant", "mlp_gain"))


def raised_constant(results: xr.Dataset) -> xr.DataArray:
    """Computes how much each gain of the MLPs raises Λ = log10‖R_L‖/3^L of pure attention, without
    norms; with norms the run has only the gain 1.
    """
    results = results.sel(norm_placement=[n for n in results.norm_placement.values if n == "none"])
    san = results.log10_residual.sel(variant="san", drop=True)
    return ((results.swept - san) / 3.0 ** san.layer[-1]).isel(layer=-1, drop=True)


def without_skips(results: xr.Dataset) -> xr.Dataset:
    """Selects one gain of the skips, for networks that have none and do not depend on it."""
    return results.isel(skip_gain=0, drop=True)


def choose_published(results: xr.Dataset) -> xr.Dataset | None:
    """Selects the networks that are most like BERT: its norm, skips of gain 1.

    Args:
        results: Over norm placement, weight scale, skip gain, variant, seed and layer.

    Returns:
        Results whose axes have one value, at the first of the scales; None without skips of gain 1.
    """
    if 1 not in results.skip_gain:
        return None
    norms = [*results.norm_placement.values]
    norm = "post" if "post" in norms else norms[0]
    return results.sel(norm_placement=[norm], skip_gain=[1.0]).isel(weight_scale=[0])


def describe_published(results: xr.Dataset) -> str:
    """Names the point of `choose_published` among the points of the run: "weight scale 0.55"."""
    chosen = choose_published(results)
    point = {axis: chosen[axis].item() for axis in AXES if results.sizes[axis] > 1}
    return labelled.describe_point(point)


@figures.styled
def depth_figure(results: xr.Dataset) -> figures.Figure | None:
    """Residual ratio (vertical axis) by layer (horizontal axis) at initialisation. Each line is one
    kind of network. The broad pale line is attention alone. Lines are geometric means over seeds,
    and bands are one standard deviation of the logarithm. In attention alone and in attention with
    MLPs, each layer turns the residual into about its third power, so the lines fall faster with
    every layer. The dotted line is the rounding of float32: a residual ratio below this line could
    not be measured in an ordinary forward pass in float32."""
    chosen = choose_published(results)
    if chosen is None:
        return None
    lost = (chosen.log10_residual - chosen.log10_size).squeeze(AXES, drop=True)
    ratio = 10.0 ** lost.astype(float).clip(min=LEAST_DRAWN - 300)
    fig, ((ax,),) = labelled.plot_facets(
        ratio, hue="variant", style=style, ylabel=RATIO, draw=figures.log_band
    )
    ax.axhline(rounding_limit("float32"), color=figures.DARK_GREY, lw=0.9, ls=":")
    ax.set(yscale="log", ylim=(10.0**LEAST_DRAWN, 10), title=describe_published(results))
    ax.set_yticks(10.0 ** np.arange(LEAST_DRAWN, 1, 10.0))
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles, labels, loc="center right", bbox_to_anchor=(1.0, 0.6))
    return fig


@figures.styled
def residual_ratio_figure(results: xr.Dataset) -> figures.Figure | None:
    """Residual ratio (vertical axis, linear) by layer (horizontal axis). Each panel shows one norm
    placement and one weight scale, and each line shows one kind of network. The broad pale line is
    attention alone. Lines are means and bands are standard deviations over seeds."""
    if not can_show(results):
        return None
    ratio = name_networks(results).ratio
    fig, axes = by_variant(ratio, ylabel=RATIO, width=3.4, height=3.0)
    axes[0, 0].set_ylim(-0.03, 1.03)
    return fig


@figures.styled
def log_residual_figure(results: xr.Dataset) -> figures.Figure | None:
    """Number of powers of ten by which the residual ratio has fallen (vertical axis) up to each
    layer (horizontal axis). Each panel shows one norm placement and one weight scale. Lines are
    geometric means over seeds. The black dashed line triples with each layer. The dotted line is
    attention alone, computed in an ordinary forward pass in float32; rounding errors stop its fall,
    or the line ends because all tokens have become equal."""
    if not can_show(results):
        return None
    results, label = name_networks(results), "powers of ten that the residual ratio has lost"
    start = (results.log10_residual - results.log10_size).isel(layer=0, drop=True)
    lost = start - (results.log10_residual - results.log10_size)
    fig, axes = by_variant(lost, ylabel=label, width=3.6, height=3.4, draw=figures.log_band)
    points = labelled.iterate_points(lost, "seed", "layer", "variant")
    for ax, (point, _) in zip(axes.flat, points, strict=False):
        if "san" in results.variant:
            san_point = {"variant": "san"} | point
            san = results[["plain_log10_residual", "log10_size"]].sel(san_point)
            plain = start.sel(san_point) - san.plain_log10_residual + san.log10_size
            ax.plot(plain.where(plain > 0).mean("seed"), color=figures.color(0), linestyle=":")
            draw_cubic_line(ax, lost.sel(san_point).mean("seed", dtype=float).values)
        ax.set(yscale="log", ylim=(0.01, None))
    return fig


def draw_cubic_line(ax: figures.Axes, lost: np.ndarray) -> None:
    """Draws a line that triples with each layer through the last point of a curve, from 3 powers of
    ten on; nothing if the curve does not triple.

    Args:
        ax: Axes of the figure.
        lost: Powers of ten by layer [L + 1].
    """
    above = np.flatnonzero(lost > 3)
    if len(above) > 1 and lost[-1] > 2.5 * lost[-2]:
        layers = np.arange(above[0], len(lost))
        ax.plot(layers, lost[-1] * 3.0 ** (layers - layers[-1]), "k--", lw=1, zorder=5)


@figures.styled
def local_rate_figure(results: xr.Dataset) -> figures.Figure | None:
    """Rate (vertical axis) by layer (horizontal axis). The rate is the change of the logarithm of
    the residual in a layer, divided by its change in the layer before. At a rate of 3 the collapse
    is doubly exponential. At a rate of 1 the collapse is exponential, or there is no collapse. Each
    panel shows one norm placement and one weight scale."""
    if not can_show(results):
        return None
    label = "local rate\n" + r"$(y_l - y_{l-1}) / (y_{l-1} - y_{l-2}), y = \log\|\mathrm{res}\|$"
    rate = name_networks(results).local_rate
    if rate.isnull().all():
        return None
    fig, axes = by_variant(rate, ylabel=label, width=3.6, height=2.8)
    for ax in axes.flat:
        for level, text in ((3.0, "3: doubly exponential"), (1.0, "1: exponential or none")):
            ax.axhline(level, color=figures.DARK_GREY, lw=0.9, ls="--")
            place = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "top"}
            ax.text(0.99, level - 0.08, text, **place, **NOTE)
        ax.set(ylim=(0.7, 4.1))
    return fig


@figures.styled
def bounds_and_constant_figure(results: xr.Dataset) -> figures.Figure | None:
    """Left: four upper bounds for one layer of attention alone. The vertical axis shows by how many
    powers of ten each bound is larger than the quantity that it bounds. We derived the bound “sums
    over heads, γ*” from the technical lemma of the paper. None of the four bounds needs the
    condition of this lemma. “Around the mean” bounds the residual around the mean token, and the
    two bounds “diameter” bound the largest distance of two tokens. Right: after l layers, log10 of
    the norm of the residual is about Λ 3^l with a constant Λ. Markers show log10‖res‖/3^l, measured
    at each layer. Dashed lines are the same numbers as a recursion of the covariance of the tokens
    predicts them; where measurement and prediction agree, the measured line hides them. Dotted
    lines are the upper bound of Λ that follows from “sums over heads, γ*”, which does not cover
    norms."""
    if "log10_cubic" not in results:
        return None
    san = without_skips(results)
    networks = [
        (labelled.describe_point(point), network.transpose("seed", "layer", ...))
        for point, network in labelled.iterate_points(san, "seed", "layer", "mlp_gain")
        if network.log10_cubic.notnull().any()
    ]
    if not networks:
        return None
    fig, ((bounds_ax, constant_ax),) = figures.figure(1, 2, width=4.2, height=3.1)
    layers = np.arange(results.sizes["layer"])
    # The theorems do not cover norms: the first of the networks that have a bound.
    shown, bounded = next(filter(has_bound, networks), networks[0])
    for index, (name, text) in enumerate(TIGHTNESS.items()):
        if name in results and bounded[name].notnull().any():
            figures.band(bounds_ax, layers[1:], bounded[name][:, 1:], text, index)
    for index, (title, network) in enumerate(networks):
        style = {"color": figures.color(index)}
        figures.band(constant_ax, layers, network.log10_residual / 3.0**layers, title, index)
        constant_ax.plot((network.log10_cubic / 3.0**layers).mean("seed"), linestyle="--", **style)
        if "log10_c" in network and network.log10_c.notnull().any():
            theorem = float((network.log10_residual[:, 0] + network.log10_c[:, 0] / 2).mean())
            constant_ax.axhline(theorem, linestyle=":", **style)
    name = shown if len(networks) > 1 else ""
    title = ": ".join(filter(None, ("bounds of one layer", name)))
    bounds_ax.set(ylabel="powers of ten above the bounded quantity")
    bounds_ax.set_title(title, fontsize=8 if name else None)
    constant_ax.set(
        ylabel=r"$\Lambda_l = \log_{10}\|\mathrm{res}(X^l)\| \,/\, 3^l$", title=r"$3^l$ law"
    )
    figures.finish_axes([bounds_ax, constant_ax], "layer")
    return fig


def has_bound(network: tuple[str, xr.Dataset]) -> bool:
    """Returns whether a network, with its title, has a bound at any layer."""
    return any(name in network[1] and network[1][name].notnull().any() for name in TIGHTNESS)


@figures.styled
def sweep_weight_scale_figure(results: xr.Dataset) -> figures.Figure | None:
    """Residual ratio (vertical axis) by layer (horizontal axis) at several scales of the initial
    weights; 0.55 is BERT's scale, and 1 is 1/√fan-in. Each panel shows one kind of network with one
    norm placement."""
    return sweep_figure(results, "weight_scale")


@figures.styled
def sweep_skip_gain_figure(results: xr.Dataset) -> figures.Figure | None:
    """Residual ratio by layer at each gain of the skips. Each panel shows one kind of network."""
    return sweep_figure(results, "skip_gain")


def sweep_figure(results: xr.Dataset, swept: str) -> figures.Figure | None:
    """Draws a panel for each network and a shade for each swept value; nothing for a single value.

    Args:
        results: Results of `run_collapse.measure`.
        swept: The axis of the values.
    """
    if results.sizes[swept] == 1:
        return None
    ratio = name_networks(results).ratio
    if labelled.count_panels(ratio, hue=swept) > labelled.MOST_PANELS:
        return None
    colors = figures.shades(ratio.sizes[swept])
    fig, axes = labelled.plot_facets(
        ratio,
        hue=swept,
        ylabel=RATIO,
        width=3.0,
        height=2.7,
        sharey=True,
        style=lambda index, count: {"color": colors[index], "marker": ""},
    )
    for ax in axes.flat:
        ax.set_title(ax.get_title(), fontsize=8)
    handles = axes[0, -1].get_legend_handles_labels()
    fig.legend(*handles, title=name_axis(swept), loc="outside right center")
    return fig


@figures.styled
def mlp_gain_figure(results: xr.Dataset) -> figures.Figure | None:
    """The gain from which on MLPs slow the collapse. The gain (horizontal axis) multiplies the
    output of each MLP. Without skips, log10 of the norm of the residual after l layers is about Λ
    3^l, with a constant Λ that is larger if the collapse is slower. The vertical axis is Λ of
    attention with MLPs minus Λ of attention alone. Where this difference is above 0, MLPs slow the
    collapse."""
    if "swept" not in results or "san" not in results.variant:
        return None
    raised = raised_constant(name_networks(without_skips(results)))
    if not raised.size or labelled.count_panels(raised, "mlp_gain") > labelled.MOST_PANELS:
        return None
    fig, axes = labelled.plot_facets(raised, "mlp_gain", width=3.4, height=2.8, sharey=True)
    for ax in axes.flat:
        ax.axhline(0, color=figures.DARK_GREY, lw=0.9, ls="--")
        ax.set_xscale("log", base=2)
        ax.set_xticks(raised.mlp_gain.values, [f"{gain:g}" for gain in raised.mlp_gain.values])
    axes[0, 0].set_ylabel("Λ with MLPs − Λ of attention alone\n(above 0: slower, below: faster)")
    return fig
