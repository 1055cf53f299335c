"""Figures of the circle experiment, from the results of `training.results_of` by case."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.circle import published
from experiments.circle.cases import parts_of
from experiments.circle.results import TOGETHER, measures_of
from experiments.trained.training import kept
from rank_collapse.report import figures
from rank_collapse.report.shares import wilson_interval
from rank_collapse.training.tasks.circle import RADIUS


def figures_of(results: dict[str, dict[str, Any]]) -> dict[str, Callable[[], Figure]]:
    """What draws each figure, by name."""
    draws = {
        "shares": share_figure, "steps": steps_figure, "trajectories": trajectory_figure,
        "distance": distance_figure,
    }  # fmt: skip
    return {name: functools.partial(draw, results) for name, draw in draws.items()}


def _grid(results):
    """(variants, widths, {(variant, width): results})."""
    cases = {parts_of(name): case for name, case in results.items()}
    variants, widths = (list(dict.fromkeys(keys)) for keys in zip(*cases, strict=True))
    return variants, widths, cases


def _fell(case):
    """Of the seeds that did not diverge, which fell."""
    return case["distance"][kept(case), -1] < TOGETHER


@figures.styled
def share_figure(results: dict[str, dict[str, Any]]) -> Figure:
    """Share of seeds that fell together, ours and the published code's, with 95 % intervals."""
    variants, widths, cases = _grid(results)
    fig, axes = figures.figure(
        1, len(widths), width=max(2.4, 0.7 * len(variants)), height=3.6, sharey=True
    )
    for ax, width in zip(axes.flat, widths, strict=True):
        for i, variant in enumerate(variants):
            fell = _fell(cases[variant, width])
            counts = [("here", 0, int(fell.sum()), len(fell))]
            if (variant, width) in published.FELL:
                theirs = published.FELL[variant, width]
                counts.append(("published code", 1, theirs, published.SEEDS))
            for label, index, count, total in counts:
                low, high = wilson_interval(count, total)
                share = count / total
                ax.errorbar(
                    i + 0.16 * index, share, [[max(share - low, 0)], [max(high - share, 0)]],
                    color=figures.color(index), marker=figures.MARKERS[index], capsize=3,
                    linestyle="none", label=f"{label}, {total} seeds" if i == 0 else None,
                )  # fmt: skip
        ax.set_xticks(range(len(variants)), variants, rotation=20 if len(variants) < 4 else 75)
        ax.set(title=f"d={width}", ylim=(-0.04, 1.04), xlim=(-0.5, len(variants) - 0.4))
    axes.flat[0].set_ylabel("share of seeds together")
    fig.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return fig


@figures.styled
def steps_figure(results: dict[str, dict[str, Any]]) -> Figure:
    """Steps from a distance of 1e-2 to 1e-6 against ln(1e-4)/ln μ, a point per seed that fell."""
    variants, widths, cases = _grid(results)
    fig, axes = figures.figure(1, 1, width=6.6, height=3.8)
    ax, shown = axes[0, 0], []
    for (variant, width), case in cases.items():
        found = measures_of(case)
        predicted, measured = found["predicted_steps"], found["measured_steps"]
        # A multiplier of 0, pure attention's, predicts no number of steps: its law is cubic.
        fits = found["fell"] & np.isfinite(predicted) & np.isfinite(measured) & (predicted >= 0.5)
        fits[np.setdiff1d(np.arange(len(fits)), kept(case))] = False
        if fits.any():
            shown += [*predicted[fits], *measured[fits]]
            ax.plot(
                predicted[fits], measured[fits], linestyle="none", alpha=0.7, markersize=5,
                color=figures.color(variants.index(variant)),
                marker=figures.MARKERS[widths.index(width)], label=f"{variant}, d={width}",
            )  # fmt: skip
    ends = [min(shown, default=1) / 1.2, max(shown, default=300) * 1.2]
    ax.plot(ends, ends, color="gray", linewidth=0.8, label="equal")
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, ylabel="steps measured")
    ax.set_xlabel("steps predicted, ln(1e-4) / ln μ")
    ax.set_title("From a distance of 1e-2 to 1e-6")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside right upper")
    return fig


@figures.styled
def trajectory_figure(results: dict[str, dict[str, Any]]) -> Figure:
    """The two points of one seed, a panel per case: the first that fell, else the first."""
    variants, widths, cases = _grid(results)
    fig, axes = figures.figure(len(widths), len(variants), width=2.8, height=2.9)
    angle = np.linspace(0, 2 * np.pi, 200)
    panels = [(variant, width) for width in widths for variant in variants]
    for ax, (variant, width) in zip(axes.flat, panels, strict=True):
        case = cases[variant, width]
        fell = _fell(case)
        seed = kept(case)[np.argmax(fell)]
        ax.plot(RADIUS * np.cos(angle), RADIUS * np.sin(angle), color="lightgray", linewidth=4)
        for walker in range(2):
            path = case["trajectory"][seed, :, walker]
            ax.plot(*path.T, color=figures.color(walker), marker=".", markersize=3, linewidth=0.5,
                    label=f"sequence {walker + 1}")  # fmt: skip
            ax.plot(*path[0], color=figures.color(walker), marker="o", markersize=6)
        count = f"{fell.sum()} of {len(fell)} fell"
        ax.set_title(f"{variant}, d={width}\nseed {seed}; {count}", fontsize=9)
        ax.set(xlim=(-0.56, 0.56), ylim=(-0.56, 0.56), xlabel="x", ylabel="y")
        ax.set_aspect("equal")
    axes.flat[0].legend(loc="upper right", fontsize=7)
    return fig


@figures.styled
def distance_figure(results: dict[str, dict[str, Any]]) -> Figure:
    """Distance of the two points by step: a panel per case, a line per seed.

    A median of seeds that fell and seeds that did not would be the distance of neither.
    """
    variants, widths, cases = _grid(results)
    fig, axes = figures.figure(
        len(widths), len(variants), width=2.8, height=2.2, sharex=True, sharey=True
    )
    for row, width in zip(axes, widths, strict=True):
        for ax, variant in zip(row, variants, strict=True):
            case = cases[variant, width]
            for fallen, index in ((False, 7), (True, 0)):
                lines = case["distance"][kept(case)][_fell(case) == fallen]
                ax.plot(
                    np.maximum(lines, 1e-9).T, color=figures.color(index), linewidth=0.7, alpha=0.6
                )
            ax.set_title(f"{variant}, d={width}", fontsize=9)
            ax.set(yscale="log")
        row[0].set_ylabel("distance")
    for ax in axes[-1]:
        ax.set_xlabel("step")
    return fig
