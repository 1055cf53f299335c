"""The tables of docs/columns.md, and whether a results.csv keeps to them."""

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from trained_runs import number

PAGE = Path(__file__).resolve().parent.parent / "docs" / "columns.md"
ROW = re.compile(r"^\| (`[^|]+`) \| (number|text) \| [^|]+ \| [^|]*\|$", re.MULTILINE)


def dictionary() -> dict[str, str]:
    """{column, or pattern of columns: "number" or "text"}."""
    found = {}
    for names, kind in ROW.findall(PAGE.read_text("utf-8")):
        found |= dict.fromkeys(re.findall("`([^`]+)`", names), kind)
    return found


def kind_of(column: str) -> str:
    """The kind of a column; an exact name goes before a pattern.

    Raises:
        LookupError: The page does not have it.
    """
    known = dictionary()
    for name, kind in known.items():
        if name == column or (column not in known and fnmatchcase(column, name)):
            return kind
    raise LookupError(f"docs/columns.md has no column {column!r}")


def check_columns(table: Sequence[Mapping[str, str]]) -> None:
    """Every column is described, and has numbers alone where it is one of numbers."""
    for column in table[0]:
        kind, values = kind_of(column), {row[column] for row in table} - {""}
        if kind == "number":
            for value in values:
                float(value)  # raises for text
        assert kind == "number" or all(math.isnan(number(v)) for v in values), column
