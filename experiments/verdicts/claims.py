"""Statements of papers, the rows that test each of them, and the answers that follow.

A statement has one statistic and the open range that it claims for it; one that was revised after
a run says so until a run on new seeds confirms it.
Each setting (norm, architecture, width, task) gives a row: that statistic over independent draws,
which are seeds or networks, never heads, layers or texts of one network. The rows of a statement
are judged together, by intervals that hold jointly.

A statistic that has no bounds, such as a logarithm or a paired difference of logarithms, is judged
by its mean over draws (`of_mean`). Of one that is bounded or takes few values, such as a ratio, an
accuracy, a cosine or a length, the mean of a few draws says little: it is judged by the share of
draws in a range (`of_share_within`), which is to be above one half.

What no paper says is a finding: a statement without a range, whose rows are shown with their
intervals and get no answer.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from rank_collapse.report.intervals import Interval, all_equal, mean_interval, wilson_interval

HOLDS, IN_PART, SOME_FAIL, FAILS, OPEN = ANSWERS = (
    "holds",
    "holds in part",
    "not in all settings",
    "does not hold",
    "cannot be said",
)
FINDING = "finding"
WITHIN, OUTSIDE, UNDECIDED = VERDICTS = ("within", "outside", "undecided")
FEWEST_DRAWS = 3
# Of a share: with four draws Wilson's interval excludes one half wrongly in 1 of 16 runs.
FEWEST_OF_SHARE = 5
ERROR = 0.05  # the largest share of runs in which chance gives a statement a wrong verdict
Range = tuple[float, float]
ABOVE_ZERO, BELOW_ZERO = (0.0, math.inf), (-math.inf, 0.0)
# Of a count; next to 1, so that it is not the range "below 1".
NO_CASE = (-math.inf, math.nextafter(1.0, 0.0))
MORE_THAN_HALF = (0.5, math.inf)  # Of a share of draws


@dataclass(frozen=True)
class Statement:
    """A paper's statement and its test; or a finding, which no paper states."""

    source: str  # The paper and the theorem, section or figure
    text: str  # What it says, in our words, with its number
    statistic: str  # What is computed of each draw, with its unit
    claimed: Range | None = None  # The open range in which it holds; None of a finding
    # Where the rows are shares of draws: the open range of a draw; `claimed` is that of the share
    each: Range | None = None
    always: bool = False  # Without exceptions: one setting against it, and it does not hold
    experiments: Sequence[str] = ()  # Whose rows test it
    changed: str = ""  # When its statistic or range last changed: date and commit
    # The run on seeds that were never used before, made after that change, and its answer:
    confirmed: str = ""  # "2026-11-24, seed 1: holds"


@dataclass(frozen=True)
class Row:
    """A statement's statistic in one setting."""

    key: str  # Of the statement
    setting: str  # The network, task or size
    draws: int  # How many independent draws the interval rests on
    estimate: float | None  # Of the statistic; None where no draw has one
    # level → the interval that holds it in that share of runs
    interval: Callable[[float], Interval] = field(compare=False)
    why: str = ""  # What the numbers do not say by themselves


@dataclass(frozen=True)
class Judged:
    """A row with its joint interval and one of `VERDICTS`."""

    row: Row
    interval: Interval
    verdict: str


@dataclass(frozen=True)
class Answer:
    """The answer to a statement, one of `ANSWERS` or `FINDING`, with its rows."""

    key: str
    statement: Statement
    answer: str
    rows: tuple[Judged, ...]

    @property
    def where(self) -> str:
        """The settings by verdict, where they differ: "within: a, b; outside: c"."""
        found = {v: [j.row.setting for j in self.rows if j.verdict == v] for v in VERDICTS}
        return "; ".join(f"{v}: {', '.join(names)}" for v, names in found.items() if names)


