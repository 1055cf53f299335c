"""One self-contained HTML page of experiments: figures embedded, numbers, commands, verdicts.

No script: what unfolds is a `details` element. The board of statements has a forest plot of each,
its settings against the claimed range, as SVG whose places along the axis are percentages: it has
any width, and text keeps its size.
"""

import base64
import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rank_collapse.report.claims import FINDING, OUTSIDE, WITHIN, Answer, Judged, Row, counted
from rank_collapse.report.style import STYLE
from rank_collapse.report.wording import (
    JOINTLY,
    count_line,
    holds_text,
    note,
    number,
    span,
    standing,
)

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
    """All statements: counts, a row each, and what was not tested."""
    counts = "".join(
        f'<span class="answer {_class(name)}">{name}: {count}</span>'
        for name, count in counted(answers).items()
    )
    if untested:
        counts += f'<span class="answer not-tested">{NOT_TESTED}: {len(untested)}</span>'
    rows = "".join(statement(answer) for answer in answers)
    left = "".join(
        f'<div class="statement"><p><span class="answer not-tested">{NOT_TESTED}</span> '
        f"{_text(text)}</p></div>"
        for text in untested
    )
    return (
        f'<section><h2 id="statements">Statements</h2><p class="counts">{counts}</p>'
        f'<details class="verdicts"><summary>{_text(count_line(answers))}.</summary>'
        f"<p>{_text(JOINTLY)}</p></details>{rows}{left}</section>"
    )


def statement(answer: Answer) -> str:
    """One statement: its answer, its text and its forest plot; statistic and numbers unfold."""
    s, axis = answer.statement, axis_of(answer)
    holds = f"; holds {holds_text(s)}" if s.claimed else ""
    stands = f"; {standing(s)}" if s.claimed else ""
    rows = "".join(
        f"<tr><td>{_text(j.row.setting)}</td><td>{forest(answer, [j], axis)}</td>"
        f'<td class="number">{_text(span(j))}; {_text(note(j.row))}</td>'
        f'<td class="{_class(j.verdict)}">{"" if answer.answer == FINDING else j.verdict}</td></tr>'
        for j in answer.rows
    )
    fails = f"<p>Fails: {_text(s.fails)}.</p>" if s.fails else ""
    return (
        f'<details class="statement"><summary>'
        f'<span class="answer {_class(answer.answer)}">{_text(answer.answer)}</span>'
        f'<span>{_text(s.text)} <span class="source">{_text(s.source + stands)}</span></span>'
        f"{forest(answer, answer.rows, axis, labels=True)}</summary>"
        f"<div><p>Statistic: {_text(s.statistic)}{_text(holds)}</p>{fails}"
        f'<div class="wide"><table>{rows}</table></div></div></details>'
    )


def axis_of(answer: Answer) -> Axis:
    """An axis that shows all intervals and the finite ends of the claimed range.

    It is linear, or v ↦ asinh(v/s), linear below s and logarithmic above, where values differ so
    much that a linear one would show the largest alone.
    """
    claimed = [v for v in answer.statement.claimed or () if math.isfinite(v)]
    known = [j.row.estimate for j in answer.rows if j.row.estimate is not None]
    ends = [v for j in answer.rows for v in j.interval or () if math.isfinite(v)]
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
    parts += [_drawn_row(j, axis, STEP * (i + 0.5), answer.answer) for i, j in enumerate(rows)]
    if labels:
        parts.append(f'<line class="axis" x1="0" x2="100%" y1="{height}" y2="{height}"/>')
        for value in axis.labels:
            place = axis.place(value)
            anchor = "start" if place < 8 else "end" if place > 92 else "middle"
            parts.append(
                f'<text x="{place:.2f}%" y="{height + LABELS - 4}" text-anchor="{anchor}">'
                f"{value:.3g}</text>"
            )
    name = _text(
        f"{answer.statement.statistic}: " + "; ".join(f"{j.row.setting} {span(j)}" for j in rows)
    )
    return (
        f'<svg class="forest" height="{height + LABELS * labels}" role="img" aria-label="{name}">'
        f"{''.join(parts)}</svg>"
    )


def _drawn_row(judged, axis, y, answer):
    verdict = "finding" if answer == FINDING else judged.verdict
    parts = [f"<title>{_text(judged.row.setting)}: {_text(span(judged))} {_text(verdict)}</title>"]
    if judged.interval is not None:
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
    return _text(words).replace(" ", "-")


UNFINISHED = ("waiting", "running")


