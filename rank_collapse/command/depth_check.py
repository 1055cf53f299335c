"""Depth parametrisations on a small language model: `rank-collapse depth-check`.

    rank-collapse depth-check --rules=sp,completep
    rank-collapse depth-check --rules=mup,half,completep --depths=2,4,8,16,32,64 --text my.txt --csv

Trains pre-norm networks over bytes for a few steps at each depth, three seeds each, and fits every
quantity by a power of the depth: the mean size of the last states, their change in a step, residual
ratio and cosine of tokens, the gradient of W_Q, how far blocks are from linear in their weights.
Each slope has its 95 % interval and a range in which a rule holds. `rc.coord_check` does the same
with a model of your own, of any framework. The rules are those of `rc.depth_rule`: sp, mup, half,
completep, looped. --csv has every number, --json the slopes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rank_collapse.command import checkpoint
from rank_collapse.measures.coord_check import MEANING
from rank_collapse.report.coord_check import coordinates_figure
from rank_collapse.runs.drawn import drawn
from rank_collapse.text.words import read_text

MOST = 10_000  # more networks, steps or layers would not end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--rules", default="sp,completep", help="by commas (default: sp,completep)")
    parser.add_argument("--depths", type=depths, default="2,8,32", help="(default: 2,8,32)")
    parser.add_argument("--width", type=count, default=64, help="of the networks (default: 64)")
    parser.add_argument("--base_width", type=count, default=256, help="of the base (default: 256)")
    parser.add_argument("--steps", type=count, default=10, help="of training (default: 10)")
    networks = f"networks of each depth, at most {MOST} (default: 3)"
    parser.add_argument("--seeds", type=count, default=3, help=networks)
    parser.add_argument("--text", help="a UTF-8 file; by default the text shipped with the package")
    parser.add_argument("--out", default="depth_check.png", help="the figure, beside it .csv")
    parser.add_argument("--json", action="store_true", help="print slopes, a line for each rule")
    parser.add_argument("--csv", action="store_true", help="print the table alone")


def run(flags: argparse.Namespace, command: Sequence[str]) -> int:
    """The command; returns its exit code."""
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
        {"rule": name, "slopes": {slope.quantity: slope._asdict() for slope in check.slopes()}}
        for name, check in checks.items()
    ]
    tables = {name: check.columns() for name, check in checks.items()}
    rows = [("rule", *next(iter(tables.values())))]
    for name, columns in tables.items():
        rows += [(name, *row) for row in zip(*columns.values(), strict=True)]
    curves: dict[str, Any] = {}
    for name, check in checks.items():
        curves |= check.by_width(name)

    def figure(out: Path) -> dict[Path, bytes]:
        return {out: drawn(coordinates_figure(curves, flags.depths, MEANING))[".png"]}

    said = [f"{name}: {check}" for name, check in checks.items()]
    checkpoint.write(flags, lines, rows, figure, said)
    return 0


def depths(text: str) -> list[int]:
    """Numbers of layers by commas."""
    return [count(part) for part in text.split(",")]


def count(text: str) -> int:
    """A number from 1 to `MOST`.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not (text.isdecimal() and 1 <= int(text) <= MOST):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to {MOST}")
    return int(text)
