"""The board of statements: a forest plot of each, its settings against the claimed range.

Drawn as SVG whose places along the axis are percentages, so that it has any width and text keeps
its size.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.verdicts.claims import FINDING, OUTSIDE, WITHIN, Answer, Judged, counted
from experiments.verdicts.wording import (
    JOINTLY,
    count_line,
    note,
    quantity,
    range_text,
    span,
    standing,
)
from rank_collapse.report.page import escape_html, wrap_wide

STEP, LABELS = 13, 18  # pixels: from row to row, and what the labels of the axis take
EDGE = 0.06  # of the axis beyond the farthest value
FAR = 200.0  # where the largest value is that many times the median, the axis is logarithmic
APART = 12.0  # percent between two labels of the axis at least
NOT_TESTED = "not tested"


class Axis(NamedTuple):
    """Where values are along a forest plot."""

    place: Callable[[float], float]  # value → percent, 0 to 100
    labels: tuple[float, ...]  # The values that are named


def board(answers: Sequence[Answer], untested: Sequence[str] = ()) -> str:
    """All statements, folded under their counts: a row each, and what was not tested."""
    marks = {answer: count for answer, count in counted(answers).items() if count}
    marks |= {NOT_TESTED: len(untested)} if untested else {}
    counts = "".join(
        f'<span class="answer {_class(name)}">{name}: {count}</span>'
        for name, count in marks.items()
    )
    rows = "".join(statement(answer) for answer in answers)
    left = "".join(
        f'<div class="statement"><p><span class="answer not-tested">{NOT_TESTED}</span> '
        f"{escape_html(said)}</p></div>"
        for said in untested
    )
    return (
        f'<p class="counts">{counts}</p>'
        f"<p>{escape_html(count_line(answers))}</p>"
        f"<details><summary>How they are judged</summary><p>{escape_html(JOINTLY)}</p></details>"
        f"<details><summary>All statements</summary>{rows}{left}</details>"
    )


def statement(answer: Answer) -> str:
    """One statement: its answer, its text and its forest plot; statistic and numbers unfold."""
    s, axis = answer.statement, axis_of(answer)
    claimed = f"Claimed range: {range_text(s.claimed)}." if s.claimed else ""
    rows = "".join(
        f"<tr><td>{escape_html(j.row.setting)}</td><td>{forest(answer, [j], axis)}</td>"
        f'<td class="number">{escape_html(span(j))}; {escape_html(note(j.row))}</td>'
        f'<td class="{_class(j.verdict)}">{"" if answer.answer == FINDING else j.verdict}</td></tr>'
        for j in answer.rows
    )
    return (
        f'<details class="statement"><summary>'
        f'<span class="answer {_class(answer.answer)}">{escape_html(answer.answer)}</span>'
        f'<span>{escape_html(s.text)} <span class="source">{escape_html(s.source)}. '
        f"{escape_html(standing(answer))}</span></span>"
        f"<span>{forest(answer, answer.rows, axis, labels=True)}"
        f'<span class="small">{escape_html(quantity(s))}</span></span></summary>'
        f"<div><p>{escape_html(claimed)}</p>{wrap_wide(f'<table>{rows}</table>')}</div></details>"
    )


def axis_of(answer: Answer) -> Axis:
    """An axis that shows all intervals and the finite ends of the claimed range.

    It is linear, or v ↦ asinh(v/s), linear below s and logarithmic above, where values differ so
    much that a linear one would show the largest alone.
    """
    claimed = [v for v in answer.statement.claimed or () if math.isfinite(v)]
    known = [j.row.estimate for j in answer.rows if j.row.estimate is not None]
    ends = [v for j in answer.rows for v in j.interval if math.isfinite(v)]
    values = [float(v) for v in (*claimed, *known, *ends) if math.isfinite(v)] or [0.0]
    sizes = sorted(abs(v) for v in values if v) or [1.0]
    small = max(sizes[0], sizes[-1] * 1e-8)
    linear = sizes[-1] <= FAR * sizes[len(sizes) // 2] and sizes[-1] <= FAR**2 * small

    def warp(value):
        return value if linear else math.asinh(value / small)

    low, high = warp(min(values)), warp(max(values))
    wide = (high - low) or abs(high) or 1.0
    low, high = low - EDGE * wide, high + EDGE * wide

    def place(value):
        if math.isinf(value):
            return 100.0 if value > 0 else 0.0
        return min(100.0, max(0.0, 100 * (warp(value) - low) / (high - low)))

    labels: list[float] = []
    for value in (*claimed, min(values), max(values)):
        if all(abs(place(value) - place(other)) >= APART for other in labels):
            labels.append(value)
    return Axis(place, tuple(labels))


def forest(answer: Answer, rows: Sequence[Judged], axis: Axis, *, labels: bool = False) -> str:
    """Rows as intervals with a mark each, on the claimed range; hovering names the setting."""
    rows = [j for j in rows if j.row.estimate is not None]
    if not rows:
        return '<span class="small">no number</span>'
    height = STEP * len(rows)
    parts = []
    if answer.statement.claimed:
        left, right = (axis.place(v) for v in answer.statement.claimed)
        parts.append(
            f'<rect class="claimed" x="{left:.2f}%" width="{right - left:.2f}%" height="{height}"/>'
        )
        parts += [
            f'<line class="end" x1="{axis.place(v):.2f}%" x2="{axis.place(v):.2f}%" y2="{height}"/>'
            for v in answer.statement.claimed
            if math.isfinite(v)
        ]
    parts += [_row(j, axis, STEP * (i + 0.5), answer.answer) for i, j in enumerate(rows)]
    if labels:
        parts.append(f'<line class="axis" x1="0" x2="100%" y1="{height}" y2="{height}"/>')
        for value in axis.labels:
            place = axis.place(value)
            anchor = "start" if place < 8 else "end" if place > 92 else "middle"
            parts.append(
                f'<text x="{place:.2f}%" y="{height + LABELS - 4}" text-anchor="{anchor}">'
                f"{value:.3g}</text>"
            )
    name = escape_html(
        f"{answer.statement.statistic}: " + "; ".join(f"{j.row.setting} {span(j)}" for j in rows)
    )
    return (
        f'<svg class="forest" height="{height + LABELS * labels}" role="img" aria-label="{name}">'
        f"{''.join(parts)}</svg>"
    )


def _row(judged, axis, y, answer):
    verdict = "finding" if answer == FINDING else judged.verdict
    parts = [
        f"<title>{escape_html(judged.row.setting)}: {escape_html(span(judged))} "
        f"{escape_html(verdict)}</title>"
    ]
    if judged.interval.is_finite:
        low, high = (axis.place(v) for v in judged.interval)
        parts.append(f'<line x1="{low:.2f}%" x2="{high:.2f}%" y1="{y}" y2="{y}"/>')
    x = f"{axis.place(judged.row.estimate):.2f}%"
    # A disc within, a square outside, a ring where it is undecided: distinct without colour.
    if verdict == OUTSIDE:
        mark = f'<rect x="{x}" y="{y - 4}" width="8" height="8" transform="translate(-4 0)"/>'
    else:
        filled = "" if verdict in (WITHIN, "finding") else ' class="undecided-mark"'
        fill = f' fill="currentColor"{filled}'
        mark = f'<circle cx="{x}" cy="{y}" r="4"{fill}/>'
    return f'<g class="row {_class(verdict)}">{"".join(parts)}{mark}</g>'


def _class(words):
    return escape_html(words).replace(" ", "-")
