"""The figures of run_collapse: residuals by layer, plain and in logarithms, rates and sweeps."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.collapse.results import (
    LAW,
    TIGHTNESS,
    Results,
    by_variant,
    constants,
    gain_curves,
    rates,
    slowed,
)
from rank_collapse.report import figures

RATIO = r"$\|\mathrm{res}(X^l)\|_{1,\infty} \,/\, \|X^l\|_{1,\infty}$"
NOTE = {"color": "#555555", "fontsize": 7}
# {measure beside the residual: (label, dashes, width)}; the theorem's bound leaves the axis where
# it says nothing.
BESIDE = {
    "plain_log10_residual": ("the same, plain arithmetic", ":", 1.1),
    "log10_layer_bound": ("layer bound, {}", (0, (5, 1, 1, 1)), 1.0),
    "log10_bound": ("stack bound, {}", (0, (1, 2, 5, 2)), 1.0),
}


def first_panels(results: Results) -> dict[str, dict[str, np.ndarray]]:
    """{norm: measures} at the first of the swept values."""
    first = next(iter(results))[1:]
    return {f"norm: {k[0]}": found for k, found in results.items() if k[1:] == first}


def laws_of(results: Results) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """{network: ({bound: tightness [s, L]}, {how: Λ [s, L + 1]})} of those with a closed form."""
    laws = {}
    for panel, found in first_panels(results).items():
        for variant in by_variant(found, "log10_cubic"):
            bounds = {text: found.get(f"{variant}/{name}") for name, text in TIGHTNESS.items()}
            law = (found.get(f"{variant}/{m}") for m in ("log10_residual", *LAW))
            tightness = {text: a[:, 1:] for text, a in bounds.items() if a is not None}
            laws[f"{variant}, {panel}"] = tightness, constants(*law)
    return laws


def gains_of(results: Results) -> dict[str, tuple[list[float], np.ndarray]]:
    """{norm: (gains [g], by how much they raise Λ [s, g])} where MLPs were swept."""
    return {
        panel: (list(curves), slowed(curves, found))
        for panel, found in first_panels(results).items()
        if (curves := gain_curves(found)) and "san/log10_residual" in found
    }


def sweep_of(results: Results, position: int) -> dict[str, dict[str, Any]]:
    """{network: {swept value: ratio}} along one place of the keys, the other at its first value."""
    other = 3 - position
    first, found = next(iter(results))[other], {}
    for key, own in results.items():
        if key[other] == first:
            for variant, ratio in by_variant(own, "ratio").items():
                found.setdefault(f"{variant}, norm: {key[0]}", {})[f"{key[position]:g}"] = ratio
    return found if len(next(iter(found.values()))) > 1 else {}


@figures.styled
def residual_ratio_figure(results: Results, setup: Any) -> Figure:
    """The paper's figure: relative residual by layer, mean and standard deviation over seeds, on
    English text at initialisation."""
    groups = {panel: by_variant(own, "ratio") for panel, own in first_panels(results).items()}
    fig, axes = figures.curves(groups, ylabel=RATIO, width=3.6, height=3.0, sharey=True)
    axes[0, 0].set_ylim(-0.03, None)
    axes[0, -1].legend(loc="best")
    return fig


@figures.styled
def log_residual_figure(results: Results, setup: Any) -> Figure:
    """The same residuals in logarithms to any depth. Dashed: the law 3^l. Dotted: what an ordinary
    float32 forward pass shows. Dash-dotted: the theorems' bound."""
    panels = first_panels(results)
    groups = {panel: by_variant(own, "log10_residual") for panel, own in panels.items()}
    fig, axes = figures.curves(
        groups, ylabel=r"$\log_{10} \|\mathrm{res}(X^l)\|_{1,\infty}$", width=3.9, height=3.4,
        sharey=True,
    )  # fmt: skip
    for ax, found, group in zip(axes[0], panels.values(), groups.values(), strict=True):
        ax.set_yscale("symlog", linthresh=1.0, linscale=0.6)
        for index, variant in enumerate(group):
            for measure, (text, dashes, width) in BESIDE.items():
                values = found.get(f"{variant}/{measure}")
                label = text.format(variant) if "{}" in text or not index else None
                if values is not None:
                    ax.plot(np.mean(values, axis=0), label=label, color=figures.color(index),
                            linestyle=dashes, linewidth=width, marker="")  # fmt: skip
        _draw_law(ax, group)
    known = [v[np.isfinite(v)] for group in groups.values() for v in group.values()]
    known = np.concatenate([[-1.0, 1.0], *known])  # the others are gaps
    axes[0, 0].set_ylim(10 * known.min(), 5 * known.max())
    _legend_outside(fig, axes[0, 0])
    return fig


