"""Figures of the circle experiment, from the results of `training.results_of` by case."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.circle.cases import PUBLISHED as VARIANTS
from experiments.trained.training import kept
from rank_collapse.report import figures
from rank_collapse.training.tasks.circle import RADIUS


def figures_of(results: dict[str, dict[str, Any]]) -> dict[str, Callable[[], Figure]]:
    """What draws each figure, by name."""
    return {
        "trajectories": functools.partial(trajectory_figure, results),
        "distance": functools.partial(distance_figure, results),
    }


@figures.styled
def trajectory_figure(results: dict[str, dict[str, Any]]) -> Figure:
    """The two points of the first seed that did not diverge, a panel per case."""
    columns = min(len(VARIANTS), len(results))  # a width is a row
    fig, axes = figures.figure(-(-len(results) // columns), columns, width=2.8, height=2.8)
    angle = np.linspace(0, 2 * np.pi, 200)
    for ax in axes.flat[len(results) :]:
        ax.remove()
    for ax, (name, case) in zip(axes.flat, results.items(), strict=False):
        ax.plot(RADIUS * np.cos(angle), RADIUS * np.sin(angle), color="lightgray", linewidth=4)
        seed = kept(case)[0]
        for walker in range(2):
            path = case["trajectory"][seed, :, walker]
            ax.plot(*path.T, color=figures.color(walker), marker=".", markersize=3, linewidth=0.5,
                    label=f"sequence {walker + 1}")  # fmt: skip
            ax.plot(*path[0], color=figures.color(walker), marker="o", markersize=6)
        ax.set(title=name, xlim=(-0.56, 0.56), ylim=(-0.56, 0.56), xlabel="x", ylabel="y")
        ax.set_aspect("equal")
    axes.flat[0].legend(loc="upper right", fontsize=7)
    return fig


@figures.styled
def distance_figure(results: dict[str, dict[str, Any]]) -> Figure:
    """Distance of the two points by step: a panel per width, a line per seed.

    A median of seeds that fell and seeds that did not would be the distance of neither.
    """
    panels = {}
    for name in results:
        variant, width = name.split(", ")
        panels.setdefault(width, []).append((variant, name))
    fig, axes = figures.figure(1, len(panels), width=3.4, height=3.0)
    variants = list(dict.fromkeys(v for cases in panels.values() for v, _ in cases))
    for ax, (width, cases) in zip(axes.flat, panels.items(), strict=True):
        for variant, name in cases:
            case = results[name]
            distance = case["distance"][kept(case)]
            lines = ax.plot(
                np.maximum(distance, 1e-9).T, color=figures.color(variants.index(variant)),
                linewidth=0.8, alpha=0.7,
            )  # fmt: skip
            lines[0].set_label(variant)
        ax.set(title=width, xlabel="step", yscale="log")
    axes.flat[0].set_ylabel("distance of the two sequences")
    axes.flat[0].legend(fontsize=7)
    return fig
