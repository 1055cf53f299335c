"""One self-contained HTML page of sections: a figure each, and tables that unfold.

No script: what unfolds is a `details` element.
"""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rank_collapse.printed import format_count
from rank_collapse.report.style import STYLE


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
        name: Anchor.
        title: Heading.
        command: How the numbers were made.
        status: Beside the heading, HTML.
        body: HTML under the heading.
        figures: (PNG, caption) pairs; the first is shown, the others unfold.
        table: Rows of numbers by column.
        folded: (title, HTML) of the folded parts.
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
    """Render the page as HTML; everything it needs is in it.

    Args:
        title, intro: At the top.
        sections: The sections in order.
        footer: Small print at the end.
        opening: HTML before the first section.
        style: A style sheet in addition to `STYLE`.
    """
    contents = "".join(
        f'<a href="#{escape_html(s.name)}">{escape_html(s.title)}{s.status}</a>' for s in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape_html(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}{style}</style></head>'
        f'<body>\n<nav class="side">{contents}</nav>\n'
        f"<main><h1>{escape_html(title)}</h1><p>{escape_html(intro)}</p>\n"
        f'<details class="contents"><summary>Contents</summary><nav>{contents}</nav></details>\n'
        f"{opening}\n"
        + "\n".join(map(_render_section, sections))
        + f'\n<p class="small">{escape_html(footer)}</p></main></body></html>\n'
    )


def render_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Render a table of all columns that a row has.

    Args:
        rows: {column: value} each.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape_html(name)}</th>" for name in columns)
    body = ""
    for row in rows:
        numbers = [render_inline(format_number(row.get(name))) for name in columns]
        cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
        body += f"<tr>{cells}</tr>"
    return wrap_wide(f"<table><tr>{head}</tr>{body}</table>")


def format_number(value: object) -> str:
    """Format a value as a table shows it: four significant digits."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "—"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def escape_html(value: object) -> str:
    """Escape a value for HTML's text."""
    return html.escape(str(value))


def render_inline(text: str) -> str:
    """Render a paragraph of Markdown as HTML: code, bold text, powers; a link leaves its words.

    Args:
        text: Text without blocks (tables, lists, headings).
    """
    escaped = escape_html(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    # Code comes apart first, so that nothing within it is taken for bold text or a power.
    parts = re.split(r"`([^`]*)`", escaped)
    for place, part in enumerate(parts):
        if place % 2:
            parts[place] = f"<code>{part}</code>"
        else:
            bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", part)
            parts[place] = re.sub(r"(?<=\w)\^(\w+)", r"<sup>\1</sup>", bold)
    return "".join(parts)


def wrap_wide(content: str) -> str:
    """Wrap HTML so that it scrolls sideways where the screen is narrower."""
    return f'<div class="wide">{content}</div>'


def embed_png(png: bytes, alt: str) -> str:
    """Embed a PNG in the page."""
    data = base64.b64encode(png).decode()
    return f'<img alt="{escape_html(alt)}" src="data:image/png;base64,{data}">'


def wrap_folded(title: str, content: str) -> str:
    """Wrap HTML so that it unfolds below a title."""
    return f"<details><summary>{escape_html(title)}</summary>{content}</details>"


def _render_figure(figure):
    png, caption = figure
    text = f"<figcaption>{render_inline(caption)}</figcaption>"
    return f"<figure>{wrap_wide(embed_png(png, caption.replace('`', '')))}{text}</figure>"


def _render_section(section):
    """Renders one section: heading, text, first figure, table, and folded parts."""
    heading = (
        f'<h2 id="{escape_html(section.name)}">{escape_html(section.title)}{section.status}</h2>'
    )
    parts = [heading, section.body, *map(_render_figure, section.figures[:1])]
    if section.table:
        parts.append(render_table(section.table))
    parts += [wrap_folded(*pair) for pair in section.folded]
    if further := section.figures[1:]:
        count = format_count(len(further), "more figure")
        parts.append(wrap_folded(count, "".join(map(_render_figure, further))))
    if section.command:
        details = f'<p class="small">{escape_html(section.details)}</p>' if section.details else ""
        parts.append(
            wrap_folded("Command and time", f"<pre>{escape_html(section.command)}</pre>{details}")
        )
    return "<section>" + "\n".join(parts) + "</section>"
