"""Rows of statements: a statistic over the draws of one setting, with its evidence and interval.

Draws are seeds, networks or texts, never heads or layers of one network. They are in the order in
which they were made, and the evidence holds at any number of them
(`experiments.verdicts.sequential`).

Verdicts presume nothing about the distribution of draws, because the means of few or skewed draws
mislead. Either the share of draws in a range is claimed to be above one half (`share_within_row`),
or the median is claimed to lie in a range (`median_row`): then more than half of the draws are
above its lower end and more than half below its upper end. A number without a verdict is a mean
with Student's interval (`mean_row`), which presumes draws that are nearly normal.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from experiments.verdicts.sequential import (
    draws_to_decide,
    log_p_values,
    median_interval_at_any_stop,
    share_interval_at_any_stop,
)
from rank_collapse.report.intervals import Interval, all_equal, mean_interval

Range = tuple[float, float]
Draws = Iterable[float | np.number | np.bool_ | None]  # None where a draw has no value


class Evidence(NamedTuple):
    """Evidence of the draws about a row, Bool [n] each.

    Attributes:
        within: The row is within its range if each condition is true in more than half of all
            draws.
        outside: It is outside if one of these is.
    """

    within: tuple[np.ndarray, ...]
    outside: tuple[np.ndarray, ...]

    def log_p(self) -> tuple[float, float]:
        """Computes ln p of "not within" and of "not outside" after all draws.

        "Within" needs all its conditions, so its p is the largest of theirs. "Outside" needs one,
        so its p is the least of theirs times their number (Bonferroni).
        """
        within = [_last(log_p_values(draws)) for draws in self.within]
        outside = [_last(log_p_values(draws)) for draws in self.outside]
        return max(within), min(0.0, min(outside) + math.log(len(outside)))

    def draws_needed(self, error: float) -> int | None:
        """Computes about how many draws decide the row, if they continue as before; None for many.

        Args:
            error: Error level at which one side is decided.
        """
        if not len(self.within[0]):
            return None
        within = [draws_to_decide(draws.mean(), error) for draws in self.within]
        error_of_one = error / len(self.outside)
        outside = [draws_to_decide(draws.mean(), error_of_one) for draws in self.outside]
        numbers = [number for number in outside if number is not None]
        if None not in within:  # "within" needs all its conditions
            numbers.append(max(within))
        return min(numbers, default=None)


@dataclass(frozen=True)
class Row:
    """A statement's statistic in one setting."""

    key: str  # Of the statement
    setting: str  # The network, task or size
    draws: int  # Independent draws that have a number
    estimate: float | None  # Of the statistic; None where no draw has one
    # level → the interval that holds it in that share of runs
    interval: Callable[[float], Interval] = field(compare=False)
    note: str = ""  # What the numbers do not say by themselves
    evidence: Evidence | None = field(default=None, compare=False)  # None: the row has no verdict
    p: float | None = None  # Of a row that tests what is claimed, as `curve_row` does
    num_made: int = 0  # Draws in all, with those that have no number


def mean_row(
    key: str,
    setting: str,
    values: Draws,
    *,
    scale: Callable = float,
    note: str = "",
) -> Row:
    """Makes the row of a mean over draws, with Student's interval and without a verdict.

    The statistic may be a paired difference. Draws that are all equal give no interval, because
    they do not show how much the statistic varies.

    Args:
        key: Key of the statement.
        setting: The network, task or size.
        values: The statistic of each draw; None or NaN for a draw without one; these draws are
            counted.
        scale: An increasing function; the mean and its interval are shown on its scale.
        note: Further remark on the numbers.
    """
    numbers = as_numbers(values)
    finite = numbers[np.isfinite(numbers)].tolist()
    notes = [note, _missing_note(len(numbers) - len(finite), len(numbers))]
    if len(finite) > 1 and all_equal(finite):
        notes.append("all draws are equal")

    @cache
    def interval(level):
        ends = mean_interval(finite, level)
        return Interval(*map(scale, ends)) if ends.is_finite else ends

    estimate = scale(math.fsum(finite) / len(finite)) if finite else None
    return Row(
        key, setting, len(finite), estimate, interval, _join_notes(notes), num_made=len(numbers)
    )


