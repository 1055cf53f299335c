"""Texts and tables about results, whose numbers are filled in from an experiment's table.

`results.toml` has them by experiment. A placeholder names a row of docs/results/NAME.csv:
`{residual ratio after 12 layers|.2f}`. A column may stand between the two: `{rate: BERT|low|.2f}`;
"interval" writes the number with its interval. "range" writes the least and the largest number of
several rows: `{rate: BERT; rate: ALBERT; rate: XLNet|range|.2f}`. Without a format the cell is
copied. A format that begins with "10^" applies to the power of ten. `{--n_epochs}` is a flag of the
run, or of the last run if there are several.
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.lab import FlagValue, read_rows, table_bytes
from experiments.verdicts import Comparison, Row
from rank_collapse.report.intervals import LEVEL

TEXTS = Path(__file__).with_name("results.toml")
PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf)")
MINUS = re.compile(r"(?<![\w.])-(?=\d)|(?<=\de)-(?=\d)")
COLUMNS = ("measured", "low", "high", "draws", "published")
INTERVAL = "interval"
RANGE = "range"
BETWEEN = "; "  # between the quantities of a range
Numbers = Mapping[str, Mapping[str, str]]  # {quantity: its row of the table}


class Texts(NamedTuple):
    """What `results.toml` has of one experiment.

    Attributes:
        result: The paragraph with the result.
        table: A table of Markdown, with a sentence about it; "" for none.
        settings: The numbers in both that are not results.
    """

    result: str
    table: str = ""
    settings: Sequence[str] = ()


def read_texts() -> dict[str, Texts]:
    """Reads the texts of all experiments, with placeholders."""
    texts = tomllib.loads(TEXTS.read_text("utf-8"))
    return {name: Texts(**fields) for name, fields in texts.items()}


def write_numbers(comparisons: Sequence[Comparison], claims: Sequence[Row]) -> bytes:
    """Writes the table of an experiment: its comparisons, then its rows of statements.

    Args:
        comparisons: Measured and published numbers.
        claims: Rows of statements, each with its own 95 % interval.
    """
    rows = [
        {
            "quantity": row.quantity,
            "measured": row.measured,
            "low": None,
            "high": None,
            "draws": None,
            "published": row.published,
            "source": None if row.published is None else row.source,
            "note": row.note,
        }
        for row in comparisons
    ]
    for row in claims:
        interval = row.interval(LEVEL)
        low, high = interval if interval.is_finite else (None, None)
        rows.append(
            {
                "quantity": f"{row.key}: {row.setting}",
                "measured": row.estimate,
                "low": low,
                "high": high,
                "draws": row.draws,
                "note": row.note,
            }
        )
    return table_bytes(rows)


def read_numbers(table: bytes) -> Numbers:
    """Reads the table of an experiment; if several rows name the same quantity, the first
    counts."""
    return {row["quantity"]: row for row in reversed(read_rows(table))}


def read_settings(arguments: Mapping[str, FlagValue]) -> Numbers:
    """Makes the rows of the flags of a run, {"--n_epochs": 20}, which texts name as numbers.

    Args:
        arguments: {flag: its value, or its values}.
    """
    return {
        f"--{name}": {"measured": ", ".join(map(str, v)) if isinstance(v, list) else str(v)}
        for name, v in arguments.items()
    }


def find_missing(text: str, numbers: Numbers) -> list[str]:
    """Lists the placeholders of a text that the table of its experiment cannot fill."""
    return [p for p in PLACEHOLDER.findall(text) if _fill_one(p, numbers) is None]


def fill(text: str, numbers: Numbers, absent: str = "–") -> str:
    """Fills the placeholders of a text.

    Args:
        text: Text with placeholders.
        numbers: Numbers from `read_numbers`.
        absent: Text in place of a number that the table does not have, see `find_missing`.
    """

    def write(placeholder: re.Match) -> str:
        number = _fill_one(placeholder[1], numbers)
        return absent if number is None else number

    return PLACEHOLDER.sub(write, text)


def _fill_one(placeholder: str, numbers: Numbers) -> str | None:
    """Writes the value of a placeholder; None where there is no such row, or no number in it."""
    text, column, form = split_placeholder(placeholder)
    quantities = text.split(BETWEEN) if column == RANGE else [text]
    if not all(quantity in numbers for quantity in quantities):
        return None
    columns = {INTERVAL: COLUMNS[:3], RANGE: COLUMNS[:1]}.get(column, (column,))
    cells = [numbers[quantity][name] for quantity in quantities for name in columns]
    if column == RANGE:
        if any(read_number(cell) is None for cell in cells):
            return None
        cells = [min(cells, key=read_number), max(cells, key=read_number)]
    written = [format_cell(cell, form) for cell in cells]
    if None in written:
        return None
    return {INTERVAL: "{} ({} to {})", RANGE: "{} to {}"}.get(column, "{}").format(*written)


def split_placeholder(text: str) -> tuple[str, str, str]:
    """Splits "QUANTITY|COLUMN|FORMAT" into its three parts; a range has several quantities.

    Without a column it is the first of `COLUMNS`, and without a format the format is "".
    """
    quantity, _, form = text.rpartition("|")
    if not quantity:
        return form, COLUMNS[0], ""
    start, _, column = quantity.rpartition("|")
    if start and column in (*COLUMNS, INTERVAL, RANGE):
        return start, column, form
    return quantity, COLUMNS[0], form


def format_cell(cell: str, form: str) -> str | None:
    """Writes the first number of a cell in a format; without one, the cell, unless it is NaN.

    Args:
        cell: Cell of the table.
        form: A format as in Python; "10^" before it applies it to the power of ten.

    Returns:
        None where the cell has no number.
    """
    if not form:
        return None if cell == "nan" else write_minus(cell) or None
    value = read_number(cell)
    if value is None:
        return None
    if form.startswith("10^"):
        value = math.pow(10, value)
    text = format(value, form.removeprefix("10^"))
    text = re.sub(r"e([-+])0*(\d)", lambda e: "e" + e[1].replace("+", "") + e[2], text)
    return write_minus(text).replace("%", " %")


def read_number(cell: str) -> float | None:
    """Reads the first number of a cell; None where it has none."""
    number = NUMBER.search(cell)
    return None if number is None else float(number[0])


def write_minus(text: str) -> str:
    """Writes negative numbers with the minus sign of the pages."""
    return MINUS.sub("−", text)
