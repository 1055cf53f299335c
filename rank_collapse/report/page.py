"""One self-contained HTML page of experiments: figures embedded, numbers, commands, verdicts.

No script: what unfolds is a `details` element.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rank_collapse.report.board import board
from rank_collapse.report.claims import Answer, Row
from rank_collapse.report.style import STYLE
from rank_collapse.report.wording import number

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
