"""Statements, rows and numbers in words, as the pages and the terminal show them."""

import math
from collections.abc import Sequence

from numpy.typing import DTypeLike

from experiments.verdicts.claims import (
    ERROR,
    NOT_MEASURED,
    NOT_REJECTED,
    OUTSIDE,
    UNDECIDED,
    WITHIN,
    Answer,
    Judged,
    Statement,
    count_answers,
)
from experiments.verdicts.rows import Row
from rank_collapse.measures.rounding import rounding_limit
from rank_collapse.printed import format_count
from rank_collapse.report.intervals import describe_level
from rank_collapse.report.page import format_number

JOINTLY = (
    "Each line is one setting with its interval. The verdicts of a statement hold jointly (Holm, "
    f"{describe_level(1 - ERROR)}) and at any number of draws, so that a run may stop when its "
    "last setting is decided. An interval has the level at which Holm compared its setting, "
    f"{describe_level(1 - ERROR)} or more; it holds by itself, not jointly with the others. "
    "Verdicts presume nothing about how draws are distributed: a setting is "
    "judged by the share of draws in a range, or by the median. It is within where more than half "
    "of the draws (or the median) are shown to lie in the claimed range, outside where they are "
    "shown not to, and undecided otherwise. A statement holds where all settings are within, does "
    "not hold where all are outside, and holds in some settings where both occur; else it does "
    "not hold in all settings where some are outside, and is open where none is. A statement that "
    "a test can reject and not show is not rejected at best. What must hold and findings get no "
    "answer: they have no range, and no interval decides them. A test decides what must hold."
)


def show_ratio(ratio: float, dtype: DTypeLike = "float32") -> float | str:
    """Returns a residual ratio, or a bound where rounding to the dtype decides it."""
    limit = rounding_limit(dtype)
    return f"below {limit:.0e} (rounding)" if ratio <= limit else float(ratio)


def count_text(answers: Sequence[Answer]) -> str:
    """Writes "holds 24, in some settings 7" for the statements that get an answer."""
    texts = [f"{answer} {n}" for answer, n in count_answers(answers).items() if n]
    return ", ".join(texts) or "none gets an answer"


def count_line(answers: Sequence[Answer]) -> str:
    """Writes "Statements tested: 3, in settings: 9. Answers: holds 2, … by chance.", or that none
    is tested."""
    tested = [a for a in answers if a.statement.claimed is not None]
    if not tested:
        return "No statement with an answer was tested; findings have none."
    num_settings = sum(len(a.rows) for a in tested)
    return (
        f"Statements tested: {len(tested)}, in settings: {num_settings}. Answers: "
        f"{count_text(tested)}. At most {ERROR * len(tested):.2g} of the answers are expected to "
        "be wrong by chance."
    )


def verdict_counts(verdicts: Sequence[str]) -> str:
    """Writes how many rows are within (or not rejected), outside and undecided: "5/1/2".

    Rows that were not measured follow: "5/1/0, 2 not measured".
    """
    groups = (WITHIN, NOT_REJECTED), (OUTSIDE,), (UNDECIDED,)
    text = "/".join(str(sum(verdict in group for verdict in verdicts)) for group in groups)
    missing = verdicts.count(NOT_MEASURED)
    return text + (f", {missing} {NOT_MEASURED}" if missing else "")


def refuting_text(statement: Statement) -> str:
    """Writes the values that refute a statement: "≤ 2.5 or ≥ 3.5 in half"; "" without a range.

    "In half" means in at least half of the draws; without it the median over draws, or the test,
    decides.
    """
    if statement.claimed is None:
        return ""
    low, high = statement.draw_range or statement.claimed
    ends = [f"≤ {low:.3g}"] * math.isfinite(low) + [f"≥ {high:.3g}"] * math.isfinite(high)
    return " or ".join(ends) + " in half" * (statement.draw_range is not None)