def _draw_law(ax, group: Mapping[str, np.ndarray]) -> None:
    """The line ∝ 3^l through the end of the first curve that falls like it."""
    for values in group.values():
        mean = np.asarray(values, float).mean(axis=0)
        falls = mean < -3.0
        if falls[-2:].all() and mean[-1] < 2.5 * mean[-2]:
            layers = np.arange(np.argmax(falls), len(mean))
            line = mean[-1] * 3.0 ** (layers - layers[-1])
            ax.plot(layers, line, "k--", lw=1, label=r"$\propto 3^{l}$", zorder=5)
            return


@figures.styled
def local_rate_figure(results: Results, setup: Any) -> Figure:
    """Local rate of the logarithms: 3 is doubly exponential collapse."""
    groups = {
        panel: {variant: rates(a) for variant, a in by_variant(own, "log10_residual").items()}
        for panel, own in first_panels(results).items()
    }
    label = r"$\log\|\mathrm{res}(X^{l})\| \,/\, \log\|\mathrm{res}(X^{l-1})\|$"
    fig, axes = figures.curves(groups, first=1, ylabel=label, width=3.6, height=2.8, sharey=True)
    for ax in axes[0]:
        for level, text in ((3.0, "3: doubly exponential"), (1.0, "1: exponential or none")):
            ax.axhline(level, color="#555555", lw=0.9, ls="--")
            ax.annotate(
                text, (1.0, level), xycoords=("axes fraction", "data"), xytext=(0, -2),
                textcoords="offset points", ha="right", va="top", **NOTE,
            )  # fmt: skip
        ax.set(ylim=(0, 4))
    _legend_outside(fig, axes[0, -1])
    return fig


@figures.styled
def law_figure(laws: dict[str, tuple[Any, Any]], setup: Any) -> Figure:
    """Above: how many powers of ten the bounds of one layer lie above what they bound (all but the
    paper's need no condition). Below: the constant of the 3^l law as each depth shows it, measured,
    from the closed recursion of the covariance, and as the theorem has it."""
    fig, axes = figures.figure(2, len(laws), width=3.6, height=2.8, sharey="row")
    for (above, below), (panel, (tightness, constant)) in zip(axes.T, laws.items(), strict=True):
        for index, (label, values) in enumerate(tightness.items()):
            figures.band(above, np.arange(1, values.shape[1] + 1), values, label, index)
        for index, (label, values) in enumerate(constant.items()):
            dashed = {"linestyle": "--", "marker": ""} if label == "closed form" else {}
            figures.band(below, np.arange(values.shape[1]), values, label, index, **dashed)
        if not tightness:
            text = "the bounds do not\ncover norms or masks"
            above.text(0.5, 0.5, text, ha="center", va="center", transform=above.transAxes, **NOTE)
        above.set(xlabel="layer", title=panel)
        below.set(xlabel="depth l")
        figures.integer_ticks(above, below)
    axes[0, 0].set_ylabel(r"$\log_{10}$ bound $-$ $\log_{10}$ of what it bounds")
    axes[1, 0].set_ylabel(r"$\Lambda$: $\log_{10}\|\mathrm{res}(X^l)\| \,/\, 3^l$")
    for ax in (next((a for a in axes[0] if a.lines), axes[1, 0]), axes[1, 0]):
        ax.legend(loc="best")
    return fig


@figures.styled
def sweep_figure(curves: dict[str, dict[str, Any]], setup: Any, *, swept: str) -> Figure:
    """One panel per network, one shade per swept value."""
    fig, axes = figures.curves(
        curves, columns=4, ylabel=RATIO, width=3.0, height=2.7, sharey=True,
        style=lambda index, count: {"color": figures.shades(count)[index], "marker": ""},
    )  # fmt: skip
    axes[0, -1].legend(title=swept, loc="best")
    return fig


@figures.styled
def gain_figure(found: dict[str, tuple[Any, Any]], setup: Any) -> Figure:
    """By how much MLPs raise the constant Λ above pure attention's, against their gain: above 0
    they slow the collapse (post-norm: with a skip of their own)."""
    fig, axes = figures.figure(1, len(found), width=3.4, height=2.8, sharey=True)
    for ax, (panel, (gains, values)) in zip(axes[0], found.items(), strict=True):
        ax.axhline(0, color="#555555", lw=0.9, ls="--")
        figures.band(ax, np.asarray(gains), values, f"{len(values)} seeds", 0)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="gain of the MLPs", title=panel)
        for place, text, side in ((0.97, "above 0: slower", "top"),
                                  (0.06, "below 0: faster", "bottom")):  # fmt: skip
            ax.text(0.03, place, text, transform=ax.transAxes, va=side, **NOTE)
    axes[0, 0].set_ylabel(r"$\Lambda$ with MLPs $-$ $\Lambda$ of pure attention")
    return fig


def _legend_outside(fig, ax):
    """The legend of one panel to the right of all, where it hides nothing."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside right center", fontsize=7.5)
