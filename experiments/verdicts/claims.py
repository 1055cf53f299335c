"""Statements of papers, the rows that test each of them, and the answers that follow.

A statement has one statistic and the open range that it claims for it. Each setting (norm,
architecture, width, task) gives a row: that statistic over independent draws, which are seeds or
networks, never heads, layers or texts of one network. The rows of a statement are judged together,
by intervals that hold jointly.

A statistic that has no bounds, such as a logarithm or a paired difference of logarithms, is judged
by its mean over draws (`mean_row`). Of one that is bounded or takes few values, such as a ratio, an
accuracy, a cosine or a length, the mean of a few draws says little: it is judged by the share of
draws in a range (`share_within_row`), which is to be above one half.

A statement that could hardly fail names the test that checks it; what is only measured is a
finding. Neither has a range: their rows are shown with their intervals and get no answer.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from experiments.verdicts.intervals import wilson_interval
from rank_collapse.report.intervals import Interval, all_equal, mean_interval

HOLDS, IN_PART, SOME_FAIL, FAILS, OPEN = ANSWERS = (
    "holds",
    "partly supported",
    "not in all settings",
    "does not hold",
    "inconclusive",
)
MUST_HOLD, FINDING = "must hold", "finding"  # in the place of an answer
WITHIN, OUTSIDE, UNDECIDED = VERDICTS = ("within", "outside", "undecided")
FEWEST_DRAWS = 3
# Of a share: with four draws Wilson's interval excludes one half wrongly in 1 of 16 runs.
FEWEST_OF_SHARE = 5
ERROR = 0.05  # the largest share of runs in which chance gives a statement a wrong verdict
Range = tuple[float, float]


@dataclass(frozen=True)
class Statement:
    """A paper's statement with what decides it; or what gets no answer, without a range."""

    source: str  # The paper and the theorem, section or figure
    text: str  # What it says, in our words, with its number
    statistic: str  # What is computed of each draw, with its unit
    claimed: Range | None = None  # The open range in which it holds; None without an answer
    # The open range of a draw, where rows are shares of draws; `claimed` is that of the share
    draw_range: Range | None = None
    experiments: Sequence[str] = ()  # Whose rows test it
    test: str = ""  # Of what must hold: the test that checks it, "tests/file.py::test_name"


@dataclass(frozen=True)
class Row:
    """A statement's statistic in one setting."""

    key: str  # Of the statement
    setting: str  # The network, task or size
    draws: int  # How many independent draws the interval rests on
    estimate: float | None  # Of the statistic; None where no draw has one
    # level → the interval that holds it in that share of runs
    interval: Callable[[float], Interval] = field(compare=False)
    note: str = ""  # What the numbers do not say by themselves


@dataclass(frozen=True)
class Judged:
    """A row with its joint interval and one of `VERDICTS`."""

    row: Row
    interval: Interval
    verdict: str


@dataclass(frozen=True)
class Answer:
    """The answer to a statement, one of `ANSWERS`, `MUST_HOLD` or `FINDING`, with its rows."""

    key: str
    statement: Statement
    answer: str
    rows: tuple[Judged, ...]


def mean_row(
    key: str, setting: str, values: Iterable[Any], *, scale: Callable = float, note: str = ""
) -> Row:
    """Makes the row of a mean over draws of a statistic, with Student's interval.

    The statistic may be a paired difference. Draws that are all equal give no interval: they do not
    tell how much the statistic varies.

    Args:
        key: Of the statement.
        setting: The network, task or size.
        values: The statistic of each draw; None or NaN where a draw has none, which is counted.
        scale: An increasing function in which the mean and its interval are shown.
        note: What the numbers do not say by themselves.
    """
    values = list(values)
    finite = [float(v) for v in values if v is not None and math.isfinite(v)]
    notes = [note, _missing_note(len(values) - len(finite), len(values))]
    if len(finite) >= FEWEST_DRAWS and all_equal(finite):
        notes.append("all draws are equal")

    @cache
    def interval(level):
        ends = mean_interval(finite, level)
        return Interval(*map(scale, ends)) if ends.is_finite else ends

    estimate = scale(math.fsum(finite) / len(finite)) if finite else None
    return Row(key, setting, len(finite), estimate, interval, _join_notes(notes))


