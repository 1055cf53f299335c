"""The statements of papers: those that could go either way, what must hold, and findings.

They stand in statements.toml. Each has one statistic, and an experiment's `claims` gives its rows,
one a setting. Ranges are fixed before the run whose rows docs/statements.md shows. The page is
written by `python -m experiments.reproduce --markdown`.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.verdicts.claims import Row, Statement, mean_row, share_within_row


def read_statements(path: Path) -> dict[str, Statement]:
    """Reads a table of statements; ranges and lists become tuples."""
    table = tomllib.loads(path.read_text("utf-8"))
    return {
        key: Statement(**{n: tuple(v) if isinstance(v, list) else v for n, v in row.items()})
        for key, row in table.items()
    }


STATEMENTS = read_statements(Path(__file__).with_name("statements.toml"))


def make_row(key: str, setting: str, values: Iterable[Any], *, note: str = "") -> Row:
    """Makes the row of a statement's draws: their mean, or the share of them in its draw range.

    Args:
        key: Of `STATEMENTS`.
        setting: The network, task or size.
        values: The statistic of each draw; None or NaN where a draw has none.
        note: What the numbers do not say by themselves.
    """
    draw_range = STATEMENTS[key].draw_range
    if draw_range is None:
        return mean_row(key, setting, values, note=note)
    return share_within_row(key, setting, values, draw_range, note=note)
