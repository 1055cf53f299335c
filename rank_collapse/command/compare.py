"""Checkpoints beside each other: `rank-collapse compare A B ...`.

    rank-collapse compare my-run/checkpoint-100 my-run/checkpoint-900 --ids 5,8,13
    rank-collapse compare hf:gpt2 my-gpt2 --text my.txt --csv
    rank-collapse compare my-run/checkpoint-*
    rank-collapse compare hf:EleutherAI/pythia-70m@step0 hf:EleutherAI/pythia-70m@step1000 --json

A panel for each measure of `rank-collapse check`, means over texts, with a curve by layer for each
checkpoint. Of three or more whose names end in different numbers, as step1000, curves by this step
instead, layers from dark to light; --json then prints a line for each step, as
`rank-collapse watch` reads it. All are measured on the same texts, ids or arrays, or it refuses.
Checkpoints with equal weight files are named, and measured once. --out is an .html, .png or .pdf.
"""

import argparse
import filecmp
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rank_collapse import report
from rank_collapse.command import checkpoint, inputs
from rank_collapse.command.checkpoint import Checked
from rank_collapse.command.inputs import Inputs, Opened
from rank_collapse.measures.table import MEASURES
from rank_collapse.printed import escaped
from rank_collapse.report import figures
from rank_collapse.report.metrics import metrics_figure
from rank_collapse.runs.drawn import drawn

COLLAPSED = MEASURES["residual_ratio"].alarm.value
SUFFIXES = (".html", ".png", ".pdf")
CAPTION = "Means over the same texts, by layer or by step; the numbers are in the .csv."
# Of measures that are shares, or between 0 and 1 by their definition.
SHARES = re.compile("residual ratio|cosine|share|residual spike|attention on")
_LAST_NUMBER = re.compile(r".*?(\d+)\D*")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("sources", metavar="FOLDER", nargs="+", help=checkpoint.SOURCE)
    checkpoint.add_arguments(parser, "compare.html", "page or figure, beside it .csv")


def run(given: argparse.Namespace, command: Sequence[str]) -> int:
    """The command; returns its exit code."""
    names = list(dict.fromkeys(given.sources))
    if len(names) < 2:
        raise ValueError(f"{names[0]} alone cannot be compared: name two checkpoints or more")
    steps = steps_of(names) if names[2:] else None
    names = list(steps or names)
    opened = [inputs.opened(name) for name in names]
    checkpoint.check_output(given, SUFFIXES)
    found: list[Checked] = []
    for one, own in zip(opened, same_inputs(given, opened), strict=True):
        equal = next((o for o in found if same_weights(one.folder, o.opened.folder)), None)
        if equal is None:
            found.append(checkpoint.checked(one, own))
        else:
            print(f"{equal.opened.name} and {one.name} have equal weight files", file=sys.stderr)
            found.append(equal._replace(opened=one))
    layers = {name: one.layers() for name, one in zip(names, found, strict=True)}
    if steps:
        label, keys = "step", list(steps.values())
    else:
        label, keys = "source", names
    lines = [{label: key} | own for key, own in zip(keys, layers.values(), strict=True)]
    rows = [(label, "measure", "layer", "value")] + [
        (key, measure, layer, value)
        for key, own in zip(keys, layers.values(), strict=True)
        for measure, values in own.items()
        for layer, value in enumerate(values)
    ]
    said = [f"{one.opened.name}: {one.verdict()}" for one in found]
    said += dict.fromkeys(one.inputs.made for one in found)

    def written(out: Path) -> dict[Path, bytes]:
        files = drawn(metrics_figure(lines) if steps else by_layer(layers))
        if out.suffix != ".html":
            return {out: files[out.suffix]}
        line = found[0].about(command)["command"]
        heading = "By " + (label if steps else "layer")
        figure = [(files[".png"], CAPTION)]
        section = report.Section("compare", heading, line, figures=figure)
        title = f"{len(names)} checkpoints beside each other"
        return {out: report.render(title, " ".join(said), [section]).encode()}

    checkpoint.write(given, lines, rows, written, said)
    return 0


def same_inputs(given: argparse.Namespace, opened: Sequence[Opened]) -> list[Inputs]:
    """The inputs of each checkpoint: the same texts, ids or arrays.

    Raises:
        ValueError: Texts of one beside random ids of another, or random ids that differ.
    """
    each = [inputs.inputs_of(given, one) for one in opened]
    for one, own in zip(opened, each, strict=True):
        equal = own.kind == each[0].kind
        if equal and own.kind != "texts":  # texts by each one's own tokenizer
            equal = np.array_equal(own.x, each[0].x)
        if not equal:
            raise ValueError(
                f"{opened[0].name} and {one.name} would be measured on different inputs "
                f"({each[0].kind} and {own.kind}): give --tokenizer=FOLDER or --ids=5,8,13"
            )
    return each


def steps_of(names: Sequence[str]) -> dict[str, int] | None:
    """{checkpoint: step}, in order of steps; None where the names have no different numbers."""
    numbers = [_LAST_NUMBER.fullmatch(Path(name).name) for name in names]
    steps = {n: int(found[1]) for n, found in zip(names, numbers, strict=True) if found}
    if len(set(steps.values())) < len(names):
        return None
    return dict(sorted(steps.items(), key=lambda pair: pair[1]))


def same_weights(folder: Path | None, other: Path | None) -> bool:
    """Whether two checkpoints have the same weight files, byte by byte."""
    if folder is None or other is None:
        return False
    both = [
        sorted(f.name for pattern in _WEIGHTS for f in place.glob(pattern))
        for place in (folder, other)
    ]
    return both[0] == both[1] != [] and all(
        filecmp.cmp(folder / name, other / name, shallow=False) for name in both[0]
    )


@figures.styled
def by_layer(layers: Mapping[str, Mapping[str, np.ndarray]]):
    """A panel for each measure {checkpoint: {measure: [L + 1]}}, a curve for each checkpoint."""
    measures = next(iter(layers.values()))
    panels = {
        measure: {escaped(name): own[measure][None] for name, own in layers.items()}
        for measure in measures
    }
    fig, axes = figures.curves(panels, columns=3, width=3.4, height=2.4)
    for measure, ax in zip(panels, axes.flat, strict=False):
        least = min(float(own[measure].min()) for own in layers.values())
        if measure.startswith("residual ratio") and 0 < least < COLLAPSED:
            ax.set_yscale("log")
        elif SHARES.search(measure):
            ax.set_ylim(0, 1.05)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 2))
    return fig
