"""The figures of run_collapse."""

from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from experiments.shell import labelled
from experiments.shell.experiment import Drawing, caption_of
from rank_collapse.report import figures
from rank_collapse.report.figures import Figure

# {measure: what it is the tightness of}
TIGHTNESS = {
    "tightness_paper": "sums over heads, γ*",
    "tightness_mean": "around the mean",
    "tightness_diameter": "diameter, tanh",
    "tightness_cubic_diameter": "diameter, c diam³",
}
RATIO = r"$\|\mathrm{res}(X^l)\|_{1,\infty} \,/\, \|X^l\|_{1,\infty}$"
NOTE = {"color": "#555555", "fontsize": 7}
# {measure beside the residual: (label, dashes, width)}; the theorem's bound leaves the axis where
# it says nothing.
BESIDE = {
    "plain_log10_residual": ("the same, plain arithmetic", ":", 1.1),
    "log10_layer_bound": ("layer bound, {}", (0, (5, 1, 1, 1)), 1.0),
    "log10_bound": ("stack bound, {}", (0, (1, 2, 5, 2)), 1.0),
}


def first(found: xr.Dataset, *but: str) -> xr.Dataset:
    """The networks at the first of the swept values."""
    swept = {"weight_scale", "skip_gain"}.difference(but)
    return found.isel(dict.fromkeys(swept, 0), drop=True)


def by_variant(values: xr.DataArray, **options: Any):
    """Curves of the variants by layer, a panel for each norm placement."""
    return labelled.facets(values, hue="variant", col="norm_placement", sharey=True, **options)


def slowed(found: xr.Dataset) -> xr.DataArray:
    """By how much each gain of the MLPs raises Λ = log10‖R_L‖/3^L above pure attention's."""
    san = found.log10_residual.sel(variant="san", drop=True)
    return ((found.swept - san) / 3.0 ** san.layer[-1]).isel(layer=-1, drop=True)


def residual_ratio_figure(found: xr.Dataset, setup: Any) -> Figure:
    """The paper's figure: relative residual by layer, mean and standard deviation over seeds, on
    English text at initialisation."""
    fig, axes = by_variant(first(found).ratio, ylabel=RATIO, width=3.6, height=3.0)
    axes[0, 0].set_ylim(-0.03, None)
    axes[0, -1].legend(loc="best")
    return fig


def log_residual_figure(found: xr.Dataset, setup: Any) -> Figure:
    """The same residuals in logarithms to any depth. Dashed: the law 3^l. Dotted: what an ordinary
    float32 forward pass shows. Dash-dotted: the theorems' bound."""
    found, label = first(found), r"$\log_{10} \|\mathrm{res}(X^l)\|_{1,\infty}$"
    fig, axes = by_variant(found.log10_residual, ylabel=label, width=3.9, height=3.4)
    panels = labelled.points(found, "variant", "seed", "layer", "mlp_gain")
    for ax, (_, own) in zip(axes[0], panels, strict=True):
        ax.set_yscale("symlog", linthresh=1.0, linscale=0.6)
        for index, (point, curves) in enumerate(labelled.points(own, "seed", "layer", "mlp_gain")):
            for measure, (text, dashes, width) in BESIDE.items():
                if measure in curves and curves[measure].notnull().any():
                    ax.plot(
                        curves[measure].mean("seed"),
                        label=text.format(*point.values()) if "{}" in text or not index else None,
                        color=figures.color(index),
                        linestyle=dashes,
                        linewidth=width,
                        marker="",
                    )
        _draw_law(ax, own.log10_residual.mean("seed", dtype=float, skipna=False))
    known = found.log10_residual.where(np.isfinite(found.log10_residual))  # the others are gaps
    axes[0, 0].set_ylim(10 * min(known.min(), -1), 5 * max(known.max(), 1))
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    return fig


def _draw_law(ax, means):
    """The line ∝ 3^l through the end of the first curve that falls like it."""
    for mean in means.transpose("variant", "layer").values:
        falls = mean < -3.0
        if falls[-2:].all() and mean[-1] < 2.5 * mean[-2]:
            layers = np.arange(np.argmax(falls), len(mean))
            line = mean[-1] * 3.0 ** (layers - layers[-1])
            ax.plot(layers, line, "k--", lw=1, label=r"$\propto 3^{l}$", zorder=5)
            return


def local_rate_figure(found: xr.Dataset, setup: Any) -> Figure:
    """Local rate of the logarithms: 3 is doubly exponential collapse."""
    label = r"$\log\|\mathrm{res}(X^{l})\| \,/\, \log\|\mathrm{res}(X^{l-1})\|$"
    fig, axes = by_variant(first(found).local_rate, ylabel=label, width=3.6, height=2.8)
    for ax in axes[0]:
        for level, text in ((3.0, "3: doubly exponential"), (1.0, "1: exponential or none")):
            ax.axhline(level, color="#555555", lw=0.9, ls="--")
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            ax.annotate(text, (1.0, level), xytext=(0, -2), ha="right", va="top", **place, **NOTE)
        ax.set(ylim=(0, 4))
    fig.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside right center")
    return fig


