"""The table of columns that docs/columns.md shows, and whether a results.csv keeps to it."""

import csv
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from tests.support.folders import REPOSITORY
from tests.support.runs import number

TABLE = REPOSITORY / "experiments" / "lab" / "columns.csv"


def dictionary() -> dict[str, str]:
    """Reads {column, or pattern of columns: "number" or "text"}."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {column: row["kind"] for row in rows for column in row["columns"].split()}


def get_kind(column: str) -> str:
    """Returns the kind of a column; an exact name goes before a pattern.

    Raises:
        LookupError: The table does not have the column.
    """
    kinds = dictionary()
    for name, kind in kinds.items():
        if name == column or (column not in kinds and fnmatchcase(column, name)):
            return kind
    raise LookupError(f"{TABLE.name} has no column {column!r}")


def check_columns(table: Sequence[Mapping[str, str]]) -> None:
    """Checks that every column is described, and that its values are of the described kind."""
    for column in table[0]:
        kind, values = get_kind(column), {row[column] for row in table} - {""}
        if kind == "number":
            for value in values:
                float(value)  # raises for text
        assert kind == "number" or all(math.isnan(number(v)) for v in values), column
