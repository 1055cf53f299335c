"""Cells of a sweep that differ in floats alone, trained and measured as one ensemble of runs."""

from collections.abc import Callable
from typing import Any

import numpy as np
from flax import traverse_util

from experiments.shell import cli
from experiments.shell.flag_values import Flags
from experiments.trained import arguments
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training.recipe import Recipe, check_hyper


def results_of_cell(
    options: Flags, recipe: Recipe, compute: Callable[[Flags, RunFolder], Any], aside: set[str]
) -> dict[str, np.ndarray]:
    """The arrays of one cell, out of those of all cells it is computed with.

    The first cell computes all, in a run folder that the others find them in; cells whose values
    mean nothing are left out, so that they fail by themselves.

    Args:
        options: Of the cell.
        recipe: What is trained.
        compute: (flags of the ensemble, its run folder) → nested dictionary of arrays, whose
            leading axis is that of the runs, cell after cell.
        aside: Names of arrays that have no such axis; "seconds" are shared among the cells.

    Raises:
        ValueError: Values of this cell that mean nothing, see `check_hyper`.
    """
    check_hyper(arguments.hyper(options), recipe)
    unit = options.unit
    cells = [cell.options for cell in unit.cells if _means_something(cell.options, recipe)]
    whole = options.copied()
    whole.belong_to(cells=cells, programs=options.programs)
    whole.num_seeds = options.num_seeds * len(cells)
    config = [cli.config_of(cell, cell.experiment, cell.aside) for cell in cells]
    with RunFolder(unit.folder, {"cells": config}) as run:
        found = traverse_util.flatten_dict(compute(whole, run), sep="/")
    index = cells.index(options)
    own = slice(index * options.num_seeds, (index + 1) * options.num_seeds)
    return {name: _part(name, values, own, aside, len(cells)) for name, values in found.items()}


def _means_something(options, recipe):
    try:
        check_hyper(arguments.hyper(options), recipe)
    except ValueError:
        return False
    return True


def _part(name, values, own, aside, count):
    first = name.split("/")[0]
    if first == "seconds":
        return values / count
    return values if first in aside else values[own]


def name_of(options: Flags, run: int) -> str:
    """What one run of an ensemble is called: its seed, and of several cells its cell."""
    run += options.window.start or 0
    if not options.cells:
        return f"seed {run}"
    cell, seed = divmod(run, options.num_seeds // len(options.cells))
    return f"seed {seed} of cell {cell + 1}"
