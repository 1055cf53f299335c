"""The page of all experiments: their findings with a picture each, sections, and all statements."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.verdicts.board import board, statement
from experiments.verdicts.claims import Answer, Row
from experiments.verdicts.style import STYLE
from experiments.verdicts.wording import counts
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
    shown = [_shown(section, answers) for section in sections]
    if answers or untested:
        body = board(answers, untested)
        shown.append(report.Section("statements", "All statements", "", body=body))
    return report.render(title, intro, shown, footer, opening=_findings(sections), style=STYLE)


def comparison_line(row: Comparison) -> str:
    """ "whole model: 0.98, beside 0.9; note"."""
    beside = "" if row.published is None else f", beside {format_number(row.published)}"
    return f"{row.quantity}: {format_number(row.measured)}{beside}" + (
        f"; {row.note}" * bool(row.note)
    )


def _shown(section, answers):
    """An experiment's section: what was found, what the paper says and what came out at its top."""
    if section.status in UNFINISHED:
        return report.Section(section.name, section.title, "", _status(section))
    return report.Section(
        section.name,
        section.title,
        section.command,
        _status(section),
        _paragraphs(section),
        section.figures,
        section.table,
        [*_statements(section, answers), *_comparisons(section.comparisons)],
        section.details,
    )


def _status(section):
    if section.status == "done":
        return ""
    kind = "small" if section.status in UNFINISHED else "failed"
    return f' <span class="{kind}">{escape_html(section.status)}</span>'


def _paragraphs(section):
    said = {
        "": section.finding,
        "The paper: ": section.claim,
        "What came out at full size: ": re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", section.came_out),
    }
    error = f"<pre>{escape_html(section.error)}</pre>" if section.error else ""
    return "".join(f"<p><b>{k}</b>{escape_html(v)}</p>" for k, v in said.items() if v) + error


def _statements(section, answers):
    keys = {row.key for row in section.claims}
    tested = [answer for answer in answers if answer.key in keys]
    if tested:
        yield f"Statements: {counts(tested)}", "".join(map(statement, tested))


def _comparisons(comparisons):
    if not comparisons:
        return
    compared = any(c.published is not None for c in comparisons)
    beside = "<th>published</th>" * compared
    head = f"<tr><th>quantity</th><th>measured</th>{beside}<th></th></tr>"
    rows = "".join(_row(c, compared) for c in comparisons)
    title = "Numbers" + ", beside published ones" * compared
    yield title, wrap_wide(f"<table>{head}{rows}</table>")


def _row(c, compared):
    beside = f'<td class="number">{escape_html(format_number(c.published))}</td>' * compared
    return (
        f"<tr><td>{escape_html(c.quantity)}</td>"
        f'<td class="number">{escape_html(format_number(c.measured))}</td>'
        f"{beside}<td>{escape_html(c.note)}</td></tr>"
    )


def _is_broad(png):
    """Whether a PNG, whose header has its width and height, is twice as wide as high."""
    return int.from_bytes(png[16:20]) > 2 * int.from_bytes(png[20:24])


def _findings(sections):
    """A card for each section with a finding: its picture, the sentence, and a link to it; as wide
    as two where the picture is."""
    cards = "".join(
        f'<a class="card{" broad" * _is_broad(s.picture)}" href="#{escape_html(s.name)}">'
        f"{embed_png(s.picture, s.finding)}"
        f'<p>{escape_html(s.finding)}</p><p class="small">{escape_html(s.title)}</p></a>'
        for s in sections
        if s.finding and s.picture
    )
    return f'<div class="cards">{cards}</div>' if cards else ""