def of_mean(
    key: str, setting: str, values: Iterable[Any], *, scale: Callable = float, why: str = ""
) -> Row:
    """The row of a mean over draws of a statistic, or of a paired difference: Student's interval.

    Draws that are all equal give no interval: they do not tell how much the statistic varies.

    Args:
        values: The statistic of each draw; None or NaN where a draw has none, which is counted.
        scale: An increasing function in which the mean and its interval are shown.
    """
    values = list(values)
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    lost = len(values) - len(known)
    reasons = [why, _lost(lost, len(values))]
    if len(known) >= FEWEST_DRAWS and all_equal(known):
        reasons.append("all draws are equal")

    @cache
    def interval(level):
        found = mean_interval(known, level)
        return Interval(*map(scale, found)) if found.is_finite else found

    estimate = scale(math.fsum(known) / len(known)) if known else None
    return Row(key, setting, len(known), estimate, interval, _joined(reasons))


def of_share(
    key: str, setting: str, count: int, total: int, *, unknown: int = 0, why: str = ""
) -> Row:
    """The row of the share of draws that do something: Wilson's interval.

    Args:
        count, total: Draws that do it, and all of which it is known.
        unknown: Draws of which it is not known. The interval reaches from none to all of them.
    """

    @cache
    def interval(level):
        if total < FEWEST_OF_SHARE:
            return Interval()
        least, most = (wilson_interval(k, total + unknown, level) for k in (count, count + unknown))
        return Interval(least.low, most.high)

    return Row(
        key,
        setting,
        total,
        count / total if total else None,
        interval,
        _joined([f"{count} of {total}" * (total > 0), why, _lost(unknown, total + unknown)]),
    )


def of_share_within(
    key: str, setting: str, values: Iterable[Any], each: Range, *, why: str = ""
) -> Row:
    """The row of the share of draws whose statistic lies in an open range, with their values.

    It presumes nothing about how the statistic is distributed.

    Args:
        values: The statistic of each draw; None, NaN or infinite where a draw has none, which
            counts for neither side.
        each: The range of a draw.
    """
    values = [math.nan if v is None else float(v) for v in values]
    known = sorted(v for v in values if math.isfinite(v))
    count = sum(each[0] < v < each[1] for v in known)
    spread = f"values {known[0]:.3g} to {known[-1]:.3g}" if known else ""
    return of_share(
        key,
        setting,
        count,
        len(known),
        unknown=len(values) - len(known),
        why=_joined([spread, why]),
    )


def of_cases(key: str, setting: str, count: int, total: int, draws: int, *, why: str = "") -> Row:
    """The row of a statement without exceptions: how many cases are against it, itself certain.

    Args:
        count, total: Cases against it, and all.
        draws: Independent draws that the cases come from.
    """
    what = f"of {total} cases" if total else "its condition held in no case"
    return Row(
        key,
        setting,
        draws if total else 0,
        float(count) if total else None,
        lambda level: Interval(float(count), float(count)),
        _joined([what, why]),
    )


