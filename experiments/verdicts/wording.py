"""Statements, rows and numbers in words, as the pages and the terminal show them."""

import math
from collections.abc import Sequence

from experiments.verdicts.claims import (
    ERROR,
    FEWEST_DRAWS,
    FEWEST_OF_SHARE,
    FINDING,
    NO_CASE,
    UNDECIDED,
    Answer,
    Judged,
    Range,
    Row,
    Statement,
    by_chance,
    counted,
)
from rank_collapse.report.intervals import draws_needed
from rank_collapse.report.page import format_number

JOINTLY = (
    "Each line is one setting with its 95 % interval; the intervals of a statement hold jointly "
    "(Holm). Those of means are Student's and presume draws that are near normal; those of shares "
    "are Wilson's. A setting is within where all of its interval lies in the claimed range, "
    "outside where none of it does, and undecided otherwise or with too few draws. A statement "
    "holds where all settings are within, and in part where some are. It does not hold where all "
    "are outside, or where one is outside of a statement without exceptions, and not in all "
    "settings where some are outside and the others undecided. Otherwise it cannot be said. New "
    "seeds are seeds that were never used before the last change of the statistic or the range. "
    "Findings are what no paper says; they get no answer."
)


def counts(answers: Sequence[Answer]) -> str:
    """ "holds 24, holds in part 7"; findings are not counted."""
    return ", ".join(f"{answer} {n}" for answer, n in counted(answers).items() if n) or "findings"


def count_line(answers: Sequence[Answer]) -> str:
    """ "Statements tested: 3, in settings: 9. Answers: holds 2, … At most 0.15 … by chance."."""
    tested = [a for a in answers if a.answer != FINDING]
    settings = sum(len(a.rows) for a in tested)
    return (
        f"Statements tested: {len(tested)}, in settings: {settings}. Answers: {counts(tested)}. "
        f"At most {by_chance(tested):.2g} of the answers are expected to be wrong by chance."
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


def quantity(statement: Statement) -> str:
    """What the intervals of a statement are of: its statistic, or the share of draws in a range."""
    each = range_text(statement.each)
    return statement.statistic + (f": share of draws {each}" if each else "")


def standing(answer: Answer) -> str:
    """Whether a run on new seeds gave the same answer, a sentence; of a finding nothing."""
    confirmed = answer.statement.confirmed.partition(": ")[2]
    if answer.answer == FINDING:
        return ""
    if not confirmed:
        return "Not tested on new seeds."
    same = confirmed == answer.answer
    return "New seeds gave the same answer." if same else f"New seeds gave: {confirmed}."


def span(judged: Judged) -> str:
    """A row's statistic and its interval, "2.9 (2.8 to 3.1)"."""
    if judged.row.estimate is None:
        return "—"
    estimate, interval = format_number(judged.row.estimate), judged.interval
    if not interval.is_finite or interval.low == interval.high:
        return estimate
    return f"{estimate} ({format_number(interval.low)} to {format_number(interval.high)})"


def answer_lines(answer: Answer) -> str:
    """ "holds          Section 3.1: ..." and a line for each of its rows."""
    s, level = answer.statement, 1 - ERROR / max(1, len(answer.rows))
    lines = [f"{answer.answer:14s} {s.source}: {s.text}"]
    for judged in answer.rows:
        verdict = "" if answer.answer == FINDING else judged.verdict
        needed = draws_to_decide(judged, s.claimed, level)
        line = f"    {verdict:10s} {judged.row.setting}: {span(judged)}; {note(judged.row)}"
        lines.append(f"{line}; {needed}" if needed else line)
    return "\n".join(lines)


def draws_to_decide(judged: Judged, claimed: Range | None, level: float) -> str:
    """Says how many draws would decide a row, were their mean and spread the same.

    Args:
        claimed: The range of its statement.
        level: Of its interval.

    Returns:
        "about 9 would decide"; "" of a row that is decided or of which it cannot be said.
    """
    row = judged.row
    if judged.verdict != UNDECIDED or claimed is None or row.estimate is None:
        return ""
    low, high = row.interval(level)
    distance = min(abs(row.estimate - end) for end in claimed if math.isfinite(end))
    if math.isfinite(high - low) and high > low and row.draws > 1 and distance:
        count = draws_needed((high - low) / 2, row.draws, distance, level)
        return f"about {max(count, FEWEST_DRAWS):,} would decide"
    fewest = FEWEST_DRAWS if low == high else FEWEST_OF_SHARE
    return f"{fewest} or more would decide" if row.draws < fewest else ""


def note(row: Row) -> str:
    """ "8 draws; 2 of 10 draws have no number"."""
    return f"{row.draws} draw{'s' * (row.draws != 1)}" + (f"; {row.why}" if row.why else "")
