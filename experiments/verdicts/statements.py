"""The statements of papers, and the protocol of the run that answers them.

Both are in statements.toml, which is registered before that run: statements that could go either
way, with their ranges and settings, statements that must hold, and findings. An experiment's
`claims` gives the rows of a statement, one for each setting. docs/statements.md is written by
`python -m experiments.reproduce --markdown`.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.verdicts.claims import Statement
from experiments.verdicts.rows import Draws, Row, mean_row, median_row, share_within_row

PATH = Path(__file__).with_name("statements.toml")


@dataclass(frozen=True)
class Protocol:
    """How seeds are added until the rows of statements are decided, fixed before the run."""

    first_seed: int  # --seed of the run; none from here on was used before
    rounds: Sequence[int]  # Seeds of the first rounds; later ones are twice as many
    budgets: Mapping[str, int]  # {experiment: the most seeds, or texts}
    texts: str  # Which texts are read, and whether they were used before
    changed: Sequence[str]  # What earlier looks changed


def read_statements(path: Path) -> tuple[Protocol, dict[str, Statement]]:
    """Reads a file of statements; ranges and lists become tuples.

    Args:
        path: The TOML file.

    Returns:
        (the protocol, {key: statement}).
    """
    table = tomllib.loads(path.read_text("utf-8"))
    protocol = Protocol(**table.pop("protocol"))
    statements = {}
    for key, row in table.items():
        fields = {n: tuple(v) if isinstance(v, list) else v for n, v in row.items()}
        statements[key] = Statement(**fields)
    return protocol, statements


PROTOCOL, STATEMENTS = read_statements(PATH)


def make_row(
    key: str,
    setting: str,
    values: Draws,
    *,
    scale: Callable = float,
    note: str = "",
) -> Row:
    """Makes the row of a statement's draws: their median, or the share of them in its draw range.

    A statement without a range gets a mean.

    Args:
        key: Key in `STATEMENTS`.
        setting: The network, task or size.
        values: The statistic of each draw; None or NaN for a draw without one.
        scale: An increasing function on whose scale a mean or a median is shown.
        note: Further remark on the numbers.
    """
    statement = STATEMENTS[key]
    if statement.claimed is None:
        return mean_row(key, setting, values, scale=scale, note=note)
    if statement.draw_range is None:
        return median_row(key, setting, values, statement.claimed, scale=scale, note=note)
    return share_within_row(key, setting, values, statement.draw_range, note=note)