def of_curve(key: str, setting: str, curve: Any, draws: Any, resolution: float = 0.0) -> Row:
    """The row of a curve that may be one more draw of an ensemble of curves, at all its points.

    Of the values that the curve may have had before it was read off, to `resolution`, those nearest
    to the mean of the draws are taken. How far a curve is from the mean of all, itself among them,
    is d, measured at its farthest point in standard deviations there. If it is one more draw, its
    place among the n draws' d is any of 1 .. n + 1 alike, whatever their law: an exact test for all
    points together. So that a place alone decides nothing, it must also be far out in the tail of
    the draws: of the k = n/10 farthest, ln d exceeds that of the next, ln u, by S in total, and if
    their tail is a power law, heavier than those of most laws, one more is as far with the chance
    on the right:

        p = max(place/(n + 1), (k + 1)/(n + 1) · (1 + ln(d/u)/S)^−k).

    The statistic is p less the largest p that is refused at a level, above 0 of a curve that is
    compatible with the draws. It is known where n + 1 ≥ 1/(1 − level): fewer draws can refuse
    nothing at that level.

    Args:
        curve, draws: The curve [l], and the ensemble [s, l].
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
        every = np.concatenate([nearest[None], draws])
        spread = every.std(axis=0, ddof=1)
        away = np.abs(every - every.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        own, *others = away.max(axis=1)
        next_to, *tail = np.sort(others)[-k - 1 :]
        farther = 1.0
        if own > next_to:
            total = np.log(np.array(tail) / next_to).sum()
            farther = (total / (total + math.log(own / next_to))) ** k
        p = float(max(1 + sum(others >= own), (k + 1) * farther) / (n + 1))

    def interval(level):
        refused = math.floor((n + 1) * (1 - level) + 1e-9) / (n + 1)
        return Interval(p - refused, p - refused) if refused else Interval()

    found = interval(1 - ERROR)
    estimate = found.low if found.is_finite else None
    return Row(key, setting, n, estimate, interval, f"p = {p:.2g} with {n} draws")


def judged(rows: Sequence[Row], claimed: Range | None, beside: int = 0) -> tuple[Judged, ...]:
    """The rows of one statement with joint intervals: within the range, outside, or undecided.

    Holm's procedure, once for "within" and once for "outside": of k rows that have not been decided
    so, those are whose interval at 1 − 5 %/k lies on that side, until none is. It holds whatever
    the dependence between rows; the level at which a row was decided is that of its interval, those
    of rows that are not decided have 1 − 5 %/(number of rows).

    Args:
        claimed: Its range; None of a finding.
        beside: Further rows of the statement, of other runs, which are not judged here.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    found = {}
    for verdict in (WITHIN, OUTSIDE):
        left = list(range(len(rows)))
        while left:
            level = 1 - ERROR / (len(left) + beside)
            ends = {i: _interval(rows[i], level) for i in left}
            new = [i for i in left if _side(ends[i], claimed) == verdict]
            if not new:
                break
            found |= {i: Judged(rows[i], ends[i], verdict) for i in new}
            left = [i for i in left if i not in new]
    level = 1 - ERROR / max(1, len(rows) + beside)
    return tuple(
        found.get(i) or Judged(row, _interval(row, level), UNDECIDED) for i, row in enumerate(rows)
    )


def _interval(row, level):
    return row.interval(level) if row.draws >= FEWEST_DRAWS else Interval()


def _side(interval, claimed):
    if claimed is None:
        return UNDECIDED
    (low, high), (least, most) = interval, claimed
    if least < low and high < most:
        return WITHIN
    return OUTSIDE if high <= least or low >= most else UNDECIDED


def answer_of(key: str, statement: Statement, rows: Sequence[Row]) -> Answer:
    """The answer that follows from all rows of a statement."""
    found = judged(rows, statement.claimed)
    return Answer(key, statement, answer_from(statement, {j.verdict for j in found}), found)


def answer_from(statement: Statement, verdicts: Collection[str]) -> str:
    """The answer that follows from the verdicts of a statement's rows.

    It holds if every row is within its range, in part if some are. It does not hold if every row is
    outside, or of a statement without exceptions if any is. It does not hold in all settings where
    some rows are outside and the others undecided. Else it cannot be said.
    """
    found = set(verdicts)
    if statement.claimed is None:
        return FINDING
    if found == {OUTSIDE} or (statement.always and OUTSIDE in found):
        return FAILS
    if WITHIN in found:
        return HOLDS if found == {WITHIN} else IN_PART
    return SOME_FAIL if OUTSIDE in found else OPEN


def answers_of(statements: Mapping[str, Statement], rows: Iterable[Row]) -> list[Answer]:
    """The answers to those statements that have rows, in the order of the statements.

    Raises:
        ValueError: A row of no statement.
    """
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    if unknown := sorted(by_key.keys() - statements.keys()):
        raise ValueError(f"{unknown[0]!r} is not one of the statements")
    return [answer_of(k, s, by_key[k]) for k, s in statements.items() if k in by_key]


def counted(answers: Sequence[Answer]) -> dict[str, int]:
    """{answer: how many statements have it}, all five of them."""
    return {answer: sum(a.answer == answer for a in answers) for answer in ANSWERS}


def by_chance(answers: Sequence[Answer]) -> float:
    """On how many statements chance alone is expected to give a row a wrong verdict, at most.

    5 % of all that are tested: also one that got no verdict could have got a wrong one.
    """
    return ERROR * sum(a.statement.claimed is not None for a in answers)


def _lost(unknown, total):
    return f"{unknown} of {total} draws have no number" if unknown else ""


def _joined(reasons):
    return "; ".join(reason for reason in reasons if reason)
