"""One self-contained HTML page of sections: a figure each, and tables that unfold.

No script: what unfolds is a `details` element.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rank_collapse.report.style import STYLE


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
        name: Anchor.
        title: Heading.
        command: How the numbers were made.
        status: Beside the heading, HTML.
        body: Under the heading, HTML.
        figures: (PNG, caption) pairs; the first is shown, the others unfold.
        table: Rows of numbers by column.
        folded: (title, HTML) of what unfolds.
        details: Small print below the command.
    """

    name: str
    title: str
    command: str
    status: str = ""
    body: str = ""
    figures: Sequence[tuple[bytes, str]] = field(default=())
    table: Sequence[Mapping[str, Any]] = field(default=())
    folded: Sequence[tuple[str, str]] = field(default=())
    details: str = ""


def render(
    title: str,
    intro: str,
    sections: Sequence[Section],
    footer: str = "",
    *,
    opening: str = "",
    style: str = "",
) -> str:
    """The page as HTML; everything it needs is in it.

    Args:
        opening: HTML before the first section.
        style: A style sheet beside `STYLE`.
    """
    contents = "".join(
        f'<a href="#{escape(s.name)}">{escape(s.title)}{s.status}</a>' for s in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}{style}</style></head>'
        f'<body>\n<nav class="side">{contents}</nav>\n'
        f"<main><h1>{escape(title)}</h1><p>{escape(intro)}</p>\n"
        f'<details class="contents"><summary>Contents</summary><nav>{contents}</nav></details>\n'
        f"{opening}\n"
        + "\n".join(map(_section, sections))
        + f'\n<p class="small">{escape(footer)}</p></main></body></html>\n'
    )


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of all columns that a row has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="number">{escape(number(row.get(c)))}</td>' for c in columns)
        + "</tr>"
        for row in rows
    )
    return wide(f"<table><tr>{head}</tr>{body}</table>")


def numbers_table(numbers: Mapping[str, Any]) -> str:
    """A table of quantities, a line each."""
    rows = "".join(
        f'<tr><td>{escape(quantity)}</td><td class="number">{escape(number(value))}</td></tr>'
        for quantity, value in numbers.items()
    )
    return wide(f"<table><tr><th>quantity</th><th>measured</th></tr>{rows}</table>")


def number(value: Any) -> str:
    """A value as a table shows it: four significant digits."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "—"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def escape(value: Any) -> str:
    """A value as HTML's text."""
    return html.escape(str(value))


def wide(content: str) -> str:
    """HTML that scrolls sideways where the screen is narrower."""
    return f'<div class="wide">{content}</div>'


def image(png: bytes, alt: str) -> str:
    """A PNG in the page."""
    data = base64.b64encode(png).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


def folded(title: str, content: str) -> str:
    """HTML that unfolds below a title."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _figure(figure):
    png, caption = figure
    return f"<figure>{wide(image(png, caption))}<figcaption>{escape(caption)}</figcaption></figure>"


def _section(section):
    heading = f'<h2 id="{escape(section.name)}">{escape(section.title)}{section.status}</h2>'
    parts = [heading, section.body, *map(_figure, section.figures[:1])]
    if section.table:
        parts.append(table_of(section.table))
    parts += [folded(*pair) for pair in section.folded]
    if further := section.figures[1:]:
        count = f"{len(further)} more figure{'s' * (len(further) != 1)}"
        parts.append(folded(count, "".join(map(_figure, further))))
    if section.command:
        details = f'<p class="small">{escape(section.details)}</p>' if section.details else ""
        parts.append(folded("Command and time", f"<pre>{escape(section.command)}</pre>{details}"))
    return "<section>" + "\n".join(parts) + "</section>"
