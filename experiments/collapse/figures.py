"""The figures of run_collapse: residuals by layer, plain and in logarithms, rates and sweeps."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.collapse.results import (
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


def figures_of(results: Results) -> dict[str, Callable[[], Figure]]:
    """What draws each: the paper's, logarithms and rates of the first swept values, sweeps."""
    first = next(iter(results))[1:]
    panels = {f"norm: {norm}": found for (norm, *swept), found in results.items()
              if tuple(swept) == first}  # fmt: skip

    def curves(measure):
        return {panel: by_variant(found, measure) for panel, found in panels.items()}

    profiles = curves("log10_residual")
    local = {p: {v: rates(a) for v, a in group.items()} for p, group in profiles.items()}
    bounds = (curves("log10_layer_bound"), curves("log10_bound"))
    plain = curves("plain_log10_residual")
    drawn = {
        "residual_ratio": partial(residual_ratio_figure, curves("ratio")),
        "log_residual": partial(log_residual_figure, profiles, *bounds, plain),
        "local_rate": partial(local_rate_figure, local),
    }
    law = {
        f"{variant}, {panel}": law_curves(found, variant)
        for panel, found in panels.items()
        for variant in by_variant(found, "log10_cubic")
    }
    if law:
        drawn["bounds_and_constant"] = partial(law_figure, law)
    gains = {
        panel: (list(gain_curves(found)), slowed(gain_curves(found), found))
        for panel, found in panels.items()
        if gain_curves(found) and "san/log10_residual" in found
    }
    if gains:
        drawn["mlp_gain"] = partial(gain_figure, gains)
    for position, name in ((1, "weight_scale"), (2, "skip_gain")):
        swept = sweep_curves(results, position, first)
        if len(next(iter(swept.values()))) > 1:
            drawn[f"sweep_{name}"] = partial(sweep_figure, swept, name.replace("_", " "))
    return drawn


def law_curves(found: dict[str, np.ndarray], variant: str) -> dict[str, dict[str, np.ndarray]]:
    """{"tightness": {bound: [s, L]}, "constant": {how: [s, L + 1]}} of one network."""
    tightness = {label: found.get(f"{variant}/{name}") for name, label in TIGHTNESS.items()}
    law = (found.get(f"{variant}/{m}") for m in ("log10_residual", "log10_cubic", "log10_c"))
    return {
        "tightness": {label: a[:, 1:] for label, a in tightness.items() if a is not None},
        "constant": constants(*law),
    }


def sweep_curves(results: Results, position: int, first: tuple) -> dict[str, dict[str, Any]]:
    """{network: {swept value: ratio}} along one swept quantity, the other at its first value."""
    other = 3 - position
    panels: dict[str, dict[str, Any]] = {}
    for key, found in results.items():
        if key[other] == first[other - 1]:
            for variant, ratio in by_variant(found, "ratio").items():
                panels.setdefault(f"{variant}, norm: {key[0]}", {})[f"{key[position]:g}"] = ratio
    return panels


@figures.styled
def residual_ratio_figure(curves: Mapping[str, Mapping[str, Any]]) -> Figure:
    """The paper's figure: relative residual by layer, linear axis, one panel per group.

    Args:
        curves: {panel: {curve: values [s, L + 1]}}.
    """
    fig, axes = figures.figure(1, len(curves), width=3.6, height=3.0, sharey=True)
    for ax, (panel, group) in zip(axes[0], curves.items(), strict=True):
        for index, (label, values) in enumerate(group.items()):
            values = np.asarray(values)
            figures.band(ax, np.arange(values.shape[1]), values, label, index)
        ax.set(xlabel="layer", title=panel, ylim=(-0.03, None))
        figures.integer_ticks(ax)
    axes[0, 0].set_ylabel(RATIO)
    axes[0, -1].legend(loc="best")
    return fig