def share_row(
    key: str, setting: str, count: int, total: int, *, unknown: int = 0, note: str = ""
) -> Row:
    """Makes the row of the share of draws that do something, with Wilson's interval.

    Args:
        key, setting, note: As of `mean_row`.
        count, total: Draws that do it, and all of which it is known.
        unknown: Draws of which it is not known. The interval reaches from none to all of them.
    """

    @cache
    def interval(level):
        if total < FEWEST_OF_SHARE:
            return Interval()
        lowest = wilson_interval(count, total + unknown, level)
        highest = wilson_interval(count + unknown, total + unknown, level)
        return Interval(lowest.low, highest.high)

    notes = f"{count} of {total}" * (total > 0), note, _missing_note(unknown, total + unknown)
    estimate = count / total if total else None
    return Row(key, setting, total, estimate, interval, _join_notes(notes))


def share_within_row(
    key: str, setting: str, values: Iterable[Any], draw_range: Range, *, note: str = ""
) -> Row:
    """Makes the row of the share of draws whose statistic lies in an open range.

    It presumes nothing about how the statistic is distributed. The note has the smallest and the
    largest value.

    Args:
        key, setting, note: As of `mean_row`.
        values: The statistic of each draw; None, NaN or infinite where a draw has none, which
            counts for neither side.
        draw_range: The range of a draw.
    """
    values = [math.nan if v is None else float(v) for v in values]
    finite = sorted(v for v in values if math.isfinite(v))
    count = sum(draw_range[0] < v < draw_range[1] for v in finite)
    spread = f"values {finite[0]:.3g} to {finite[-1]:.3g}" if finite else ""
    unknown, note = len(values) - len(finite), _join_notes([spread, note])
    return share_row(key, setting, count, len(finite), unknown=unknown, note=note)


def cases_row(key: str, setting: str, count: int, total: int, draws: int, *, note: str = "") -> Row:
    """Makes the row of what must hold without exceptions: the number of cases against it, certain.

    Args:
        key, setting, note: As of `mean_row`.
        count, total: Cases against it, and all.
        draws: Independent draws that the cases come from.
    """
    return Row(
        key,
        setting,
        draws if total else 0,
        float(count) if total else None,
        lambda level: Interval(float(count), float(count)),
        _join_notes([f"of {total} cases" if total else "its condition held in no case", note]),
    )


