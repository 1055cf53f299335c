"""The figure of the width experiment, from the results of `training.results_of` by case."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.trained.training import Setup, kept
from rank_collapse.report import figures


def figures_of(
    results: Mapping[str, Any], cases: Mapping[str, Setup]
) -> dict[str, Callable[[], Figure]]:
    """What draws each figure, by name."""
    return {"width": functools.partial(width_figure, results, cases)}


@figures.styled
def width_figure(results: Mapping[str, Any], cases: Mapping[str, Setup]) -> Figure:
    """Training loss by epoch of each depth, and the accuracy of every seed against depth."""
    fig, axes = figures.figure(1, 2)
    loss, accuracy = axes[0]
    ordered = sorted(cases.items(), key=lambda item: item[1].recipe.config.depth)
    for index, (name, case) in enumerate(ordered):
        losses, config = results[name]["losses"][kept(results[name])], case.recipe.config
        epochs = 1 + np.arange(losses.shape[1])
        label = f"L={config.depth}, d={config.d_model}"
        figures.band(loss, epochs, losses, label=label, index=index, marker="")
    loss.set(xlabel="epoch", ylabel="training loss", yscale="log")
    loss.legend()
    # A seed may diverge at one depth only: NaN is left out of the mean.
    values = np.stack(
        [np.where(r["diverged_at"] < 0, r["whole"]["accuracy"], np.nan)
         for r in (results[name] for name, _ in ordered)], axis=1,
    )  # fmt: skip
    figures.band(accuracy, [case.recipe.config.depth for _, case in ordered], values)
    accuracy.set(xlabel="depth at equal parameters", ylabel="token accuracy", ylim=(0, 1.02))
    return fig
