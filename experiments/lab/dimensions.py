"""Names of the dimensions of the arrays that runs keep: the file arrays.json of a run folder.

The table arrays.csv lists them by experiment and name of the array; the first match counts.
"""

import csv
import functools
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

TABLE = Path(__file__).with_name("arrays.csv")


@functools.cache
def read_dictionary() -> list[dict[str, str]]:
    """Reads the rows of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def describe_array(experiment: str, name: str, ndim: int) -> dict[str, str | list[str]]:
    """Describes an array of a run.

    Args:
        experiment: Name of its module, or of the folder of its runs.
        name: Name of the array.
        ndim: Number of its axes.

    Returns:
        "dimensions", a name for each axis, and "meaning".

    Raises:
        LookupError: The table has no array of this name with so many axes.
    """
    modules = {experiment, f"run_{experiment}", "all"}
    for row in read_dictionary():
        if modules & {*row["experiments"].split()} and fnmatchcase(name, row["arrays"]):
            dimensions = row["dimensions"].split()
            if dimensions[-1] == "*":  # of any number of axes
                leading = dimensions[:-1]
                dimensions = leading + [f"axis_{i}" for i in range(len(leading), ndim)]
            if len(dimensions) == ndim:
                return {"dimensions": dimensions, "meaning": row["meaning"]}
            break
    raise LookupError(f"{TABLE.name} has no array {name!r} of {experiment} with {ndim} axes")


def dump_descriptions(experiment: str, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Writes {name: its dimensions and meaning} as JSON; arrays without a row are left out.

    Args:
        experiment: See `describe_array`.
        arrays: Arrays of the run.
    """
    described = {}
    for name, array in arrays.items():
        try:
            described[name] = describe_array(experiment, name, np.ndim(array))
        except LookupError:  # of an experiment that is not among ours
            continue
    return (json.dumps(described, indent=1, ensure_ascii=False) + "\n").encode()
