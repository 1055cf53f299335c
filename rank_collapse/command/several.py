"""Checkpoints beside each other: `rank-collapse compare A B` and `rank-collapse series FOLDER ...`.

    rank-collapse compare my-run/checkpoint-100 my-run/checkpoint-900 --ids 5,8,13
    rank-collapse compare hf:gpt2 my-gpt2 --text my.txt --csv
    rank-collapse series my-run/checkpoint-*
    rank-collapse series hf:EleutherAI/pythia-70m@step0 hf:EleutherAI/pythia-70m@step1000 --json

compare: one figure, the differences A - B by layer of each measure of `rank-collapse check`, means
over the same texts; the table beside it (.csv) has both values. Both need as many layers.
series: a curve by training step of each measure, layers from dark to light. The step is the last
number in a name. Checkpoints with equal weight files are named, and measured once. --json prints a
line for each step, as `rank-collapse watch` reads it.
"""

import argparse
import filecmp
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rank_collapse.command import checkpoint
from rank_collapse.printed import escaped
from rank_collapse.report import figures
from rank_collapse.report.metrics import metrics_figure
from rank_collapse.runs.drawn import drawn

VALUES = ("a", "b", "difference")
_LAST_NUMBER = re.compile(r".*?(\d+)\D*")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("a", metavar="A", help=checkpoint.SOURCE)
    parser.add_argument("b", metavar="B", help="another")
    checkpoint.add_arguments(parser, "compare.png", "the figure, beside it .csv")


def compare(given: argparse.Namespace, command: Sequence[str]) -> int:
    """The command; returns its exit code."""
    checkpoint.check_output(given, "figure", ".png")
    names = (given.a, given.b)
    opened = [checkpoint.opened(name) for name in names]
    depths = [source.config.depth for source, _ in opened]
    if depths[0] != depths[1]:
        raise ValueError(f"{names} have {depths} layers: layers are compared one by one")
    a, b = (checkpoint.checked(given, n, *one) for n, one in zip(names, opened, strict=True))
    pairs = zip(a.layers().items(), b.layers().values(), strict=True)
    layers = {m: dict(zip(VALUES, (x, y, x - y), strict=True)) for (m, x), y in pairs}
    equal = same_weights(a.folder, b.folder)
    line = {"a": a.about(command), "b": b.about(command), "equal_weights": equal, "layers": layers}
    rows: list[tuple] = [("measure", "layer", *VALUES)]
    said = ["the weight files are equal"] if equal else []
    for name, own in layers.items():
        by_layer = [*zip(*own.values(), strict=True)]
        rows += [(name, i, *row) for i, row in enumerate(by_layer)]
        most = int(np.nanargmax(np.abs(own["difference"])))
        said.append(
            "{}: {:.4g} and {:.4g} at layer {}, where most".format(name, *by_layer[most][:2], most)
        )

    @figures.styled
    def figure():
        panels = {name: {"": own["difference"][None]} for name, own in layers.items()}
        fig, axes = figures.curves(panels, columns=4, width=2.6, height=2.2)
        for ax in axes.flat:
            ax.axhline(0, color="#8A8A8A", linewidth=0.8)
        fig.suptitle(escaped(f"{given.a} - {given.b}"), parse_math=False)
        return fig

    checkpoint.write(given, [line], rows, lambda out: {out: drawn(figure())[".png"]}, said)
    return 0


def series_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("sources", metavar="FOLDER", nargs="+", help=checkpoint.SOURCE)
    checkpoint.add_arguments(parser, "series.png", "the figure, beside it .csv")


def series(given: argparse.Namespace, command: Sequence[str]) -> int:
    """The command; returns its exit code."""
    checkpoint.check_output(given, "figure", ".png")
    found: dict[int, checkpoint.Checked] = {}
    for step, name in steps_of(given.sources).items():
        source, folder = checkpoint.opened(name)
        same = next((s for s, one in found.items() if same_weights(folder, one.folder)), None)
        if same is None:
            found[step] = checkpoint.checked(given, name, source, folder)
        else:
            print(f"steps {same} and {step} have equal weight files", file=sys.stderr)
            found[step] = found[same]
    layers = {step: one.layers() for step, one in found.items()}
    lines = [{"step": step} | own for step, own in layers.items()]
    rows = [("step", "measure", "layer", "value")] + [
        (step, measure, layer, value)
        for step, own in layers.items()
        for measure, values in own.items()
        for layer, value in enumerate(values)
    ]
    checkpoint.write(
        given,
        lines,
        rows,
        lambda out: {out: drawn(metrics_figure(lines))[".png"]},
        [f"{len(lines)} steps"],
    )
    return 0


def steps_of(sources: Iterable[str]) -> dict[int, str]:
    """{step: checkpoint}, in order of steps.

    Raises:
        ValueError: A name without a number, or two of one step.
    """
    found: dict[int, str] = {}
    for name in sources:
        number = _LAST_NUMBER.fullmatch(Path(name).name)
        if number is None:
            raise ValueError(f"{name} has no step in its name, such as step1000")
        if found.setdefault(int(number[1]), name) != name:
            raise ValueError(f"{found[int(number[1])]} and {name} are both of step {number[1]}")
    return dict(sorted(found.items()))


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
