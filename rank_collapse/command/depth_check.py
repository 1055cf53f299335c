"""Depth parametrisations on a small language model: `rank-collapse depth-check`.

    rank-collapse depth-check --rules=sp,completep
    rank-collapse depth-check --rules=mup,half,completep --depths=2,4,8,16,32,64 --text my.txt --csv

Trains pre-norm networks over bytes for a few steps at each depth, three seeds each, and fits every
quantity by a power of the depth: the mean size of the last states, their change in a step, residual
ratio and cosine of tokens, the gradient of W_Q, how far blocks are from linear in their weights.
Each slope has its 95 % interval, and each quantity its largest ratio between two depths.
`rc.coord_check` does the same with a model of your own, of any framework. The rules are those of
`rc.depth_rule`: sp, mup, half, completep, looped. --csv has every number, --json the slopes.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rank_collapse.command import checkpoint
from rank_collapse.runs.drawn import draw_files
from rank_collapse.text.words import read_text
from rank_collapse.watch.coord_check import coordinates_figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--rules", default="sp,completep", help="by commas (default: sp,completep)")
    parser.add_argument("--depths", type=depths, default="2,8,32", help="(default: 2,8,32)")
    for name, default, most, text in (
        ("--width", 64, 100_000, "of the networks"),
        ("--base_width", 256, 100_000, "of the base"),
        ("--steps", 10, 100_000, "of training"),
        ("--seeds", 3, 1_000, "networks of each depth"),
    ):
        text = f"{text} (default: {default})"
        parser.add_argument(name, type=number(1, most), default=default, help=text)
    parser.add_argument("--text", help="a UTF-8 file; by default the text shipped with the package")
    parser.add_argument("--out", default="depth_check.png", help="the figure, beside it .csv")
    parser.add_argument("--json", action="store_true", help="print slopes, a line for each rule")
    parser.add_argument("--csv", action="store_true", help="print the table alone")


def run(given: argparse.Namespace, command: Sequence[str]) -> int:
    """The command; returns its exit code."""
    from rank_collapse.training.depth_check import Training, depth_check  # optax: for this alone

    checkpoint.check_output(given, (".png",))
    text = None if given.text is None else read_text(given.text)
    checks = depth_check(
        given.rules.split(","),
        given.depths,
        width=given.width,
        base_width=given.base_width,
        seeds=given.seeds,
        text=text,
        training=Training(steps=given.steps),
    )
    lines = [
        {"rule": name, "slopes": {one.quantity: one._asdict() for one in check.slopes()}}
        for name, check in checks.items()
    ]
    tables = {name: check.columns() for name, check in checks.items()}
    rows = [("rule", *next(iter(tables.values())))]
    for name, columns in tables.items():
        rows += [(name, *row) for row in zip(*columns.values(), strict=True)]
    curves = {n: own for name, check in checks.items() for n, own in check.by_width(name).items()}

    def figure(out: Path) -> dict[Path, bytes]:
        return {out: draw_files(coordinates_figure(curves, given.depths))[".png"]}

    said = [f"{name}: {check}" for name, check in checks.items()]
    checkpoint.write(given, lines, rows, figure, said)
    return 0


def number(least: int, most: int) -> Callable[[str], int]:
    """Makes the parser of an integer between bounds."""

    def parse_integer(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    return parse_integer


def depths(text: str) -> list[int]:
    """Numbers of layers by commas."""
    return [number(1, 10_000)(one) for one in text.split(",")]
