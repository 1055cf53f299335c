"""The page of a run of run_architectures: a section per model, effective depths of all."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.architectures.figures import figures_of, slug
from experiments.architectures.results import NAMES, Results, depths_of
from experiments.architectures.training import training_figures
from experiments.shell.experiment import caption_of
from rank_collapse import report

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
    compare: Callable[[Sequence[Results]], Sequence[report.Comparison]],
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

    def section(title: str, claim: str, figures: Mapping[str, Callable[[], Figure]], **more: Any):
        shown = [
            ((folder / f"{name}.png").read_bytes(), caption_of(draw.func))
            for name, draw in figures.items()
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
        sections.append(section(found.model.label, MODEL, own, comparisons=compare([found])))
    if trainings := training_figures(results):
        sections.append(section("Over training", TRAINING, trainings))
    return report.render(
        "Rank collapse in architectures",
        "Residual ratios, path lengths and the theory's constants on the same weights and texts.",
        sections,
        answers=answers,
    ).encode()
