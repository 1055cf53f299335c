"""Statements, rows and numbers in words, as the pages and the terminal show them."""

import math
from collections.abc import Sequence
from typing import Any

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
    count_answers,
    expected_errors,
)
from rank_collapse.measures.profiles import rounding_limit
from rank_collapse.report.intervals import draws_needed
from rank_collapse.report.page import format_number

JOINTLY = (
    "Each line is one setting with its 95 % interval; the intervals of a statement hold jointly "
    "(Holm). Those of means are Student's and presume draws that are near normal; those of shares "
    "are Wilson's. A setting is within where all of its interval lies in the claimed range, "
    "outside where none of it does, and undecided otherwise or with too few draws. A statement "
    "holds where all settings are within, and in part where some are. It does not hold where all "
    "are outside, or where one is outside of a statement without exceptions, and not in all "
    "settings where some are outside and the others undecided. Otherwise it is inconclusive. "
    "Held-out seeds were never used before the last change of the statistic or the range. "
    "Findings are what no paper says; they get no answer."
)


def show_ratio(ratio: float, dtype: Any = "float32") -> float | str:
    """Returns a residual ratio, or a bound where rounding to the dtype decides it."""
    limit = rounding_limit(dtype)
    return f"below {limit:.0e} (rounding)" if ratio <= limit else float(ratio)


def count_text(answers: Sequence[Answer]) -> str:
    """Writes "holds 24, partly supported 7"; findings are not counted."""
    texts = [f"{answer} {n}" for answer, n in count_answers(answers).items() if n]
    return ", ".join(texts) or "findings"


def count_line(answers: Sequence[Answer]) -> str:
    """Writes "Statements tested: 3, in settings: 9. Answers: holds 2, … by chance."."""
    tested = [a for a in answers if a.answer != FINDING]
    num_settings = sum(len(a.rows) for a in tested)
    return (
        f"Statements tested: {len(tested)}, in settings: {num_settings}. Answers: "
        f"{count_text(tested)}. At most {expected_errors(tested):.2g} of the answers are expected "
        "to be wrong by chance."
    )


def range_text(claimed: Range | None) -> str:
    """Writes a range: "above 0", "below -2", "2.5 to 3.5", "no case"; of a finding ""."""
    if claimed in (None, NO_CASE):
        return "" if claimed is None else "no case"
    low, high = claimed
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"


def holds_text(statement: Statement) -> str:
    """Writes where a statement holds: "where the share of draws above 0.1 is above 0.5"."""
    claimed, draw_range = range_text(statement.claimed), range_text(statement.draw_range)
    return f"where the share of draws {draw_range} is {claimed}" if draw_range else claimed


def quantity_text(statement: Statement) -> str:
    """Names the quantity of a statement's intervals: its statistic, or a share of draws."""
    draw_range = range_text(statement.draw_range)
    return statement.statistic + (f": share of draws {draw_range}" if draw_range else "")


def confirmation_text(answer: Answer) -> str:
    """Says whether a run on held-out seeds gave the same answer; of a finding nothing."""
    confirmed = answer.statement.confirmed.partition(": ")[2]
    if answer.answer == FINDING:
        return ""
    if not confirmed:
        return "Not tested on held-out seeds."
    same = confirmed == answer.answer
    return "Held-out seeds gave the same answer." if same else f"Held-out seeds gave: {confirmed}."


def estimate_text(judged: Judged) -> str:
    """Writes a row's statistic and its interval, "2.9 (2.8 to 3.1)"."""
    if judged.row.estimate is None:
        return "—"
    estimate, interval = format_number(judged.row.estimate), judged.interval
    if not interval.is_finite or interval.low == interval.high:
        return estimate
    return f"{estimate} ({format_number(interval.low)} to {format_number(interval.high)})"


def answer_lines(answer: Answer) -> str:
    """Writes "holds          Section 3.1: ..." and a line for each of its rows."""
    s, level = answer.statement, 1 - ERROR / max(1, len(answer.rows))
    lines = [f"{answer.answer:14s} {s.source}: {s.text}"]
    for judged in answer.rows:
        verdict = "" if answer.answer == FINDING else judged.verdict
        parts = [f"    {verdict:10s} {judged.row.setting}: {estimate_text(judged)}"]
        parts += [row_note(judged.row), draws_to_decide(judged, s.claimed, level)]
        lines.append("; ".join(filter(None, parts)))
    return "\n".join(lines)


def draws_to_decide(judged: Judged, claimed: Range | None, level: float) -> str:
    """Says how many draws would decide a row, were their mean and spread the same.

    Args:
        judged: The row.
        claimed: The range of its statement.
        level: Of its interval.

    Returns:
        "about 9 would decide"; "" of a row that is decided or that is inconclusive.
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


def row_note(row: Row) -> str:
    """Writes "8 draws; 2 of 10 draws have no number"."""
    return f"{row.draws} draw{'s' * (row.draws != 1)}" + (f"; {row.note}" if row.note else "")
