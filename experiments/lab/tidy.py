"""Measurements of seeds as tables, the same for every experiment.

Arrays of seeds are [s, ...], others are of all seeds together; NaN is a number that there is not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.verdicts.claims import Row


def rows(
    results: Mapping[str, Any], axes: Sequence[str], columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each combination of the axes; a column that lacks the first axes is repeated.

    Args:
        results: Arrays by name: of an axis its values [k], without them 0, 1, ..; of a column
            [..., k] for the last axes.
        axes: Names of the axes, such as "seed" and "length".
        columns: Names of the columns. Where a value is NaN the row has no entry.
    """
    own = [np.asarray(results[name], object) for name in columns]  # integers may exceed any float
    values = dict(zip(columns, np.broadcast_arrays(*own), strict=True))
    for index in np.ndindex(values[columns[0]].shape):
        places = zip(axes, index, strict=True)
        row = {axis: results[axis][i] if axis in results else i for axis, i in places}
        yield row | {n: a[index] for n, a in values.items() if a[index] == a[index]}


def from_one(values: Any) -> np.ndarray:
    """[..., k] of lengths or layers 1 .. k as [..., k + 1], with NaN at 0."""
    return np.insert(np.asarray(values), 0, np.nan, axis=-1)


def finite(
    results: Mapping[str, np.ndarray], name: str, say: Callable[[str], None]
) -> dict[str, np.ndarray]:
    """The results of the seeds of which `name` is a number, "seed" [s]; the others are named.

    Raises:
        ValueError: There is no such seed.
    """
    fine = np.isfinite(results[name])
    why = "NaN or overflow in the network; a smaller --weight_scale or --norm_placement=post may "
    why += "hold it"
    if not fine.any():
        raise ValueError(f"all {len(fine)} seeds: {why}")
    for seed in np.flatnonzero(~fine):
        say(f"seed {seed} is kept apart: {why}")
    return {n: a[fine] for n, a in results.items()} | {"seed": np.flatnonzero(fine)}


def of_row(row: Row) -> dict[str, Any]:
    """A row of a statement as JSON has it, with its own 95 % interval."""
    found = row.interval(0.95)
    ends = [*found] if found.known else []
    named = {n: getattr(row, n) for n in ("key", "setting", "draws", "estimate", "why")}
    return named | {"interval": ends}
