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
    """Add the flags of `depth-check`."""
    parser.add_argument("--rules", default="sp,completep", help="by commas (default: sp,completep)")
    parser.add_argument("--depths", type=parse_depths, default="2,8,32", help="(default: 2,8,32)")
    for name, default, most, text in (
        ("--width", 64, 100_000, "of the networks"),
        ("--base_width", 256, 100_000, "of the base"),
        ("--steps", 10, 100_000, "of training"),
        ("--seeds", 3, 1_000, "networks of each depth"),
    ):
        text = f"{text} (default: {default})"
        parser.add_argument(name, type=integer_parser(1, most), default=default, help=text)
    parser.add_argument("--text", help="a UTF-8 file; by default the text shipped with the package")
    parser.add_argument("--out", default="depth_check.png", help="the figure, beside it .csv")
    parser.add_argument("--json", action="store_true", help="print slopes, a line for each rule")
    parser.add_argument("--csv", action="store_true", help="print the table alone")


def run(flags: argparse.Namespace, command: Sequence[str]) -> int:
    """Runs `depth-check`; returns its exit code.

    Args:
        flags: Of `add_arguments`.
        command: Words of the command line.
    """
    from rank_collapse.training.depth_check import Training, depth_check  # optax: for this alone

    checkpoint.check_output(flags, (".png",))
    text = None if flags.text is None else read_text(flags.text)
    checks = depth_check(
        flags.rules.split(","),
        flags.depths,
        width=flags.width,
        base_width=flags.base_width,
        seeds=flags.seeds,
        text=text,
        training=Training(steps=flags.steps),
    )
    lines = [
        {"rule": name, "slopes": {one.quantity: one._asdict() for one in check.slopes()}}
        for name, check in checks.items()
    ]
    tables = {name: check.columns() for name, check in checks.items()}
    rows = [("rule", *next(iter(tables.values())))]
    for name, columns in tables.items():
        rows += [(name, *row) for row in zip(*columns.values(), strict=True)]
    curves = {
        n: curve for name, check in checks.items() for n, curve in check.by_width(name).items()
    }

    def make_figure(out: Path) -> dict[Path, bytes]:
        return {out: draw_files(coordinates_figure(curves, flags.depths))[".png"]}

    sentences = [f"{name}: {check}" for name, check in checks.items()]
    checkpoint.write_outputs(flags, lines, rows, make_figure, sentences)
    return 0


def integer_parser(least: int, most: int) -> Callable[[str], int]:
    """Makes the parser of an integer between bounds.

    Args:
        least, most: The bounds, both allowed.
    """

    def parse_integer(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    return parse_integer


def parse_depths(text: str) -> list[int]:
    """Parse numbers of layers, separated by commas."""
    return [integer_parser(1, 10_000)(one) for one in text.split(",")]
