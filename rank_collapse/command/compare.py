"""Checkpoints beside each other: `rank-collapse compare A B ...`.

    rank-collapse compare my-run/checkpoint-100 my-run/checkpoint-900 --ids 5,8,13
    rank-collapse compare hf:gpt2 my-gpt2 --text my.txt --csv
    rank-collapse compare my-run/checkpoint-*
    rank-collapse compare hf:EleutherAI/pythia-70m@step0 hf:EleutherAI/pythia-70m@step1000 --json

A panel for each measure of `rank-collapse check`, means over texts, with a curve by layer for each
checkpoint. Of three or more whose names end in different numbers, as step1000, curves by this step
instead, layers from dark to light; --json then prints a line for each step, as
`rank-collapse watch` reads it. All are measured on the same texts, ids or arrays, or it refuses.
--out is an .html, .png or .pdf.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rank_collapse import report
from rank_collapse.command import checkpoint, inputs
from rank_collapse.command.inputs import Inputs, Opened
from rank_collapse.printed import escape_text
from rank_collapse.report import figures
from rank_collapse.report.metrics import metrics_figure
from rank_collapse.runs.drawn import draw_files
from rank_collapse.struct import refuse_if

SUFFIXES = (".html", ".png", ".pdf")
CAPTION = "Means over the same texts, by layer or by step; the numbers are in the .csv."
# Of measures that are shares, or between 0 and 1 by their definition.
SHARES = re.compile("residual ratio|cosine|share|residual spike|attention on")
_LAST_NUMBER = re.compile(r".*?(\d+)\D*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `compare`."""
    parser.add_argument("sources", metavar="FOLDER", nargs="+", help=checkpoint.SOURCE)
    checkpoint.add_arguments(parser, "compare.html", "page or figure, beside it .csv")


def run(flags: argparse.Namespace, command: Sequence[str]) -> int:
    """Runs `compare`; returns its exit code.

    Args:
        flags: Of `add_arguments`.
        command: Words of the command line, for the page.
    """
    names = list(dict.fromkeys(flags.sources))
    refuse_if(len(names) < 2, f"{names[0]} alone cannot be compared: name two checkpoints or more")
    steps = find_steps(names) if names[2:] else None
    names = list(steps or names)
    label, keys = ("step", list(steps.values())) if steps else ("source", names)
    opened = [inputs.open_source(name) for name in names]
    checkpoint.check_output(flags, SUFFIXES)
    pairs = zip(opened, same_inputs(flags, opened), strict=True)
    checks = [checkpoint.measure_checkpoint(*pair) for pair in pairs]
    layers = {name: one.layer_means() for name, one in zip(names, checks, strict=True)}
    lines = [
        {label: key} | layer_means for key, layer_means in zip(keys, layers.values(), strict=True)
    ]
    sentences = [f"{one.opened.name}: {one.write_verdict()}" for one in checks]
    sentences += dict.fromkeys(one.inputs.description for one in checks)

    def make_files(out: Path) -> dict[Path, bytes]:
        pictures = draw_files(metrics_figure(lines) if steps else layer_figure(layers))
        if out.suffix != ".html":
            return {out: pictures[out.suffix]}
        line = checks[0].describe(command)["command"]
        title = "By " + (label if steps else "layer")
        section = report.Section("compare", title, line, figures=[(pictures[".png"], CAPTION)])
        title = f"{len(names)} checkpoints compared"
        return {out: report.render(title, " ".join(sentences), [section]).encode()}

    checkpoint.write_outputs(flags, lines, yield_rows(lines, label), make_files, sentences)
    return 0


def yield_rows(lines: Sequence[Mapping[str, Any]], label: str) -> Iterator[tuple[Any, ...]]:
    """Yields the table: a row for each checkpoint or step, measure and layer.

    Args:
        lines: Measures by layer of each checkpoint.
        label: Name of the first column, "source" or "step".
    """
    yield (label, "measure", "layer", "value")
    for line in lines:
        for measure in line.keys() - {label}:
            for layer, value in enumerate(line[measure]):
                yield (line[label], measure, layer, value)


def same_inputs(flags: argparse.Namespace, opened: Sequence[Opened]) -> list[Inputs]:
    """Returns the inputs of each checkpoint: the same texts, ids or arrays.

    Args:
        flags: Of `add_arguments`.
        opened: The checkpoints.

    Raises:
        ValueError: Texts of one beside random ids of another, or random ids that differ.
    """
    batches = [inputs.read_inputs(flags, one) for one in opened]
    first = batches[0]
    for one, batch in zip(opened, batches, strict=True):
        equal = batch.kind == first.kind
        if equal and batch.kind != "texts":  # texts by each one's own tokenizer
            equal = np.array_equal(batch.x, first.x)
        refuse_if(
            not equal,
            f"{opened[0].name} and {one.name} would be measured on different inputs "
            f"({first.kind} and {batch.kind}): give --tokenizer=FOLDER or --ids=5,8,13",
        )
    return batches


def find_steps(names: Sequence[str]) -> dict[str, int] | None:
    """Returns {checkpoint: step}, in order of steps; None where the names' numbers are not
    different.

    Args:
        names: Of checkpoints, whose last number is the step.
    """
    numbers = [_LAST_NUMBER.fullmatch(Path(name).name) for name in names]
    steps = {name: int(match[1]) for name, match in zip(names, numbers, strict=True) if match}
    if len(set(steps.values())) < len(names):
        return None
    return dict(sorted(steps.items(), key=lambda pair: pair[1]))


@figures.styled
def layer_figure(layers: Mapping[str, Mapping[str, np.ndarray]]):
    """Plot {checkpoint: {measure: [L + 1]}}: a panel a measure, a curve a checkpoint.

    Args:
        layers: Means over texts.
    """
    measures = next(iter(layers.values()))
    panels = {
        measure: {
            escape_text(name): layer_means[measure][None] for name, layer_means in layers.items()
        }
        for measure in measures
    }
    fig, axes = figures.curves(panels, columns=3, width=3.4, height=2.4)
    for measure, ax in zip(panels, axes.flat, strict=False):
        least = min(float(layer_means[measure].min()) for layer_means in layers.values())
        if measure.startswith("residual ratio") and 0 < least < checkpoint.COLLAPSED:
            ax.set_yscale("log")
        elif SHARES.search(measure):
            ax.set_ylim(0, 1.05)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 2))
    return fig