@dataclass(frozen=True)
class Comparison:
    """Two numbers side by side, without a verdict: see `Answer` for those."""

    quantity: str  # What is compared, with its unit
    measured: Any  # Our value
    published: Any = None  # The paper's value; None where it has none
    note: str = ""  # Where the published value stands, or why the two differ


@dataclass(frozen=True)
class Section:
    """One experiment on the page."""

    name: str  # Anchor
    title: str  # Heading
    claim: str  # What the paper says
    command: str  # How the numbers were made
    status: str = "done"  # "done", "failed", or one of `UNFINISHED`
    figures: Sequence[tuple[bytes, str]] = field(default=())  # (PNG bytes, caption) pairs
    claims: Sequence[Row] = field(default=())  # Of the statements, whose answers the page has
    comparisons: Sequence[Comparison] = field(default=())  # Numbers beside published ones
    table: Sequence[Mapping[str, Any]] = field(default=())  # Rows of numbers by column
    details: str = ""  # The folder, the time
    error: str = ""  # What a failed run printed


def render(
    title: str,
    intro: str,
    sections: Sequence[Section],
    footer: str = "",
    answers: Sequence[Answer] = (),
    untested: Sequence[str] = (),
) -> str:
    """The page as HTML; everything it needs is in it.

    Args:
        answers: To the statements that they test.
        untested: Texts of the statements that they do not test.
    """
    contents = '<a href="#statements">Statements</a>' if answers or untested else ""
    contents += "".join(
        f'<a href="#{_text(s.name)}">{_text(s.title)}{_status(s)}</a>' for s in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_text(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}</style></head><body>\n'
        f'<nav class="side">{contents}</nav>\n<main><h1>{_text(title)}</h1><p>{_text(intro)}</p>\n'
        f'<details class="contents"><summary>Contents</summary><nav>{contents}</nav></details>\n'
        + (board(answers, untested) if answers or untested else "")
        + "\n".join(_section(s) for s in sections)
        + f'\n<p class="small">{_text(footer)}</p></main></body></html>\n'
    )


def comparison_line(row: Comparison) -> str:
    """ "whole model: 0.98, beside 0.9; note"."""
    beside = "" if row.published is None else f", beside {number(row.published)}"
    return f"{row.quantity}: {number(row.measured)}{beside}" + (f"; {row.note}" * bool(row.note))


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of all columns that a row has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{_text(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="number">{_text(number(row.get(c)))}</td>' for c in columns)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(value):
    return html.escape(str(value))


def _status(section):
    if section.status == "done":
        return ""
    kind = "small" if section.status in UNFINISHED else "failed"
    return f' <span class="{kind}">{_text(section.status)}</span>'


def _folded(title, *parts):
    return f"<details><summary>{_text(title)}</summary>{''.join(parts)}</details>"


def _figure(figure):
    png, caption = figure
    data = base64.b64encode(png).decode()
    return (
        f'<figure><img alt="{_text(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _section(section):
    """Figure first, what the paper says and what came out; the rest unfolds."""
    head = f'<h2 id="{_text(section.name)}">{_text(section.title)}{_status(section)}</h2>'
    if section.status in UNFINISHED:
        return f"<section>{head}</section>"
    parts = [f"<section>{head}"]
    parts += [_figure(figure) for figure in section.figures[:1]]
    parts.append(f'<p class="claim">{_text(section.claim)}</p>')
    compared = any(c.published is not None for c in section.comparisons)
    if section.error:
        parts.append(f"<pre>{_text(section.error)}</pre>")
    if further := section.figures[1:]:
        count = f"{len(further)} more figure{'s' * (len(further) != 1)}"
        parts.append(_folded(count, *map(_figure, further)))
    if section.comparisons:
        beside = "<th>published</th>" * compared
        head = f"<tr><th>quantity</th><th>measured</th>{beside}<th></th></tr>"
        rows = "".join(_row(c, compared) for c in section.comparisons)
        table = f'<div class="wide"><table>{head}{rows}</table></div>'
        parts.append(_folded("Numbers" + ", beside published ones" * compared, table))
    if section.table:
        parts.append(f'<div class="wide">{table_of(section.table)}</div>')
    details = f'<p class="small">{_text(section.details)}</p>' if section.details else ""
    parts.append(_folded("Command", f"<pre>{_text(section.command)}</pre>", details))
    return "\n".join(parts) + "</section>"


def _row(c, compared):
    beside = f'<td class="number">{_text(number(c.published))}</td>' * compared
    return (
        f'<tr><td>{_text(c.quantity)}</td><td class="number">{_text(number(c.measured))}</td>'
        f"{beside}<td>{_text(c.note)}</td></tr>"
    )