def criterion_text(statement: Statement) -> str:
    """Writes what decides a statement that must hold, "its test requires: N/2 ± 0.2 %"; "" if its
    text says it."""
    return f"its test requires: {statement.criterion}" if statement.criterion else ""


def describe_measured(statement: Statement) -> str:
    """Writes what a statement's rows measure, "share of draws with a value above 0.1: residual
    ratio".

    "Share of draws in which this number is above 0.1: residual ratio", for example. Without a
    range the statistic itself says it, followed by what the test of the statement requires.
    """
    if statement.claimed is None or statement.tests_claim:
        return "; ".join(filter(None, [statement.statistic, criterion_text(statement)]))
    if statement.draw_range is None:
        return f"median over draws: {statement.statistic}"
    low, high = statement.draw_range
    if math.isfinite(low) and math.isfinite(high):
        ends = f"between {low:.3g} and {high:.3g}"
    else:
        ends = f"above {low:.3g}" if math.isfinite(low) else f"below {high:.3g}"
    return f"share of draws with a value {ends}: {statement.statistic}"


def estimate_text(judged: Judged) -> str:
    """Writes a row's statistic and its interval, "2.9 (2.8 to 3.1)"."""
    if judged.row.estimate is None:
        return "—"
    estimate, interval = format_number(judged.row.estimate), judged.interval
    is_count = judged.row.evidence is None and interval.low == interval.high
    if not interval.is_finite or is_count:
        return estimate
    return f"{estimate} ({format_number(interval.low)} to {format_number(interval.high)})"


def answer_lines(answer: Answer) -> str:
    """Writes "holds 2/0/0    Section 3.1: ..." and a line for each of its rows."""
    s = answer.statement
    counts = verdict_counts([j.verdict for j in answer.rows]) if s.claimed else ""
    lines = [f"{f'{answer.in_words} {counts}':14s} {s.source}: {s.text}"]
    if s.criterion:
        lines.append(f"    {'':10s} {criterion_text(s)}")
    for judged in answer.rows:
        verdict = judged.verdict if s.claimed else ""
        setting = setting_text(judged.row, s)
        parts = [f"    {verdict:10s} {setting}: {estimate_text(judged)}"]
        parts += [row_note(judged.row), seeds_text(judged, len(answer.rows))]
        lines.append("; ".join(filter(None, parts)))
    return "\n".join(lines)


def setting_text(row: Row, statement: Statement) -> str:
    """Writes the setting of a row; marks a setting for which the statement was not registered.

    The text of a statement may name sizes, such as "networks of 12 layers", and a run with other
    sizes has rows of the same statement.
    """
    is_other = statement.settings and row.setting not in statement.settings
    return row.setting + " (not a setting of the statement)" * bool(is_other)


def seeds_to_decide(judged: Judged, num_rows: int) -> int | None:
    """Computes about how many more draws decide a row, if they continue as before.

    Args:
        judged: The row.
        num_rows: Number of rows that are judged together, including this one.

    Returns:
        0 for a decided row; None for a row that more draws will hardly decide, or without evidence.
    """
    if judged.verdict != UNDECIDED:
        return 0
    evidence = judged.row.evidence
    needed = None if evidence is None else evidence.draws_needed(ERROR / 2 / max(1, num_rows))
    return None if needed is None else max(1, needed - judged.row.num_made)


def seeds_text(judged: Judged, num_rows: int) -> str:
    """Writes how many draws would decide a row, "about 9 more would decide"; "" if none are needed.

    Args:
        judged: The row.
        num_rows: See `seeds_to_decide`.
    """
    num_more = seeds_to_decide(judged, num_rows)
    return f"about {num_more:,} more would decide" if num_more else ""


def row_note(row: Row) -> str:
    """Writes "8 draws; 2 of 10 draws have no number"; "" for a row that was not measured."""
    if not row.num_made:
        return ""
    return format_count(row.draws, "draw") + (f"; {row.note}" if row.note else "")
