"""report.html of run_architectures: a section per model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.architectures.depths import depths_of
from experiments.architectures.entry import claims, compare, reading
from experiments.architectures.figures import captions_of, slug
from experiments.architectures.results import NAMES, Results
from experiments.architectures.training import CAPTION, training_figures
from experiments.shell.statements import STATEMENTS
from rank_collapse import report


def page(results: list[Results], summary: Mapping[str, Any], folder: Path, command: str) -> bytes:
    """The page as HTML; the figures are read from `folder`."""
    sections = []
    for found in results:
        label = found.model.label
        alone = {label: summary[label]}
        sections.append(
            report.Section(
                name=slug(label),
                title=label,
                claim="Pure attention loses rank doubly exponentially with depth; MLPs slow it, "
                "skips stop it (Dong et al. 2021).",
                command=command,
                figures=[
                    ((folder / f"{name}.png").read_bytes(), caption)
                    for name, caption in captions_of(found).items()
                ],
                comparisons=compare(alone),
                reading=reading(alone),
                details="all numbers: results.csv and arrays.npz",
            )
        )
    if trainings := training_figures(results):
        sections.append(
            report.Section(
                name="training",
                title="Over training",
                claim="How near to collapse a model is, and how long its paths, while it trains.",
                command=command,
                figures=[((folder / f"{name}.png").read_bytes(), CAPTION) for name in trainings],
                comparisons=[],
                reading="",
                details="all numbers: results.csv, one model a step",
            )
        )
    table = [
        {"model": r.model.label, "weights": NAMES[kind]} | depths_of(r, kind)
        for r in results
        for kind in r.kinds
    ]
    if any("same direction" in row for row in table):
        sections.insert(
            0,
            report.Section(
                name="models",
                title="All models",
                claim="Residual networks are ensembles of shallow paths (Veit et al. 2016): the "
                "effective depth is the least k such that paths of lengths up to k do what the "
                "whole network does, in direction (cosine 0.99), next token (99 % of positions) "
                "and loss (1 %).",
                command=command,
                table=table,
            ),
        )
    return report.render(
        "Rank collapse in architectures",
        "Residual ratios, path lengths and the theory's constants on the same weights and texts.",
        sections,
        answers=report.answers_of(STATEMENTS, claims(summary)),
    ).encode()