@figures.styled
def log_residual_figure(
    measured: Mapping[str, Mapping[str, Any]],
    layer_bounds: Mapping[str, Mapping[str, Any]],
    stack_bounds: Mapping[str, Mapping[str, Any]],
    plain: Mapping[str, Mapping[str, Any]],
) -> Figure:
    """log10 of the residual by layer, the 3^L line, the bounds, and what plain arithmetic sees.

    The axis of log10‖res‖ is itself logarithmic away from 0, on which the doubly exponential law
    log‖res‖ ∝ 3^l is a straight line.

    Args:
        measured: {panel: {curve: log10 ‖res‖ [s, L + 1]}}; the 3^l line is drawn through the end of
            the first curve that falls like it.
        layer_bounds: {panel: {curve: log10 of a layer's bound from the layer before [s, L + 1]}}.
        stack_bounds: The same of the theorem for all layers so far; it leaves the axis where it
            says nothing.
        plain: {panel: {curve: log10 ‖res‖ as an ordinary forward pass gives it}}.
    """
    fig, axes = figures.figure(1, len(measured), width=3.9, height=3.4, sharey=True)
    lowest, highest = -1.0, 1.0
    for ax, (panel, group) in zip(axes[0], measured.items(), strict=True):
        ax.set_yscale("symlog", linthresh=1.0, linscale=0.6)
        anchored = False
        for index, (label, values) in enumerate(group.items()):
            values = np.asarray(values, float)
            layers = np.arange(values.shape[1])
            known = values[np.isfinite(values)]  # the others are gaps
            lowest, highest = min([lowest, *known.ravel()]), max([highest, *known.ravel()])
            figures.band(ax, layers, values, label, index)
            options = {"linestyle": ":", "marker": "", "linewidth": 1.1}
            note = "the same, plain arithmetic" if index == 0 else None
            seen = np.mean(plain[panel][label], axis=0)
            ax.plot(layers, seen, label=note, color=figures.color(index), **options)
            mean = values.mean(axis=0)
            falls = mean < -3.0
            if not anchored and falls[-2:].all() and mean[-1] < 2.5 * mean[-2]:
                start = int(np.argmax(falls))
                line = mean[-1] * 3.0 ** (layers[start:] - layers[-1])
                ax.plot(layers[start:], line, "k--", lw=1, label=r"$\propto 3^{l}$", zorder=5)
                anchored = True
            for kind, found, dashes in (
                ("layer bound", layer_bounds, (0, (5, 1, 1, 1))),
                ("stack bound", stack_bounds, (0, (1, 2, 5, 2))),
            ):
                if label in found.get(panel, {}):
                    options = {"linestyle": dashes, "marker": "", "color": figures.color(index)}
                    mean = np.mean(found[panel][label], axis=0)
                    ax.plot(layers, mean, linewidth=1, label=f"{kind}, {label}", **options)
        ax.set(xlabel="layer", title=panel)
        figures.integer_ticks(ax)
    axes[0, 0].set_ylim(10 * lowest, 5 * highest)
    axes[0, 0].set_ylabel(r"$\log_{10} \|\mathrm{res}(X^l)\|_{1,\infty}$")
    _legend_outside(fig, axes[0, 0])
    return fig