def has_law(found: xr.Dataset, setup: Any) -> bool:
    """Whether the first networks have a law in closed form."""
    return "log10_cubic" in found and bool(first(found).log10_cubic.notnull().any())


def law_figure(found: xr.Dataset, setup: Any) -> Figure:
    """Above: how many powers of ten the bounds of one layer lie above what they bound (all but the
    paper's need no condition). Below: the constant of the 3^l law as each depth shows it, measured,
    from the closed recursion of the covariance, and as the theorem has it."""
    networks = [
        (labelled.setting(point), own)
        for point, own in labelled.points(first(found), "seed", "layer", "mlp_gain")
        if own.log10_cubic.notnull().any()
    ]
    fig, axes = figures.figure(2, len(networks), width=3.6, height=2.8, sharey="row")
    for (above, below), (title, own) in zip(axes.T, networks, strict=True):
        own, layers = own.transpose("seed", "layer", ...), np.arange(own.sizes["layer"])
        tightness = {t: own[n] for n, t in TIGHTNESS.items() if n in own}
        tightness = {t: values for t, values in tightness.items() if values.notnull().any()}
        for index, (label, values) in enumerate(tightness.items()):
            figures.band(above, layers[1:], values[:, 1:], label, index)
        constants = {
            "measured": own.log10_residual / 3.0**layers,
            "closed form": own.log10_cubic / 3.0**layers,
            "theorem": own.log10_residual[:, 0] + own.log10_c / 2 if "log10_c" in own else np.nan,
        }
        for index, (label, values) in enumerate(constants.items()):
            dashed = {"linestyle": "--", "marker": ""} if label == "closed form" else {}
            figures.band(below, layers, values, label, index, **dashed)
        if not tightness:
            text = "the bounds do not\ncover norms or masks"
            above.text(0.5, 0.5, text, ha="center", va="center", transform=above.transAxes, **NOTE)
        above.set(xlabel="layer", title=title)
        below.set(xlabel="depth l")
        figures.integer_ticks(above, below)
    axes[0, 0].set_ylabel(r"$\log_{10}$ bound $-$ $\log_{10}$ of what it bounds")
    axes[1, 0].set_ylabel(r"$\Lambda$: $\log_{10}\|\mathrm{res}(X^l)\| \,/\, 3^l$")
    for ax in (next((a for a in axes[0] if a.lines), axes[1, 0]), axes[1, 0]):
        ax.legend(loc="best")
    return fig


def sweep_figure(found: xr.Dataset, setup: Any, swept: str) -> Figure:
    """One panel per network, one shade per swept value."""
    ratio = first(found, swept).ratio.stack(network=("variant", "norm_placement"))
    fig, axes = labelled.facets(
        ratio,
        hue=swept,
        col="network",
        columns=4,
        ylabel=RATIO,
        width=3.0,
        height=2.7,
        sharey=True,
        style=lambda index, count: {"color": figures.shades(count)[index], "marker": ""},
    )
    axes[0, -1].legend(title=swept.replace("_", " "), loc="best")
    return fig


def gain_figure(found: xr.Dataset, setup: Any) -> Figure:
    """By how much MLPs raise the constant Λ above pure attention's, against their gain: above 0
    they slow the collapse (post-norm: with a skip of their own)."""
    raised = slowed(first(found)).dropna("norm_placement", how="all")
    fig, axes = labelled.facets(
        raised, "mlp_gain", col="norm_placement", width=3.4, height=2.8, sharey=True
    )
    for ax in axes[0]:
        ax.axhline(0, color="#555555", lw=0.9, ls="--")
        ax.set_xscale("log", base=2)
        ax.set_xlabel("gain of the MLPs")
    text = r"$\Lambda$ with MLPs $-$ $\Lambda$ of pure attention"
    axes[0, 0].set_ylabel(text + "\n(above 0: slower, below: faster)")
    return fig


def swept(axis: str, caption: str = "") -> Drawing:
    """The ratio at each of several values of a flag."""
    draw = partial(sweep_figure, swept=axis)
    return Drawing(draw, caption, lambda found, setup: found.sizes[axis] > 1)


FIGURES = {
    **Drawing.all(residual_ratio_figure, log_residual_figure, local_rate_figure),
    "bounds_and_constant": Drawing(law_figure, caption_of(law_figure), has_law),
    "mlp_gain": Drawing.described(gain_figure, there="swept"),
    "sweep_weight_scale": swept(
        "weight_scale", "Relative residual at BERT's weight scale (0.55) and at 1/√fan-in."
    ),
    "sweep_skip_gain": swept("skip_gain"),
}
