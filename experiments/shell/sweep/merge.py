"""What is shown of a sweep: one table, one figure, and the means by cell."""

import contextlib
import csv
import math
import sys
from functools import partial
from typing import Any

from experiments.shell.sweep.figures import grid_figure
from experiments.shell.sweep.folder import SweepFolder
from rank_collapse.report.statistics import SHARES, mean_and_ends
from rank_collapse.runs.files import RunError
from rank_collapse.runs.folder import RunFolder


def show(sweep: SweepFolder, folder: RunFolder) -> int:
    """Merges the cells as soon as each is finished or has failed; prints how far the sweep is.

    Args:
        sweep: The sweep.
        folder: Its run folder, opened.

    Returns:
        0, or 1 where a cell failed.

    Raises:
        ValueError: What is to be shown is not in the tables of the cells.
    """
    failures, left = sweep.failures(), sweep.left()
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if set(left) <= failures.keys() and len(left) < len(sweep.cells):
        means = publish(sweep, folder, failures)["mean"]
        print(f"{sweep.shown}, mean over seeds (of a seed's rows where it has several):")
        for name, found in means.items():
            low, high = found["interval"]
            ends = "" if low is None or high is None else f"  (95 %: {low:.4g} to {high:.4g})"
            mean, count = found["mean"], f"{ends}  {found['seeds']} seed(s)"
            print(f"  {name:40s} " + ("no number" if mean is None else f"{mean:10.4g}{count}"))
    done = len(sweep.cells) - len(left)
    print(f"{done} of {len(sweep.cells)} cells are done: {sweep.path}")
    return 1 if failures else 0


def publish(sweep: SweepFolder, folder: RunFolder, failures: dict[str, str]) -> dict[str, Any]:
    """Writes what is missing, or of fewer cells, of results.csv, figures/ and summary.json."""
    names = [name for name in sweep.cells if sweep.done(name)]
    current = {"shows": sweep.shown, "cells": names, "failed": failures}
    values = {name: shown_of(sweep, name) for name in names}
    if not any(values.values()):
        raise ValueError(f"--sweep_shows={sweep.shown}: no cell has a row of that with a number")
    return folder.publish(
        rows=lambda: [sweep.cells[n].values | row for n in names for row in table_of(sweep, n)],
        figures={"grid": partial(grid_figure, sweep.axes, sweep.cells, values, sweep.shown)},
        summary=lambda: {"values": values, "mean": means_of(values, sweep.shown)},
        shown=current,
    )


def table_of(sweep: SweepFolder, name: str) -> list[dict[str, str]]:
    """The rows of one cell's results.csv."""
    path = sweep.folder_of(name) / "results.csv"
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise RunError(f"{path} cannot be read ({error}); delete its folder") from error


def shown_of(sweep: SweepFolder, name: str) -> dict[str, float]:
    """{seed: mean over the rows that fulfil the conditions} of one cell; seeds with a number only.

    What is shown is "column,condition=value,...", where the value "last" is that of the last row.

    Raises:
        ValueError: A column that there is not.
    """
    column, *conditions = (part.strip() for part in sweep.shown.split(","))
    wanted = dict(condition.partition("=")[::2] for condition in conditions)
    rows = table_of(sweep, name)
    for key in (*wanted, column):
        if rows and key not in rows[0]:
            known = ", ".join(rows[0])
            raise ValueError(f"--sweep_shows={sweep.shown}: {key!r} is not one of {known}")
    for key, value in wanted.items():
        last = rows[-1][key] if rows and value == "last" else value
        rows = [row for row in rows if row[key] == last]
    by_seed: dict[str, list[float]] = {}
    for row in rows:
        with contextlib.suppress(TypeError, ValueError):
            if math.isfinite(value := float(row[column])):
                by_seed.setdefault(row.get("seed", ""), []).append(value)
    return {seed: math.fsum(values) / len(values) for seed, values in by_seed.items()}


def means_of(values: dict[str, dict[str, float]], shown: str) -> dict[str, dict[str, Any]]:
    """{cell: mean over its seeds, 95 % interval (see `mean_and_ends`), number of seeds}.

    The mean is None where no seed has a number.
    """
    found, share = {}, shown.partition(",")[0].strip() in SHARES
    for name, by_seed in values.items():
        own = list(by_seed.values())
        mean, *ends = mean_and_ends(own, share=share) if own else [None] * 3
        found[name] = {"mean": mean, "interval": ends, "seeds": len(own)}
    return found
