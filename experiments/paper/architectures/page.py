"""The page of a run of run_architectures: models, effective depths, and curves over training."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.experiment import caption_of
from experiments.paper.architectures.figures import figures_of, slug
from experiments.paper.architectures.results import NAMES, Results, depths_of
from rank_collapse import report
from rank_collapse.network.surgery import VARIANTS
from rank_collapse.report import figures
from rank_collapse.report.figures import Figure

_STEP = re.compile(r"(.*?)[-_@]*(?:step|checkpoint)[-_]?(\d+)")
EFFECTIVE = ("same direction", "same next token", "same loss")
MODEL = (
    "Pure attention loses rank doubly exponentially with depth; MLPs slow it, skips stop it "
    "(Dong et al. 2021)."
)
TRAINING = "How near to collapse a model is, and how long its paths, while it trains."
DEPTHS = (
    "Residual networks are ensembles of shallow paths (Veit et al. 2016): the effective depth is "
    "the least k such that paths of lengths up to k do what the whole network does, in direction "
    "(cosine 0.99), next token (99 % of positions) and loss (1 %)."
)


def page(
    results: Sequence[Results],
    compare: Callable[[Sequence[Results]], Iterable[report.Comparison]],
    answers: Sequence[report.Answer],
    folder: Path,
    command: str,
) -> bytes:
    """report.html, a section per model.

    Args:
        results: Of each model.
        compare: Results of a model → its numbers.
        answers: To the statements.
        folder: Where the figures are.
        command: How the numbers were made.
    """

    def section(title: str, claim: str, drawn: Mapping[str, Callable[[], Figure]], **more: Any):
        shown = [
            ((folder / f"{name}.png").read_bytes(), caption_of(draw.func))
            for name, draw in drawn.items()
        ]
        more |= {"figures": shown, "details": "all numbers: results.csv and arrays.npz"}
        return report.Section(slug(title), title, claim, command, **more)

    table = [
        {"model": r.model.label, "weights": NAMES[kind]} | depths_of(r, kind)
        for r in results
        for kind in r.kinds
    ]
    sections = []
    if any("same direction" in row for row in table):
        sections.append(section("All models", DEPTHS, {}, table=table))
    for found in results:
        own = figures_of([found])
        sections.append(section(found.model.label, MODEL, own, comparisons=tuple(compare([found]))))
    if trainings := training_figures(results):
        sections.append(section("Over training", TRAINING, trainings))
    return report.render(
        "Rank collapse in architectures",
        "Residual ratios, path lengths and the theory's constants on the same weights and texts.",
        sections,
        answers=answers,
    ).encode()


def trainings_of(results: Sequence[Results]) -> dict[str, dict[int, Results]]:
    """{model: {step: results}} of models with two or more steps, from labels ending in one.

    Labels are names of folders or of revisions: step1000, pythia-70m@step1000, checkpoint-500.
    """
    found: dict[str, dict[int, Results]] = {}
    for result in results:
        match = _STEP.fullmatch(result.model.label)
        if match and "pretrained" in result.kinds:
            found.setdefault(match[1] or result.model.family, {})[int(match[2])] = result
    return {name: dict(sorted(steps.items())) for name, steps in found.items() if len(steps) > 1}


def training_figures(results: Sequence[Results]) -> dict[str, Callable[[], Figure]]:
    """What draws each figure, by file name."""
    return {
        f"training_{slug(name)}": partial(training_figure, steps)
        for name, steps in trainings_of(results).items()
    }


@figures.styled
def training_figure(steps: dict[int, Results]) -> Figure:
    """One model while it trained, at its checkpoints; bands over texts. Of what was measured:
    residual ratio of the last layer in four variants; token cosine of the whole network; mean
    length of a path, lengths weighted by the size of what their paths add to the output; effective
    depth, the least k such that paths of lengths up to k do the same."""

    def by_step(name, of=lambda a: a[:, -1]):
        """[texts, steps] of a number of each text; None where a step lacks it or has others."""
        found = [result.get("pretrained", name) for result in steps.values()]
        if any(a is None or len(a) != len(found[0]) for a in found):
            return None
        return np.stack([of(a) for a in found], axis=1)

    depths = [depths_of(result, "pretrained") for result in steps.values()]
    panels = {
        "residual ratio, last layer": {
            v: by_step(f"residuals/{v}/published/residual_ratio") for v in VARIANTS
        },
        "mean token cosine, last layer": {
            "": by_step("residuals/Transformer/published/token_cosine")
        },
        "mean path length": {
            "": by_step("lengths/size", lambda a: a @ np.arange(a.shape[1]) / a.sum(axis=1))
        },
        "effective depth": {
            k: [[d[k] for d in depths]] if all(k in d for d in depths) else None for k in EFFECTIVE
        },
    }
    known = {label: {t: a for t, a in c.items() if a is not None} for label, c in panels.items()}
    known = {label: curves for label, curves in known.items() if curves}
    fig, axes = figures.figure(1, max(len(known), 1), width=3.6, height=2.8)
    least = min((step for step in steps if step), default=1)
    for ax, (label, curves) in zip(axes[0], known.items(), strict=False):
        for index, (text, values) in enumerate(curves.items()):
            figures.band(ax, list(steps), values, text, index)
        ax.set(xlabel="training step", ylabel=label)
        ax.set_xscale("symlog", linthresh=least)
        if len(curves) > 1:
            ax.legend()
    return fig