def curve_row(key: str, setting: str, curve: Any, draws: Any, resolution: float = 0.0) -> Row:
    """Makes the row of a curve that may be one more draw of an ensemble of curves.

    The test is exact, and for all points of the curve together:

    1. The curve was read off a figure, to `resolution`. Of the values that it may have had, those
       nearest to the mean of the n draws are taken.
    2. The distance d of a curve is that from the mean of all n + 1, at its farthest point, in
       standard deviations there.
    3. Were the curve one more draw, the rank of its d (1 is the farthest) would be each of
       1 .. n + 1 with equal probability, whatever the law of the draws.
    4. A rank alone decides nothing: the curve must be far out in the tail too. Let u be the
       (k + 1)-th farthest distance of the draws, k = n/10, and S the sum of ln(d_i/u) of the k
       farther ones. If the tail is a power law, which is heavier than those of most laws, one more
       draw is as far as the curve with the probability on the right:

        p = max(rank/(n + 1), (k + 1)/(n + 1) · (1 + ln(d/u)/S)^−k).

    The statistic is p less the largest p that is rejected at a level: above 0 the curve is
    compatible with the draws. Fewer than 1/(1 − level) − 1 draws can reject nothing, and give no
    number.

    Args:
        key, setting: As of `mean_row`.
        curve: The curve [l].
        draws: The ensemble [s, l].
        resolution: How far from the truth the curve's values may have been read off.

    Source: the studentised envelope test of Myllymäki et al. 2017, "Global envelope tests for
    spatial processes"; the tail as in Knijnenburg et al. 2009, "Fewer permutations, more accurate
    P-values", with that of Hill 1975, "A simple general approach to inference about the tail".
    """
    draws, curve = np.asarray(draws, float), np.asarray(curve, float)
    n, k = len(draws), max(1, len(draws) // 10)
    p = 1.0
    if n > k:
        nearest = np.clip(draws.mean(axis=0), curve - resolution, curve + resolution)
        curves = np.concatenate([nearest[None], draws])
        spread = curves.std(axis=0, ddof=1)
        deviations = np.abs(curves - curves.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        distance, *draw_distances = deviations.max(axis=1)
        threshold, *tail = np.sort(draw_distances)[-k - 1 :]
        tail_probability = 1.0
        if distance > threshold:
            total = np.log(np.array(tail) / threshold).sum()
            tail_probability = (total / (total + math.log(distance / threshold))) ** k
        rank = 1 + sum(draw_distances >= distance)
        p = float(max(rank, (k + 1) * tail_probability) / (n + 1))

    def interval(level):
        rejected = math.floor((n + 1) * (1 - level) + 1e-9) / (n + 1)
        return Interval(p - rejected, p - rejected) if rejected else Interval()

    ends = interval(1 - ERROR)
    estimate = ends.low if ends.is_finite else None
    return Row(key, setting, n, estimate, interval, f"p = {p:.2g} with {n} draws")


def judge_rows(rows: Sequence[Row], claimed: Range | None) -> tuple[Judged, ...]:
    """Judges the rows of one statement jointly: within the range, outside, or undecided.

    Holm's procedure, once for "within" and once for "outside". While k rows are undecided, each of
    them has an interval at the level 1 − 5 %/k; the rows whose interval lies on that side are
    decided, and the next round begins. It ends when a round decides no row. The error of all rows
    together is at most 5 %, whatever the dependence between rows. A decided row has the interval of
    its round, an undecided one that of the level 1 − 5 %/(number of rows).

    Args:
        rows: Of one statement.
        claimed: Its range; None without an answer.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    decided = {}
    for verdict in (WITHIN, OUTSIDE):
        undecided = list(range(len(rows)))
        while undecided:
            level = 1 - ERROR / len(undecided)
            intervals = {i: _row_interval(rows[i], level) for i in undecided}
            new = [i for i in undecided if compare_ranges(intervals[i], claimed) == verdict]
            if not new:
                break
            decided |= {i: Judged(rows[i], intervals[i], verdict) for i in new}
            undecided = [i for i in undecided if i not in new]
    level = 1 - ERROR / max(1, len(rows))
    return tuple(
        decided.get(i) or Judged(row, _row_interval(row, level), UNDECIDED)
        for i, row in enumerate(rows)
    )


def _row_interval(row, level):
    return row.interval(level) if row.draws >= FEWEST_DRAWS else Interval()


def compare_ranges(interval, claimed):
    """Returns the verdict on one interval."""
    if claimed is None:
        return UNDECIDED
    (low, high), (lower_end, upper_end) = interval, claimed
    if lower_end < low and high < upper_end:
        return WITHIN
    return OUTSIDE if high <= lower_end or low >= upper_end else UNDECIDED


def answer_statement(key: str, statement: Statement, rows: Sequence[Row]) -> Answer:
    """Answers a statement from all its rows.

    Args:
        key: Of the statement.
        statement: The statement.
        rows: All its rows.
    """
    judged = judge_rows(rows, statement.claimed)
    return Answer(key, statement, decide_answer(statement, [j.verdict for j in judged]), judged)


def decide_answer(statement: Statement, verdicts: Sequence[str]) -> str:
    """Returns the answer that follows from the verdicts of a statement's rows.

    It holds if every row is within its range, and does not hold if every row is outside. It is
    partly supported if two rows or more are within. Else it does not hold in all settings if some
    are outside, and is inconclusive if none is.

    Args:
        statement: The statement.
        verdicts: Of its rows.

    Returns:
        One of `ANSWERS`; without a range `MUST_HOLD` or `FINDING`.
    """
    if statement.claimed is None:
        return MUST_HOLD if statement.test else FINDING
    for verdict, answer in ((WITHIN, HOLDS), (OUTSIDE, FAILS)):
        if {*verdicts} == {verdict}:
            return answer
    if verdicts.count(WITHIN) > 1:
        return IN_PART
    return SOME_FAIL if OUTSIDE in verdicts else OPEN


def answer_statements(statements: Mapping[str, Statement], rows: Iterable[Row]) -> list[Answer]:
    """Answers the statements that have rows, in the order of the statements.

    Args:
        statements: By key.
        rows: Of any of them.

    Raises:
        ValueError: A row of no statement.
    """
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    if unknown := sorted(by_key.keys() - statements.keys()):
        raise ValueError(f"{unknown[0]!r} is not one of the statements")
    return [answer_statement(k, s, by_key[k]) for k, s in statements.items() if k in by_key]


def count_answers(answers: Sequence[Answer]) -> dict[str, int]:
    """Counts {answer: statements that have it}, all five of them."""
    return {answer: sum(a.answer == answer for a in answers) for answer in ANSWERS}


def _missing_note(unknown, total):
    return f"{unknown} of {total} draws have no number" if unknown else ""


def _join_notes(notes):
    return "; ".join(note for note in notes if note)
