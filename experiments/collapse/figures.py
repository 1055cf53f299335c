"""The figures of run_collapse, and the numbers that are drawn there."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.collapse.measure import SWEPT, Results
from rank_collapse.report import figures
from rank_collapse.report.figures import Figure
from rank_collapse.theory.logdomain import local_rate

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


def rates(log10_residual: np.ndarray) -> np.ndarray:
    """Local rates [s, L]; NaN where the logarithm is about to pass 0 and a rate means nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.array(local_rate(jnp.asarray(log10_residual)), float)
        before, after = log10_residual[..., :-1], log10_residual[..., 1:]
        meaningful = (np.abs(before) > 1) & (before * after > 0) & np.isfinite(after)
    return np.where(meaningful, found, np.nan)


def slowed(found: Mapping[str, Mapping[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """(gains of the MLPs [g], by how much each raises Λ = log10‖R_L‖/3^L above pure attention's
    [s, g]) of one setting; (none, [0]) without a sweep, or without pure attention."""
    if SWEPT not in found or "san" not in found:
        return np.zeros(0), np.zeros(0)
    curves = {float(name.rsplit("_", 1)[1]): curve for name, curve in found[SWEPT].items()}
    gains, san = sorted(curves), found["san"]["log10_residual"]
    raised = np.stack([curves[gain][:, -1] - san[:, -1] for gain in gains], axis=1)
    return np.array(gains), raised / 3.0 ** (san.shape[1] - 1)


def panels(results: Results) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """{norm: {variant: measures}} at the first of the swept values."""
    first = next(iter(results))[1:]
    return {f"norm: {key[0]}": found for key, found in results.items() if key[1:] == first}


def of_measure(found: Mapping[str, Mapping[str, np.ndarray]], measure: str) -> dict[str, Any]:
    """{variant: values [s, L + 1]} of one measure."""
    return {variant: own[measure] for variant, own in found.items() if measure in own}


def laws_of(results: Results) -> dict[str, dict[str, np.ndarray]]:
    """{network: measures} of those with a closed form."""
    return {
        f"{variant}, {panel}": own
        for panel, found in panels(results).items()
        for variant, own in found.items()
        if "log10_cubic" in own
    }


def raised_of(results: Results) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{norm: `slowed`} where MLPs were swept."""
    found = {panel: slowed(own) for panel, own in panels(results).items()}
    return {panel: pair for panel, pair in found.items() if pair[0].size}


def swept_of(results: Results, position: int) -> dict[str, dict[str, Any]]:
    """{network: {swept value: ratio}} along one place of the keys, the other at its first value."""
    other = 3 - position
    first, found = next(iter(results))[other], {}
    for key, measured in results.items():
        if key[other] == first:
            for variant, ratio in of_measure(measured, "ratio").items():
                found.setdefault(f"{variant}, norm: {key[0]}", {})[f"{key[position]:g}"] = ratio
    return found if len(next(iter(found.values()))) > 1 else {}


def residual_ratio_figure(results: Results, setup: Any) -> Figure:
    """The paper's figure: relative residual by layer, mean and standard deviation over seeds, on
    English text at initialisation."""
    groups = {panel: of_measure(own, "ratio") for panel, own in panels(results).items()}
    fig, axes = figures.curves(groups, ylabel=RATIO, width=3.6, height=3.0, sharey=True)
    axes[0, 0].set_ylim(-0.03, None)
    axes[0, -1].legend(loc="best")
    return fig


def log_residual_figure(results: Results, setup: Any) -> Figure:
    """The same residuals in logarithms to any depth. Dashed: the law 3^l. Dotted: what an ordinary
    float32 forward pass shows. Dash-dotted: the theorems' bound."""
    groups = {panel: of_measure(own, "log10_residual") for panel, own in panels(results).items()}
    label = r"$\log_{10} \|\mathrm{res}(X^l)\|_{1,\infty}$"
    fig, axes = figures.curves(groups, ylabel=label, width=3.9, height=3.4, sharey=True)
    for ax, found, group in zip(axes[0], panels(results).values(), groups.values(), strict=True):
        ax.set_yscale("symlog", linthresh=1.0, linscale=0.6)
        for index, variant in enumerate(group):
            for measure, (text, dashes, width) in BESIDE.items():
                if measure in found[variant]:
                    ax.plot(
                        np.mean(found[variant][measure], axis=0),
                        label=text.format(variant) if "{}" in text or not index else None,
                        color=figures.color(index),
                        linestyle=dashes,
                        linewidth=width,
                        marker="",
                    )
        _draw_law(ax, group)
    known = [v[np.isfinite(v)] for group in groups.values() for v in group.values()]
    known = np.concatenate([[-1.0, 1.0], *known])  # the others are gaps
    axes[0, 0].set_ylim(10 * known.min(), 5 * known.max())
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    return fig


def _draw_law(ax, group):
    """The line ∝ 3^l through the end of the first curve that falls like it."""
    for values in group.values():
        mean = np.asarray(values, float).mean(axis=0)
        falls = mean < -3.0
        if falls[-2:].all() and mean[-1] < 2.5 * mean[-2]:
            layers = np.arange(np.argmax(falls), len(mean))
            line = mean[-1] * 3.0 ** (layers - layers[-1])
            ax.plot(layers, line, "k--", lw=1, label=r"$\propto 3^{l}$", zorder=5)
            return


def local_rate_figure(results: Results, setup: Any) -> Figure:
    """Local rate of the logarithms: 3 is doubly exponential collapse."""
    groups = {
        panel: {name: rates(a) for name, a in of_measure(own, "log10_residual").items()}
        for panel, own in panels(results).items()
    }
    label = r"$\log\|\mathrm{res}(X^{l})\| \,/\, \log\|\mathrm{res}(X^{l-1})\|$"
    fig, axes = figures.curves(groups, first=1, ylabel=label, width=3.6, height=2.8, sharey=True)
    for ax in axes[0]:
        for level, text in ((3.0, "3: doubly exponential"), (1.0, "1: exponential or none")):
            ax.axhline(level, color="#555555", lw=0.9, ls="--")
            ax.annotate(
                text,
                (1.0, level),
                xycoords=("axes fraction", "data"),
                xytext=(0, -2),
                textcoords="offset points",
                ha="right",
                va="top",
                **NOTE,
            )
        ax.set(ylim=(0, 4))
    fig.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside right center")
    return fig


def law_figure(networks: dict[str, dict[str, np.ndarray]], setup: Any) -> Figure:
    """Above: how many powers of ten the bounds of one layer lie above what they bound (all but the
    paper's need no condition). Below: the constant of the 3^l law as each depth shows it, measured,
    from the closed recursion of the covariance, and as the theorem has it."""
    fig, axes = figures.figure(2, len(networks), width=3.6, height=2.8, sharey="row")
    for (above, below), (panel, own) in zip(axes.T, networks.items(), strict=True):
        tightness = {text: own[name][:, 1:] for name, text in TIGHTNESS.items() if name in own}
        for index, (label, values) in enumerate(tightness.items()):
            figures.band(above, np.arange(1, values.shape[1] + 1), values, label, index)
        profile, depth = own["log10_residual"], np.arange(own["log10_residual"].shape[1])
        constants = {
            "measured": profile / 3.0**depth,
            "closed form": own["log10_cubic"] / 3.0**depth,
        }
        if "log10_c" in own:
            constants["theorem"] = profile[:, :1] + own["log10_c"] / 2
        for index, (label, values) in enumerate(constants.items()):
            dashed = {"linestyle": "--", "marker": ""} if label == "closed form" else {}
            figures.band(below, depth, values, label, index, **dashed)
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


def sweep_figure(curves: dict[str, dict[str, Any]], setup: Any, *, swept: str) -> Figure:
    """One panel per network, one shade per swept value."""
    fig, axes = figures.curves(
        curves,
        columns=4,
        ylabel=RATIO,
        width=3.0,
        height=2.7,
        sharey=True,
        style=lambda index, count: {"color": figures.shades(count)[index], "marker": ""},
    )
    axes[0, -1].legend(title=swept, loc="best")
    return fig


def gain_figure(raised: dict[str, tuple[np.ndarray, np.ndarray]], setup: Any) -> Figure:
    """By how much MLPs raise the constant Λ above pure attention's, against their gain: above 0
    they slow the collapse (post-norm: with a skip of their own)."""
    fig, axes = figures.figure(1, len(raised), width=3.4, height=2.8, sharey=True)
    for ax, (panel, (gains, values)) in zip(axes[0], raised.items(), strict=True):
        ax.axhline(0, color="#555555", lw=0.9, ls="--")
        figures.band(ax, gains, values, f"{len(values)} seeds", 0)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="gain of the MLPs", title=panel)
    text = r"$\Lambda$ with MLPs $-$ $\Lambda$ of pure attention"
    axes[0, 0].set_ylabel(text + "\n(above 0: slower, below: faster)")
    return fig
