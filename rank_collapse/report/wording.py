"""Statements, rows and numbers in words, as the pages and the terminal show them."""

import math
from collections.abc import Sequence
from typing import Any

from rank_collapse.report.claims import (
    FINDING,
    NO_CASE,
    Answer,
    Judged,
    Range,
    Row,
    Statement,
    by_chance,
    counted,
)

JOINTLY = (
    "Each line is one setting, with its 95 % interval; the intervals of a statement hold jointly "
    "(Holm). Those of means are Student's and presume draws that are near normal, those of shares "
    "are Wilson's. Within: all of the interval is in the claimed range, outside: none of it, "
    "undecided: part of it, or too few draws. A statement holds where all settings are within, in "
    "part where some are. It does not hold where all are outside, or one is outside of a statement "
    "without exceptions, and not in all settings where some are outside and the others undecided. "
    "Else it cannot be said. Confirmed: the answer is that of a run on seeds "
    "that were never used, after the last change of the statistic or the range. Findings are what "
    "no paper says; they have no answer."
)


def number(value: Any) -> str:
    """A value as the table shows it: four significant digits."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "—"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def count_line(answers: Sequence[Answer]) -> str:
    """ "3 statements tested in 9 rows: holds: 2, ... Chance alone ... to 0.15 of them"."""
    tested = [a for a in answers if a.answer != FINDING]
    counts = ", ".join(f"{answer}: {n}" for answer, n in counted(tested).items())
    rows = sum(len(a.rows) for a in tested)
    return (
        f"{len(tested)} statement{'s' * (len(tested) != 1)} tested in {rows} rows: {counts}. "
        f"On average chance gives a row of {by_chance(tested):.2g} of them a wrong verdict at most"
    )


def range_text(claimed: Range | None) -> str:
    """ "above 0", "below -2", "2.5 to 3.5", "no case"; of a finding nothing."""
    if claimed in (None, NO_CASE):
        return "" if claimed is None else "no case"
    low, high = claimed
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"


def holds_text(statement: Statement) -> str:
    """Where a statement holds: "above 0", "where the share of draws above 0.1 is above 0.5"."""
    found = range_text(statement.claimed)
    each = range_text(statement.each)
    return f"where the share of draws {each} is {found}" if each else found


def standing(statement: Statement) -> str:
    """ "on new seeds: holds", or "not confirmed on new seeds"; of a finding nothing."""
    if statement.claimed is None:
        return ""
    if not statement.confirmed:
        return "not confirmed on new seeds"
    return f"on new seeds: {statement.confirmed.partition(': ')[2]}"


def span(judged: Judged) -> str:
    """A row's statistic and its interval, "2.9 (2.8 to 3.1)"."""
    if judged.row.estimate is None:
        return "—"
    estimate, interval = number(judged.row.estimate), judged.interval
    if interval is None or interval[0] == interval[1]:
        return estimate
    return f"{estimate} ({number(interval[0])} to {number(interval[1])})"


def answer_lines(answer: Answer) -> str:
    """ "holds          Section 3.1: ..." and a line for each of its rows."""
    s = answer.statement
    stands = f" ({standing(s)})" if s.claimed else ""
    lines = [f"{answer.answer:14s} {s.source}: {s.text}{stands}"]
    for judged in answer.rows:
        verdict = "" if answer.answer == FINDING else judged.verdict
        lines.append(f"    {verdict:10s} {judged.row.setting}: {span(judged)}; {note(judged.row)}")
    return "\n".join(lines)


def note(row: Row) -> str:
    """ "8 draws; 2 of 10 draws have no number"."""
    return f"{row.draws} draw{'s' * (row.draws != 1)}" + (f"; {row.why}" if row.why else "")
