"""The board of statements: a forest plot of each, its settings against the claimed range.

Drawn as SVG whose places along the axis are percentages, so that it has any width and text keeps
its size.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.verdicts.claims import FINDING, OUTSIDE, WITHIN, Answer, Judged, count_answers
from experiments.verdicts.wording import (
    JOINTLY,
    confirmation_text,
    count_line,
    estimate_text,
    quantity_text,
    range_text,
    row_note,
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


def render_board(answers: Sequence[Answer], untested: Sequence[str] = ()) -> str:
    """Renders all statements, folded under their counts.

    Args:
        answers: Their answers.
        untested: Texts of the statements that were not tested.
    """
    counts = {answer: count for answer, count in count_answers(answers).items() if count}
    counts |= {NOT_TESTED: len(untested)} if untested else {}
    count_html = "".join(
        f'<span class="answer {_css_class(name)}">{name}: {count}</span>'
        for name, count in counts.items()
    )
    statements = "".join(map(render_statement, answers))
    for text in untested:
        statements += '<div class="statement"><p><span class="answer not-tested">'
        statements += f"{NOT_TESTED}</span> {escape_html(text)}</p></div>"
    return (
        f'<p class="counts">{count_html}</p>'
        f"<p>{escape_html(count_line(answers))}</p>"
        f"<details><summary>How they are judged</summary><p>{escape_html(JOINTLY)}</p></details>"
        f"<details><summary>All statements</summary>{statements}</details>"
    )


def render_statement(answer: Answer) -> str:
    """Renders one statement: its answer, text and forest plot; statistic and numbers unfold."""
    s, axis = answer.statement, make_axis(answer)
    claimed = f"Claimed range: {range_text(s.claimed)}." if s.claimed else ""
    rows = ""
    for j in answer.rows:
        verdict = "" if answer.answer == FINDING else j.verdict
        numbers = f"{escape_html(estimate_text(j))}; {escape_html(row_note(j.row))}"
        rows += (
            f"<tr><td>{escape_html(j.row.setting)}</td><td>{plot_forest(answer, [j], axis)}</td>"
        )
        rows += f'<td class="number">{numbers}</td>'
        rows += f'<td class="{_css_class(j.verdict)}">{verdict}</td></tr>'
    return (
        f'<details class="statement"><summary>'
        f'<span class="answer {_css_class(answer.answer)}">{escape_html(answer.answer)}</span>'
        f'<span>{escape_html(s.text)} <span class="source">{escape_html(s.source)}. '
        f"{escape_html(confirmation_text(answer))}</span></span>"
        f"<span>{plot_forest(answer, answer.rows, axis, labels=True)}"
        f'<span class="small">{escape_html(quantity_text(s))}</span></span></summary>'
        f"<div><p>{escape_html(claimed)}</p>{wrap_wide(f'<table>{rows}</table>')}</div></details>"
    )


def make_axis(answer: Answer) -> Axis:
    """Makes an axis that shows all intervals and the finite ends of the claimed range.

    It is linear, or v ↦ asinh(v/s), linear below s and logarithmic above, where values differ so
    much that a linear one would show the largest alone.
    """
    claimed = [v for v in answer.statement.claimed or () if math.isfinite(v)]
    estimates = [j.row.estimate for j in answer.rows if j.row.estimate is not None]
    ends = [v for j in answer.rows for v in j.interval]
    values = [float(v) for v in (*claimed, *estimates, *ends) if math.isfinite(v)] or [0.0]
    sizes = sorted(abs(v) for v in values if v) or [1.0]
    small = max(sizes[0], sizes[-1] * 1e-8)
    linear = sizes[-1] <= FAR * sizes[len(sizes) // 2] and sizes[-1] <= FAR**2 * small

    def warp(value):
        return value if linear else math.asinh(value / small)

    low, high = warp(min(values)), warp(max(values))
    width = (high - low) or abs(high) or 1.0
    low, high = low - EDGE * width, high + EDGE * width

    def place(value):
        if math.isinf(value):
            return 100.0 if value > 0 else 0.0
        return min(100.0, max(0.0, 100 * (warp(value) - low) / (high - low)))

    labels: list[float] = []
    for value in (*claimed, min(values), max(values)):
        if all(abs(place(value) - place(other)) >= APART for other in labels):
            labels.append(value)
    return Axis(place, tuple(labels))


def plot_forest(answer: Answer, rows: Sequence[Judged], axis: Axis, *, labels: bool = False) -> str:
    """Plots rows as intervals with a mark each, on the claimed range; hovering names the setting.

    Args:
        answer: Of the statement.
        rows: Some or all of its rows.
        axis: From `make_axis`.
        labels: Whether the axis is drawn with its labels.

    Returns:
        SVG, or a line where no row has a number.
    """
    rows = [j for j in rows if j.row.estimate is not None]
    if not rows:
        return '<span class="small">no number</span>'
    height, svg = STEP * len(rows), ""
    if answer.statement.claimed:
        start, end = (axis.place(v) for v in answer.statement.claimed)
        svg += f'<rect class="claimed" x="{start:.2f}%" width="{end - start:.2f}%" '
        svg += f'height="{height}"/>'
        for value in filter(math.isfinite, answer.statement.claimed):
            x = axis.place(value)
            svg += f'<line class="end" x1="{x:.2f}%" x2="{x:.2f}%" y2="{height}"/>'
    for index, judged in enumerate(rows):
        svg += _plot_row(judged, axis, STEP * (index + 0.5), answer.answer)
    if labels:
        svg += f'<line class="axis" x1="0" x2="100%" y1="{height}" y2="{height}"/>'
        for value in axis.labels:
            x = axis.place(value)
            anchor = "start" if x < 8 else "end" if x > 92 else "middle"
            svg += f'<text x="{x:.2f}%" y="{height + LABELS - 4}" text-anchor="{anchor}">'
            svg += f"{value:.3g}</text>"
    texts = "; ".join(f"{j.row.setting} {estimate_text(j)}" for j in rows)
    label = escape_html(f"{answer.statement.statistic}: {texts}")
    height += LABELS * labels
    return f'<svg class="forest" height="{height}" role="img" aria-label="{label}">{svg}</svg>'


def _plot_row(judged, axis, y, answer):
    """Plots an interval and its mark at a height.

    Args:
        judged: The row.
        axis: From `make_axis`.
        y: Height, in pixels from the top.
        answer: To its statement.
    """
    verdict = "finding" if answer == FINDING else judged.verdict
    text = f"{judged.row.setting}: {estimate_text(judged)} {verdict}"
    title = escape_html(text)
    svg = f"<title>{title}</title>"
    if judged.interval.is_finite:
        low, high = (axis.place(v) for v in judged.interval)
        svg += f'<line x1="{low:.2f}%" x2="{high:.2f}%" y1="{y}" y2="{y}"/>'
    x = f"{axis.place(judged.row.estimate):.2f}%"
    # A disc within, a square outside, a ring where it is undecided: distinct without colour.
    if verdict == OUTSIDE:
        svg += f'<rect x="{x}" y="{y - 4}" width="8" height="8" transform="translate(-4 0)"/>'
    else:
        ring = "" if verdict in (WITHIN, "finding") else ' class="undecided-mark"'
        svg += f'<circle cx="{x}" cy="{y}" r="4" fill="currentColor"{ring}/>'
    return f'<g class="row {_css_class(verdict)}">{svg}</g>'


def _css_class(words):
    return escape_html(words).replace(" ", "-")
