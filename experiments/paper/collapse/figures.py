"""The figures of run_collapse."""

from typing import Any

import numpy as np
import xarray as xr

from experiments.lab import labelled, name_figures
from rank_collapse.report import figures

# {measure: what it is the tightness of}
TIGHTNESS = {
    "tightness_paper": "sums over heads, γ*",
    "tightness_mean": "around the mean",
    "tightness_diameter": "diameter, tanh",
    "tightness_cubic_diameter": "diameter, c diam³",
}
RATIO = r"residual ratio $\|\mathrm{res}(X^l)\|_{1,\infty} \,/\, \|X^l\|_{1,\infty}$"
NOTE = {"color": "#555555", "fontsize": 7}


def style(index: int, count: int) -> dict[str, Any]:
    """Styles a curve: attention alone lies under attention with MLPs, a broad pale line."""
    return {} if index else {"linewidth": 5.0, "alpha": 0.35, "marker": ""}


def first(results: xr.Dataset, *kept_axes: str) -> xr.Dataset:
    """Selects the networks at the first of the swept values, of axes that are not kept."""
    swept = {"weight_scale", "skip_gain"}.difference(kept_axes)
    return results.isel(dict.fromkeys(swept, 0), drop=True)


def describe_first(results: xr.Dataset) -> str:
    """Names the networks that `first` selects, " (weight scale 0.25, skip gain 0)"; "" of all."""
    axes = [n for n in ("weight_scale", "skip_gain") if results.sizes.get(n, 1) > 1]
    point = {name: results[name].values[0].item() for name in axes}
    return f" ({labelled.describe_point(point)})" if point else ""


def by_variant(values: xr.DataArray, **options: Any):
    """Draws curves of the variants by layer, a panel for each norm placement.

    Args:
        values: Over "seed", "layer", "variant" and "norm_placement".
        **options: As of `labelled.plot_facets`.
    """
    fig, axes = labelled.plot_facets(
        values, hue="variant", col="norm_placement", sharey=True, style=style, **options
    )
    fig.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside right center")
    return fig, axes


def raised_constant(results: xr.Dataset) -> xr.DataArray:
    """Computes by how much each gain of the MLPs raises Λ = log10‖R_L‖/3^L of pure attention,
    without norms: with them the run has no other gain than 1.
    """
    results = results.sel(norm_placement=[n for n in results.norm_placement.values if n == "none"])
    san = results.log10_residual.sel(variant="san", drop=True)
    return ((results.swept - san) / 3.0 ** san.layer[-1]).isel(layer=-1, drop=True)


def as_published(results: xr.Dataset) -> xr.Dataset:
    """Selects the networks with BERT's norm, where the run has it, at the first of the swept
    values.
    """
    norms = [*results.norm_placement.values]
    return first(results).sel(norm_placement=["post" if "post" in norms else norms[0]])


def depth_figure(results: xr.Dataset, setup: Any) -> figures.Figure:
    """Residual ratio by layer at initialisation, on English text: mean and standard deviation over
    seeds. Attention alone and with MLPs fall together, within two layers."""
    ratio = as_published(results).ratio
    fig, ((ax,),) = labelled.plot_facets(ratio, hue="variant", style=style, ylabel=RATIO)
    ax.set(ylim=(-0.03, 1.03), title=describe_first(results).strip(" ()"))
    ax.legend(loc="center", bbox_to_anchor=(0.55, 0.4))
    return fig


def residual_ratio_figure(results: xr.Dataset, setup: Any) -> figures.Figure:
    """The same with and without norms."""
    fig, axes = by_variant(first(results).ratio, ylabel=RATIO, width=3.4, height=3.0)
    axes[0, 0].set_ylim(-0.03, 1.03)
    fig.suptitle(describe_first(results).strip(" ()"), fontsize=9)
    return fig


def log_residual_figure(results: xr.Dataset, setup: Any) -> figures.Figure:
    """By how many powers of ten the residual ratio falls, to any depth; geometric means over seeds.
    Black, dashed: three times as many with each layer. Dotted: what an ordinary float32 forward
    pass shows of attention alone."""
    results, label = first(results), "powers of ten that the residual ratio has lost"
    start = (results.log10_residual - results.log10_size).isel(layer=0, drop=True)
    lost = start - (results.log10_residual - results.log10_size)
    fig, axes = by_variant(lost, ylabel=label, width=3.6, height=3.4, draw=figures.log_band)
    if "san" in results.variant:
        panels = labelled.iterate_points(results.sel(variant="san"), "seed", "layer", "mlp_gain")
        for ax, (point, panel) in zip(axes[0], panels, strict=True):
            san_point = {"variant": "san"} | point
            plain = start.sel(san_point) - panel.plain_log10_residual + panel.log10_size
            ax.plot(plain.where(plain > 0).mean("seed"), color=figures.color(0), linestyle=":")
            draw_cubic_line(ax, lost.sel(san_point).mean("seed", dtype=float).values)
    for ax in axes[0]:
        ax.set(yscale="log", ylim=(0.01, None))
    return fig


def draw_cubic_line(ax: Any, lost: np.ndarray) -> None:
    """Draws a line that triples with each layer through the last point of a curve, from where this
    is above 3 powers of ten; nothing where the curve does not triple.

    Args:
        ax: Axes of the figure.
        lost: Powers of ten by layer [L + 1].
    """
    above = np.flatnonzero(lost > 3)
    if len(above) > 1 and lost[-1] > 2.5 * lost[-2]:
        layers = np.arange(above[0], len(lost))
        ax.plot(layers, lost[-1] * 3.0 ** (layers - layers[-1]), "k--", lw=1, zorder=5)


