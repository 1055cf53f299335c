"""Curves over training: one model's checkpoints by step, such as Pythia's, beside each other."""

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from experiments.architectures.figures import slug
from experiments.architectures.results import Results, depths_of
from rank_collapse.network.surgery import VARIANTS
from rank_collapse.report import figures
from rank_collapse.report.figures import Figure

_STEP = re.compile(r"(.*?)[-_@]*(?:step|checkpoint)[-_]?(\d+)")
CAPTION = (
    "One model while it trained, at its checkpoints; bands over texts. Of what was measured: "
    "residual ratio of the last layer in four variants; token cosine of the whole network; mean "
    "length of a path, lengths weighted by the size of what their paths add to the output; "
    "effective depth, the least k such that paths of lengths up to k do the same."
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
        f"training_{slug(name)}": partial(training_figure, name, steps)
        for name, steps in trainings_of(results).items()
    }


@figures.styled
def training_figure(name: str, steps: Steps) -> Figure:
    """Residuals, cosines, path lengths and effective depths over the steps of training."""

    def values_of(name, of=lambda a: a[:, -1]):
        """[texts, steps] of a number of each text; None where a step lacks it or has others."""
        found = [result.get("pretrained", name) for _, result in steps]
        if any(a is None or len(a) != len(found[0]) for a in found):
            return None
        return np.stack([of(a) for a in found], axis=1)

    residuals = {v: values_of(f"residuals/{v}/published/residual_ratio") for v in VARIANTS}
    cosine = values_of("residuals/Transformer/published/token_cosine")
    lengths = values_of("lengths/size", lambda a: a @ np.arange(a.shape[1]) / a.sum(axis=1))
    depths = [depths_of(result, "pretrained") for _, result in steps]
    effective = {
        k: np.array([[d[k] for d in depths]]) if all(k in d for d in depths) else None
        for k in ("same direction", "same next token", "same loss")
    }
    panels = {
        "residual ratio, last layer": residuals,
        "mean token cosine, last layer": {name: cosine},
        "mean path length": {name: lengths},
        "effective depth": effective,
    }
    known = {label: {t: a for t, a in c.items() if a is not None} for label, c in panels.items()}
    known = {label: curves for label, curves in known.items() if curves}
    fig, axes = figures.figure(1, max(len(known), 1), width=3.6, height=2.8)
    x = [step for step, _ in steps]
    for ax, (label, curves) in zip(axes[0], known.items(), strict=False):
        for index, (text, values) in enumerate(curves.items()):
            figures.band(ax, x, values, text, index)
        ax.set(xlabel="training step", ylabel=label)
        ax.set_xscale("symlog", linthresh=max(1, min(s for s in x if s) if any(x) else 1))
        if len(curves) > 1:
            ax.legend()
    return fig
