"""The page of all experiments: their findings with a picture each, sections, and all statements."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.verdicts.board import render_board, render_statement
from experiments.verdicts.claims import Answer, Row
from experiments.verdicts.style import STYLE
from experiments.verdicts.wording import count_text
from rank_collapse import report
from rank_collapse.report.page import embed_png, escape_html, format_number, wrap_wide

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
    """Renders the page as HTML without outside files.

    Args:
        title: Of the page.
        intro: Its first paragraph.
        sections: The experiments.
        footer: Its last line.
        answers: To the statements that they test.
        untested: Texts of the statements that they do not test.
    """
    parts = [_report_section(section, answers) for section in sections]
    if answers or untested:
        body = render_board(answers, untested)
        parts.append(report.Section("statements", "All statements", "", body=body))
    return report.render(title, intro, parts, footer, opening=_render_cards(sections), style=STYLE)


def comparison_line(row: Comparison) -> str:
    """Writes "whole model: 0.98, beside 0.9; note"."""
    published = "" if row.published is None else f", beside {format_number(row.published)}"
    return f"{row.quantity}: {format_number(row.measured)}{published}" + f"; {row.note}" * bool(
        row.note
    )


def _report_section(section, answers):
    """Makes the section of one experiment: its finding, the paper's claim and the result on top.

    Args:
        section: Of the experiment.
        answers: To all statements.
    """
    unfinished = section.status in UNFINISHED
    kind = "small" if unfinished else "failed"
    status = f' <span class="{kind}">{escape_html(section.status)}</span>'
    if unfinished:
        return report.Section(section.name, section.title, "", status)
    paragraphs = {
        "": section.finding,
        "The paper: ": section.claim,
        "Result at full size: ": re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", section.came_out),
    }
    body = "".join(
        f"<p><b>{label}</b>{escape_html(text)}</p>" for label, text in paragraphs.items() if text
    )
    keys = {row.key for row in section.claims}
    tested = [answer for answer in answers if answer.key in keys]
    folded = []
    if tested:
        text = "".join(map(render_statement, tested))
        folded.append((f"Statements: {count_text(tested)}", text))
    if section.comparisons:
        folded.append(_comparison_table(section.comparisons))
    return report.Section(
        section.name,
        section.title,
        section.command,
        "" if section.status == "done" else status,
        body + (f"<pre>{escape_html(section.error)}</pre>" if section.error else ""),
        section.figures,
        folded=folded,
        details=section.details,
    )


def _comparison_table(comparisons):
    """Makes (title, table) of measured and published numbers."""
    has_published = any(c.published is not None for c in comparisons)
    column = "<th>published</th>" * has_published
    table = f"<tr><th>quantity</th><th>measured</th>{column}<th></th></tr>"
    for c in comparisons:
        published = (
            f'<td class="number">{escape_html(format_number(c.published))}</td>' * has_published
        )
        table += f'<tr><td>{escape_html(c.quantity)}</td><td class="number">'
        table += f"{escape_html(format_number(c.measured))}</td>{published}"
        table += f"<td>{escape_html(c.note)}</td></tr>"
    title = "Numbers" + ", beside published ones" * has_published
    return title, wrap_wide(f"<table>{table}</table>")


def _render_cards(sections):
    """Renders a card for each section with a finding: its picture, the sentence, and a link."""
    cards = ""
    for s in (s for s in sections if s.finding and s.picture):
        # The header of a PNG has its width and height; one twice as wide as high gets two columns.
        broad = int.from_bytes(s.picture[16:20]) > 2 * int.from_bytes(s.picture[20:24])
        cards += f'<a class="card{" broad" * broad}" href="#{escape_html(s.name)}">'
        cards += f"{embed_png(s.picture, s.finding)}<p>{escape_html(s.finding)}</p>"
        cards += f'<p class="small">{escape_html(s.title)}</p></a>'
    return f'<div class="cards">{cards}</div>' if cards else ""
