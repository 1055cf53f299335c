"""Curves over training: one model's checkpoints by step, such as Pythia's, beside each other."""

import re
from collections.abc import Callable
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from experiments.architectures.results import Results
from rank_collapse.network.surgery import VARIANTS
from rank_collapse.report import figures

_STEP = re.compile(r"(.*?)[-_@]*(?:step|checkpoint)[-_]?(\d+)")
CAPTION = (
    "One model while it trained, at its checkpoints; bands over texts. Left: residual ratio of the "
    "last layer in four variants. Middle: token cosine of the whole network. Right: mean length of "
    "a path, lengths weighted by the size of what their paths add to the output."
)

Steps = list[tuple[int, Results]]


def trainings_of(results: list[Results]) -> dict[str, Steps]:
    """{model: [(step, results)]} of models with two or more steps, from labels ending in one.

    Labels are names of folders or of revisions: step1000, pythia-70m@step1000, checkpoint-500.
    """
    found: dict[str, Steps] = {}
    for result in results:
        match = _STEP.fullmatch(result.model.label)
        if match and "pretrained" in result.kinds:
            name = match[1] or result.model.family
            found.setdefault(name, []).append((int(match[2]), result))
    return {
        name: sorted(steps, key=lambda s: s[0]) for name, steps in found.items() if len(steps) > 1
    }


def training_figures(results: list[Results]) -> dict[str, Callable[[], Figure]]:
    """What draws each figure, by file name."""
    return {
        "training_" + re.sub(r"[^A-Za-z0-9.+_-]", "_", name): partial(training_figure, name, steps)
        for name, steps in trainings_of(results).items()
    }


@figures.styled
def training_figure(name: str, steps: Steps) -> Figure:
    """Residuals, cosines and path lengths over the steps of training."""
    fig, axes = figures.figure(1, 3, width=3.6, height=2.8)
    x = [step for step, _ in steps]
    for index, variant in enumerate(VARIANTS):
        values = _at_end(steps, f"residuals/{variant}/published/residual_ratio")
        if values is not None:
            figures.band(axes[0, 0], x, values, variant, index)
    for ax, values in (
        (axes[0, 1], _at_end(steps, "residuals/Transformer/published/token_cosine")),
        (axes[0, 2], _mean_length(steps)),
    ):
        if values is not None:
            figures.band(ax, x, values, name)
    axes[0, 0].legend(fontsize=7)
    labels = ("residual ratio, last layer", "mean token cosine, last layer", "mean path length")
    for ax, label in zip(axes[0], labels, strict=True):
        ax.set(xlabel="training step", ylabel=label)
        ax.set_xscale("symlog", linthresh=max(1, min(s for s in x if s) if any(x) else 1))
        ax.set_visible(ax.has_data())
    return fig


def _values(steps, name):
    """[step][texts, ...] of one measure; None where a step lacks it or has other texts."""
    found = [result.get("pretrained", name) for _, result in steps]
    if any(a is None or len(a) != len(found[0]) for a in found):
        return None
    return found


def _at_end(steps, name):
    """[texts, steps] of a measure at the last layer."""
    found = _values(steps, name)
    return None if found is None else np.stack([a[:, -1] for a in found], axis=1)


def _mean_length(steps):
    """[texts, steps] Σ_k k s_k / Σ_k s_k, s_k the size of what paths of length k add."""
    found = _values(steps, "lengths/size")
    if found is None:
        return None
    return np.stack([a @ np.arange(a.shape[1]) / a.sum(axis=1) for a in found], axis=1)