@figures.styled
def local_rate_figure(rates: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Local rate log‖res_{l+1}‖ / log‖res_l‖ by layer, with the rates 1 and 3.

    Args:
        rates: {panel: {curve: [s, L]}}; NaN where the rate means nothing.
    """
    fig, axes = figures.figure(1, len(rates), width=3.6, height=2.8, sharey=True)
    for ax, (panel, group) in zip(axes[0], rates.items(), strict=True):
        for level, text in ((3.0, "3: doubly exponential"), (1.0, "1: exponential or none")):
            ax.axhline(level, color="#555555", lw=0.9, ls="--")
            ax.annotate(
                text, (1.0, level), xycoords=("axes fraction", "data"), xytext=(0, -2),
                textcoords="offset points", ha="right", va="top", fontsize=7, color="#555555",
            )  # fmt: skip
        for index, (label, values) in enumerate(group.items()):
            values = np.asarray(values, float)
            if np.isfinite(values).any():
                figures.band(ax, np.arange(1, values.shape[1] + 1), values, label, index)
        ax.set(xlabel="layer", title=panel, ylim=(0, 4))
        figures.integer_ticks(ax)
    axes[0, 0].set_ylabel(r"$\log\|\mathrm{res}(X^{l})\| \,/\, \log\|\mathrm{res}(X^{l-1})\|$")
    _legend_outside(fig, axes[0, -1])
    return fig


@figures.styled
def law_figure(curves: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """Above: how far each bound of one layer's attention lies above what it bounds. Below: Λ.

    Args:
        curves: {panel: what `law_curves` gives}; bounds are absent where they do not cover.
    """
    fig, axes = figures.figure(2, len(curves), width=3.6, height=2.8, sharey="row")
    for (above, below), (panel, group) in zip(axes.T, curves.items(), strict=True):
        for index, (label, values) in enumerate(group["tightness"].items()):
            figures.band(above, np.arange(1, values.shape[1] + 1), values, label, index)
        for index, (label, values) in enumerate(group["constant"].items()):
            dashed = {"linestyle": "--", "marker": ""} if label == "closed form" else {}
            figures.band(below, np.arange(values.shape[1]), values, label, index, **dashed)
        if not group["tightness"]:
            above.text(
                0.5, 0.5, "the bounds do not\ncover norms or masks", ha="center", va="center",
                transform=above.transAxes, fontsize=8, color="#555555",
            )  # fmt: skip
        above.set(xlabel="layer", title=panel)
        below.set(xlabel="depth l")
        figures.integer_ticks(above, below)
    axes[0, 0].set_ylabel(r"$\log_{10}$ bound $-$ $\log_{10}$ of what it bounds")
    axes[1, 0].set_ylabel(r"$\Lambda$: $\log_{10}\|\mathrm{res}(X^l)\| \,/\, 3^l$")
    with_bounds = next((a for a, g in zip(axes[0], curves.values(), strict=True)
                        if g["tightness"]), None)  # fmt: skip
    if with_bounds is not None:
        with_bounds.legend(loc="best")
    axes[1, 0].legend(loc="best")
    return fig


@figures.styled
def sweep_figure(curves: Mapping[str, Mapping[str, Any]], swept: str) -> Figure:
    """One panel per network, one shade per swept value.

    Args:
        curves: {panel: {swept value: values [s, L + 1]}}.
        swept: What is swept, as the legend's title.
    """
    fig, axes = figures.panels(len(curves), 4, width=3.0, height=2.7, sharey=True)
    for ax, (panel, group) in zip(axes.flat, curves.items(), strict=False):
        for (label, values), shade in zip(group.items(), figures.shades(len(group)), strict=True):
            figures.band(ax, np.arange(np.shape(values)[1]), values, label, color=shade, marker="")
        ax.set(xlabel="layer", title=panel)
        figures.integer_ticks(ax)
    axes[0, 0].set_ylabel(RATIO)
    axes[0, -1].legend(title=swept, loc="best")
    return fig


@figures.styled
def gain_figure(curves: Mapping[str, tuple[Any, Any]]) -> Figure:
    """By how much MLPs raise Λ above pure attention's, against their gain.

    Args:
        curves: {panel: (gains [g], values [s, g])}.
    """
    fig, axes = figures.figure(1, len(curves), width=3.4, height=2.8, sharey=True)
    for ax, (panel, (gains, values)) in zip(axes[0], curves.items(), strict=True):
        ax.axhline(0, color="#555555", lw=0.9, ls="--")
        figures.band(ax, np.asarray(gains), values, f"{len(values)} seeds", 0)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="gain of the MLPs", title=panel)
        for place, text in ((0.97, "above 0: slower"), (0.06, "below 0: faster")):
            ax.text(0.03, place, text, transform=ax.transAxes, fontsize=7, color="#555555",
                    va="top" if place > 0.5 else "bottom")  # fmt: skip
    axes[0, 0].set_ylabel(r"$\Lambda$ with MLPs $-$ $\Lambda$ of pure attention")
    return fig


def _legend_outside(fig, ax):
    """The legend of one panel to the right of all, where it hides nothing."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside right center", fontsize=7.5)