def local_rate_figure(results: xr.Dataset, setup: Any) -> figures.Figure:
    """Local rate of the logarithms: 3 is doubly exponential collapse, 1 exponential or none."""
    label = "local rate\n" + r"$(y_l - y_{l-1}) / (y_{l-1} - y_{l-2}), y = \log\|\mathrm{res}\|$"
    fig, axes = by_variant(first(results).local_rate, ylabel=label, width=3.6, height=2.8)
    for ax in axes[0]:
        for level, text in ((3.0, "3: doubly exponential"), (1.0, "1: exponential or none")):
            ax.axhline(level, color="#555555", lw=0.9, ls="--")
            place = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "top"}
            ax.text(0.99, level - 0.08, text, **place, **NOTE)
        ax.set(ylim=(0.7, 4.1))
    return fig


def has_law(results: xr.Dataset) -> bool:
    """Returns whether the first networks have a law in closed form."""
    return "log10_cubic" in results and bool(first(results).log10_cubic.notnull().any())


def bounds_and_constant_figure(results: xr.Dataset, setup: Any) -> figures.Figure | None:
    """Left: how many powers of ten the bounds of one layer of attention alone lie above what they
    bound; all but the paper's need no condition. Right: the constant of the 3^l law as each depth
    shows it (markers), from the closed recursion of the covariance (dashed), and by the theorem
    (dotted), which does not cover norms."""
    if not has_law(results):
        return None
    fig, ((bounds_ax, constant_ax),) = figures.figure(1, 2, width=4.2, height=3.1)
    networks = [
        (labelled.describe_point(point), network.transpose("seed", "layer", ...))
        for point, network in labelled.iterate_points(first(results), "seed", "layer", "mlp_gain")
        if network.log10_cubic.notnull().any()
    ]
    layers = np.arange(results.sizes["layer"])
    for index, (name, text) in enumerate(TIGHTNESS.items()):
        if name in results and networks[0][1][name].notnull().any():
            figures.band(bounds_ax, layers[1:], networks[0][1][name][:, 1:], text, index)
    for index, (title, network) in enumerate(networks):
        style = {"color": figures.color(index)}
        figures.band(constant_ax, layers, network.log10_residual / 3.0**layers, title, index)
        constant_ax.plot((network.log10_cubic / 3.0**layers).mean("seed"), linestyle="--", **style)
        if "log10_c" in network and network.log10_c.notnull().any():
            theorem = float((network.log10_residual[:, 0] + network.log10_c[:, 0] / 2).mean())
            constant_ax.axhline(theorem, linestyle=":", **style)
    bounds_ax.set(ylabel="powers of ten above what is bounded", title="bounds of one layer")
    constant_ax.set(
        ylabel=r"$\Lambda_l = \log_{10}\|\mathrm{res}(X^l)\| \,/\, 3^l$", title="3^l law"
    )
    figures.finish_axes([bounds_ax, constant_ax], "layer")
    return fig


def sweep_weight_scale_figure(results: xr.Dataset, setup: Any) -> figures.Figure | None:
    """Relative residual at BERT's weight scale (0.55) and at 1/√fan-in."""
    return sweep_figure(results, "weight_scale")


def sweep_skip_gain_figure(results: xr.Dataset, setup: Any) -> figures.Figure | None:
    """Relative residual at each gain of the skips."""
    return sweep_figure(results, "skip_gain")


def sweep_figure(results: xr.Dataset, swept: str) -> figures.Figure | None:
    """Draws a panel for each network, a shade for each swept value; nothing of a single value.

    Args:
        results: From `run_collapse.measure`.
        swept: The axis of the values.
    """
    if results.sizes[swept] == 1:
        return None
    ratio = first(results, swept).ratio.stack(network=("norm_placement", "variant"))
    colors = figures.shades(ratio.sizes[swept])
    fig, axes = labelled.plot_facets(
        ratio,
        hue=swept,
        col="network",
        columns=4,
        ylabel=RATIO,
        width=3.0,
        height=2.7,
        sharey=True,
        style=lambda index, count: {"color": colors[index], "marker": ""},
    )
    for ax, (norm, variant) in zip(axes.flat, ratio.network.values, strict=False):
        ax.set_title(labelled.describe_point({"variant": variant, "norm_placement": norm}))
    handles = axes[0, -1].get_legend_handles_labels()
    fig.legend(*handles, title=swept.replace("_", " "), loc="outside right center")
    return fig


def mlp_gain_figure(results: xr.Dataset, setup: Any) -> figures.Figure | None:
    """By how much MLPs raise the constant Λ above pure attention's, against their gain: above 0
    they slow the collapse."""
    if "swept" not in results or "san" not in results.variant:
        return None
    raised = raised_constant(first(results))
    if not raised.size:
        return None
    fig, axes = labelled.plot_facets(
        raised, "mlp_gain", col="norm_placement", width=3.4, height=2.8, sharey=True
    )
    for ax in axes[0]:
        ax.axhline(0, color="#555555", lw=0.9, ls="--")
        ax.set_xscale("log", base=2)
        ax.set_xticks(raised.mlp_gain.values, [f"{gain:g}" for gain in raised.mlp_gain.values])
        ax.set_xlabel("gain of the MLPs")
    axes[0, 0].set_ylabel("Λ with MLPs − Λ of attention alone\n(above 0: slower, below: faster)")
    return fig


FIGURES = name_figures(
    depth_figure,
    residual_ratio_figure,
    log_residual_figure,
    local_rate_figure,
    bounds_and_constant_figure,
    mlp_gain_figure,
    sweep_weight_scale_figure,
    sweep_skip_gain_figure,
)