def median_row(
    key: str,
    setting: str,
    values: Draws,
    claimed: Range,
    *,
    scale: Callable = float,
    note: str = "",
) -> Row:
    """Makes the row of a median over draws, judged by signs.

    Args:
        key, setting, note: See `mean_row`.
        values: The statistic of each draw; None or NaN for a draw without one, which may lie on
            either side.
        claimed: The open range that is claimed for the median, in units of `scale`. If both ends
            are finite, the claim is that a statistic equals something, and a median on either side
            refutes it.
        scale: An increasing function of the values.
    """
    numbers = np.array([v if math.isnan(v) else scale(v) for v in as_numbers(values)])
    present, (low, high) = numbers[~np.isnan(numbers)], claimed
    evidence = Evidence(
        tuple(a for end, a in ((low, numbers > low), (high, numbers < high)) if math.isfinite(end)),
        tuple(
            a for end, a in ((low, numbers <= low), (high, numbers >= high)) if math.isfinite(end)
        ),
    )
    unknown = len(numbers) - len(present)
    note = _join_notes([_spread_note(present), note, _missing_note(unknown, len(numbers))])

    @cache
    def interval(level):
        ends = (median_interval_at_any_stop(numbers[: n + 1], level) for n in range(len(numbers)))
        return _intersect(ends)

    return Row(
        key,
        setting,
        len(present),
        float(np.median(present)) if len(present) else None,
        interval,
        note,
        evidence,
        num_made=len(numbers),
    )


def share_within_row(
    key: str, setting: str, values: Draws, draw_range: Range, *, note: str = ""
) -> Row:
    """Makes the row of the share of draws whose statistic lies in an open range.

    The note has the count, the smallest and the largest value.

    Args:
        key, setting, note: See `mean_row`.
        values: The statistic of each draw; None, NaN or infinite for a draw without one, which
            counts for neither side.
        draw_range: The range of a draw.
    """
    numbers = as_numbers(values)
    is_known = np.isfinite(numbers)
    is_inside = is_known & (draw_range[0] < numbers) & (numbers < draw_range[1])
    count, total, unknown = int(is_inside.sum()), int(is_known.sum()), int((~is_known).sum())

    @cache
    def interval(level):
        """Computes the interval of the share at a level: the intersection of the intervals after
        each draw, because they hold together for all numbers of draws."""
        # The counts after each draw; the interval holds after all of them.
        num_inside, num_known = np.cumsum(is_inside).tolist(), np.cumsum(is_known).tolist()
        num_unknown = np.cumsum(~is_known).tolist()
        return _intersect(
            share_interval_at_any_stop(inside, finite, level, unknown=unknown)
            for inside, finite, unknown in zip(num_inside, num_known, num_unknown, strict=True)
        )

    notes = f"{count} of {total}" * (total > 0), _spread_note(numbers[is_known]), note
    return Row(
        key,
        setting,
        total,
        count / total if total else None,
        interval,
        _join_notes([*notes, _missing_note(unknown, len(numbers))]),
        Evidence((is_inside,), (is_known & ~is_inside,)),
        num_made=len(numbers),
    )


def cases_row(key: str, setting: str, count: int, total: int, draws: int, *, note: str = "") -> Row:
    """Makes the row of a claim without exceptions: the number of cases against it, which has no
    uncertainty.

    Args:
        key, setting, note: See `mean_row`.
        count, total: Number of cases against it, and of all cases.
        draws: Number of independent draws from which the cases come.
    """
    return Row(
        key,
        setting,
        draws if total else 0,
        float(count) if total else None,
        lambda level: Interval(float(count), float(count)),
        _join_notes([f"of {total} cases" if total else "its condition held in no case", note]),
        num_made=draws,
    )


def missing_row(key: str, setting: str) -> Row:
    """Makes the row of a registered setting that a run did not measure."""
    return Row(key, setting, 0, None, lambda level: Interval())


def as_numbers(values: Draws) -> np.ndarray:
    """Converts values to floats, −0 to 0 and None to NaN."""
    return np.array([math.nan if v is None else float(v) + 0.0 for v in values])


def _intersect(intervals: Iterable[Interval]) -> Interval:
    """Intersects the intervals after each draw, which hold together; the last interval if the
    intersection is empty.

    A row that was once decided stays decided: its p is the smallest one so far.
    """
    low, high, last = -math.inf, math.inf, Interval()
    for last in intervals:
        low, high = max(low, last.low), min(high, last.high)
    return Interval(low, high) if low <= high else last


def _last(log_p):
    return float(log_p[-1]) if len(log_p) else 0.0


def _spread_note(numbers):
    """Describes numbers by their smallest and largest; "" for none."""
    if not len(numbers):
        return ""
    low, high = numbers.min(), numbers.max()
    return f"all {low:.3g}" if low == high else f"values {low:.3g} to {high:.3g}"


def _missing_note(unknown, total):
    return f"{unknown} of {total} draws have no number" if unknown else ""


def _join_notes(notes):
    return "; ".join(note for note in notes if note)
