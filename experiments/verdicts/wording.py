"""Statements, rows and numbers in words, as the pages and the terminal show them."""

import math
from collections.abc import Sequence
from typing import Any

from experiments.verdicts.claims import (
    ERROR,
    FEWEST_DRAWS,
    FEWEST_OF_SHARE,
    UNDECIDED,
    VERDICTS,
    Answer,
    Judged,
    Range,
    Row,
    Statement,
    count_answers,
)
from experiments.verdicts.intervals import draws_needed
from rank_collapse.measures.profiles import rounding_limit
from rank_collapse.report.page import format_number

JOINTLY = (
    "Each line is one setting with its 95 % interval; the intervals of a statement hold jointly "
    "(Holm). Those of means are Student's and presume draws that are near normal; those of shares "
    "are Wilson's. A setting is within where all of its interval lies in the claimed range, "
    "outside where none of it does, and undecided otherwise or with too few draws. A statement "
    "holds where all settings are within, and does not hold where all are outside. It is partly "
    "supported where two or more are within; else it does not hold in all settings where some are "
    "outside, and is inconclusive where none is. What must hold and findings get no answer."
)


def show_ratio(ratio: float, dtype: Any = "float32") -> float | str:
    """Returns a residual ratio, or a bound where rounding to the dtype decides it."""
    limit = rounding_limit(dtype)
    return f"below {limit:.0e} (rounding)" if ratio <= limit else float(ratio)


def count_text(answers: Sequence[Answer]) -> str:
    """Writes "holds 24, partly supported 7" of the statements that get an answer."""
    texts = [f"{answer} {n}" for answer, n in count_answers(answers).items() if n]
    return ", ".join(texts) or "none gets an answer"


def count_line(answers: Sequence[Answer]) -> str:
    """Writes "Statements tested: 3, in settings: 9. Answers: holds 2, … by chance."."""
    tested = [a for a in answers if a.statement.claimed is not None]
    num_settings = sum(len(a.rows) for a in tested)
    return (
        f"Statements tested: {len(tested)}, in settings: {num_settings}. Answers: "
        f"{count_text(tested)}. At most {ERROR * len(tested):.2g} of the answers are expected to "
        "be wrong by chance."
    )


def verdict_counts(verdicts: Sequence[str]) -> str:
    """Writes how many rows have each of `VERDICTS`: "5/1/2"."""
    return "/".join(str(verdicts.count(verdict)) for verdict in VERDICTS)


def refuting_text(statement: Statement) -> str:
    """Writes the values that refute a statement: "≤ 2.5 or ≥ 3.5 in half"; "" without a range.

    "In half" is in half of the draws or more; otherwise the mean over draws decides.
    """
    if statement.claimed is None:
        return ""
    low, high = statement.draw_range or statement.claimed
    ends = [f"≤ {low:.3g}"] * math.isfinite(low) + [f"≥ {high:.3g}"] * math.isfinite(high)
    return " or ".join(ends) + " in half" * (statement.draw_range is not None)


def estimate_text(judged: Judged) -> str:
    """Writes a row's statistic and its interval, "2.9 (2.8 to 3.1)"."""
    if judged.row.estimate is None:
        return "—"
    estimate, interval = format_number(judged.row.estimate), judged.interval
    if not interval.is_finite or interval.low == interval.high:
        return estimate
    return f"{estimate} ({format_number(interval.low)} to {format_number(interval.high)})"


def answer_lines(answer: Answer) -> str:
    """Writes "holds 2/0/0    Section 3.1: ..." and a line for each of its rows."""
    s, level = answer.statement, 1 - ERROR / max(1, len(answer.rows))
    counts = verdict_counts([j.verdict for j in answer.rows]) if s.claimed else ""
    lines = [f"{f'{answer.answer} {counts}':14s} {s.source}: {s.text}"]
    for judged in answer.rows:
        verdict = judged.verdict if s.claimed else ""
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
