"""One self-contained HTML page: the findings with a picture each, sections, all statements.

No script: what unfolds is a `details` element.
"""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rank_collapse.report.board import board, statement
from rank_collapse.report.claims import Answer, Row
from rank_collapse.report.style import STYLE
from rank_collapse.report.wording import counts, number

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
    claim: str  # What the paper says; "" where none does
    command: str  # How the numbers were made
    status: str = "done"  # "done", "failed", or one of `UNFINISHED`
    finding: str = ""  # One sentence made of its numbers, which the page opens with
    picture: bytes = b""  # PNG beside that sentence
    came_out: str = ""  # What came out at full size, a paragraph of Markdown
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
    contents = "".join(
        f'<a href="#{_text(s.name)}">{_text(s.title)}{_status(s)}</a>' for s in sections
    )
    if has_board := bool(answers or untested):
        contents += '<a href="#statements">All statements</a>'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_text(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}</style></head><body>\n'
        f'<nav class="side">{contents}</nav>\n<main><h1>{_text(title)}</h1><p>{_text(intro)}</p>\n'
        f'<details class="contents"><summary>Contents</summary><nav>{contents}</nav></details>\n'
        f"{_findings(sections)}\n"
        + "\n".join(_section(s, answers) for s in sections)
        + board(answers, untested) * has_board
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


def _image(png, alt):
    data = base64.b64encode(png).decode()
    return f'<img alt="{_text(alt)}" src="data:image/png;base64,{data}">'


def _figure(figure):
    png, caption = figure
    return (
        f'<figure><div class="wide">{_image(png, caption)}</div>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _is_broad(png):
    """Whether a PNG, whose header has its width and height, is twice as wide as high."""
    return int.from_bytes(png[16:20]) > 2 * int.from_bytes(png[20:24])


def _findings(sections):
    """A card for each section with a finding: its picture, the sentence, and a link to it; as wide
    as two where the picture is."""
    cards = "".join(
        f'<a class="card{" broad" * _is_broad(s.picture)}" href="#{_text(s.name)}">'
        f"{_image(s.picture, s.finding)}"
        f'<p>{_text(s.finding)}</p><p class="small">{_text(s.title)}</p></a>'
        for s in sections
        if s.finding and s.picture
    )
    return f'<div class="cards">{cards}</div>' if cards else ""


def _section(section, answers):
    """What was found, what the paper says, what came out and the figure; the rest unfolds."""
    head = f'<h2 id="{_text(section.name)}">{_text(section.title)}{_status(section)}</h2>'
    if section.status in UNFINISHED:
        return f"<section>{head}</section>"
    said = {
        "": section.finding,
        "The paper: ": section.claim,
        "What came out at full size: ": section.came_out,
    }
    parts = [f"<section>{head}"]
    parts += [f"<p><b>{k}</b>{_text(_without_links(v))}</p>" for k, v in said.items() if v]
    if section.error:
        parts.append(f"<pre>{_text(section.error)}</pre>")
    parts += [_figure(figure) for figure in section.figures[:1]]
    if section.table:
        parts.append(_wide(table_of(section.table)))
    keys = {row.key for row in section.claims}
    if tested := [answer for answer in answers if answer.key in keys]:
        parts.append(_folded(f"Statements: {counts(tested)}", *map(statement, tested)))
    if section.comparisons:
        compared = any(c.published is not None for c in section.comparisons)
        beside = "<th>published</th>" * compared
        head = f"<tr><th>quantity</th><th>measured</th>{beside}<th></th></tr>"
        rows = "".join(_row(c, compared) for c in section.comparisons)
        title = "Numbers" + ", beside published ones" * compared
        parts.append(_folded(title, _wide(f"<table>{head}{rows}</table>")))
    if further := section.figures[1:]:
        count = f"{len(further)} more figure{'s' * (len(further) != 1)}"
        parts.append(_folded(count, *map(_figure, further)))
    details = f'<p class="small">{_text(section.details)}</p>' if section.details else ""
    parts.append(_folded("Command and time", f"<pre>{_text(section.command)}</pre>", details))
    return "\n".join(parts) + "</section>"


def _wide(table):
    return f'<div class="wide">{table}</div>'


def _without_links(text):
    """Markdown's links as their text."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def _row(c, compared):
    beside = f'<td class="number">{_text(number(c.published))}</td>' * compared
    return (
        f'<tr><td>{_text(c.quantity)}</td><td class="number">{_text(number(c.measured))}</td>'
        f"{beside}<td>{_text(c.note)}</td></tr>"
    )
