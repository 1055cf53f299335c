"""One self-contained HTML page of experiments: figures embedded, numbers, commands, verdicts."""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rank_collapse.report.claims import (
    FINDING,
    NO_CASE,
    Answer,
    Judged,
    Range,
    Row,
    by_chance,
    counted,
)


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
    status: str = "done"  # "done", "failed" or "missing"
    figures: Sequence[tuple[bytes, str]] = field(default=())  # (PNG bytes, caption) pairs
    claims: Sequence[Row] = field(default=())  # Of the statements, whose answers the page has
    comparisons: Sequence[Comparison] = field(default=())  # Numbers beside published ones
    table: Sequence[Mapping[str, Any]] = field(default=())  # Rows of numbers by column
    reading: str = ""  # What the numbers say against the paper
    details: str = ""  # Small print: the folder, the time
    error: str = ""  # What a failed run printed


JOINTLY = (
    "The intervals of a statement's rows hold jointly in 95 % of runs (Holm); within: all of it is "
    "where the statement has it, outside: none of it, undecided: part of it, or too few draws. A "
    "statement holds where all rows are within, in part where some are, and does not where some "
    "are outside and none is within, or one is outside of a statement without exceptions. "
    "Findings are what no paper says; they have no answer."
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; max-width: 1080px; margin: 2em auto;
       padding: 0 1em; }
h1 { margin-bottom: .2em } h2 { margin-top: 2.2em; border-top: 1px solid #ddd; padding-top: .8em }
table { border-collapse: collapse; margin: 1em 0; font-size: 14px; width: 100% }
th, td { text-align: left; padding: .3em .8em .3em 0; border-bottom: 1px solid #e6e6e6;
         vertical-align: top }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap }
pre { background: #f5f5f3; padding: .7em 1em; white-space: pre-wrap; overflow-wrap: anywhere;
      font-size: 13px }
figure { margin: 1em 0 } figure img { max-width: 100% }
figcaption { color: #555; font-size: 13.5px }
.holds, .within { color: #00664b } .holds-in-part { color: #8a6d00 }
.does-not-hold, .outside { color: #a33b00; font-weight: 600 }
.cannot-be-said, .undecided { color: #666 } tr.row td:first-child { padding-left: 2em }
.failed { color: #a33b00 } .small { color: #666; font-size: 13px }
"""


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
    overview = "".join(
        f'<tr><td><a href="#{_text(s.name)}">{_text(s.title)}</a></td>'
        f"<td>{_status(s)}</td><td>{_text(s.reading)}</td></tr>"
        for s in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_text(title)}</title>"
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>\n'
        f"<h1>{_text(title)}</h1><p>{_text(intro)}</p>\n"
        "<table><tr><th>experiment</th><th>run</th><th>against the paper</th></tr>"
        f"{overview}</table>\n"
        + (answer_table(answers, untested) if answers or untested else "")
        + "\n".join(_section(s) for s in sections)
        + f'\n<p class="small">{_text(footer)}</p></body></html>\n'
    )


def number(value: Any) -> str:
    """A value as the table shows it: four significant digits."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "—"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def count_line(answers: Sequence[Answer]) -> str:
    """ "3 statements tested: 2 holds, ...; chance alone: at most 0.15 wrong"."""
    tested = [a for a in answers if a.answer != FINDING]
    counts = ", ".join(f"{answer}: {n}" for answer, n in counted(tested).items())
    rows = sum(len(a.rows) for a in tested)
    return (
        f"{len(tested)} statement{'s' * (len(tested) != 1)} tested in {rows} rows: {counts}. "
        f"Chance alone would give a wrong verdict to {by_chance(tested):.2g} of them at most"
    )


def range_text(claimed: Range | None) -> str:
    """ "above 0", "below -2", "2.5 to 3.5", "no case"; of a finding nothing."""
    if claimed in (None, NO_CASE):
        return "" if claimed is None else "no case"
    low, high = claimed
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"


def span(judged: Judged) -> str:
    """A row's statistic and its interval, "2.9 (2.8 to 3.1)"."""
    if judged.row.estimate is None:
        return "—"
    estimate, interval = number(judged.row.estimate), judged.interval
    if interval is None or interval[0] == interval[1]:
        return estimate
    return f"{estimate} ({number(interval[0])} to {number(interval[1])})"


def answer_lines(answer: Answer) -> str:
    """ "holds          Section 3.1: ..." and a line for each of its rows."""
    s = answer.statement
    lines = [f"{answer.answer:14s} {s.source}: {s.text}"]
    for judged in answer.rows:
        verdict = "" if answer.answer == FINDING else judged.verdict
        lines.append(f"    {verdict:10s} {judged.row.setting}: {span(judged)}; {note(judged.row)}")
    return "\n".join(lines)


def note(row: Row) -> str:
    """ "8 draws; 2 of 10 draws have no number"."""
    return f"{row.draws} draw{'s' * (row.draws != 1)}" + (f"; {row.why}" if row.why else "")


def comparison_line(row: Comparison) -> str:
    """ "whole model: 0.98, beside 0.9; note"."""
    beside = "" if row.published is None else f", beside {number(row.published)}"
    return f"{row.quantity}: {number(row.measured)}{beside}" + (f"; {row.note}" * bool(row.note))


def answer_table(answers: Sequence[Answer], untested: Sequence[str] = ()) -> str:
    """Each statement with its answer and its rows below it, and what was not tested."""
    parts = []
    for a in answers:
        s = a.statement
        holds = f"; holds {range_text(s.claimed)}" if s.claimed else ""
        parts.append(
            f"<tr><td><b>{_text(s.text)}</b> {_text(s.source)}</td>"
            f"<td>{_text(s.statistic)}{_text(holds)}</td>"
            f'<td class="{a.answer.replace(" ", "-")}">{_text(a.answer)}</td></tr>'
        )
        for judged in a.rows:
            verdict = "" if a.answer == FINDING else judged.verdict
            parts.append(
                f'<tr class="row"><td>{_text(judged.row.setting)}</td><td class="number">'
                f"{_text(span(judged))}; {_text(note(judged.row))}</td>"
                f'<td class="{judged.verdict}">{verdict}</td></tr>'
            )
    parts += [f"<tr><td>{_text(text)}</td><td></td><td>not tested</td></tr>" for text in untested]
    return (
        f'<p class="verdicts"><b>{_text(count_line(answers))}.</b> {_text(JOINTLY)}</p>'
        "<table><tr><th>statement, and the settings it is tested in</th><th>statistic, and its "
        f"joint interval</th><th>answer</th></tr>{''.join(parts)}</table>"
    )


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
    if section.status != "done":
        return f'<span class="failed">{_text(section.status)}</span>'
    return "done"


def _section(section):
    parts = [
        f'<h2 id="{_text(section.name)}">{_text(section.title)}</h2>',
        f"<p>{_text(section.claim)}</p>",
        f"<pre>{_text(section.command)}</pre>",
    ]
    if section.status != "done":
        parts.append(f'<p class="failed">{_text(section.status)}</p>')
    if section.error:
        parts.append(f"<pre>{_text(section.error)}</pre>")
    for png, caption in section.figures:
        data = base64.b64encode(png).decode()
        parts.append(
            f'<figure><img alt="{_text(caption)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{_text(caption)}</figcaption></figure>"
        )
    if section.comparisons:
        rows = "".join(_row(c) for c in section.comparisons)
        parts.append(
            "<table><tr><th>quantity</th><th>measured</th><th>published</th><th></th></tr>"
            f"{rows}</table>"
        )
    if section.table:
        parts.append(table_of(section.table))
    if section.reading:
        parts.append(f"<p><b>Against the paper:</b> {_text(section.reading)}</p>")
    if section.details:
        parts.append(f'<p class="small">{_text(section.details)}</p>')
    return "\n".join(parts)


def _row(c):
    return (
        f'<tr><td>{_text(c.quantity)}</td><td class="number">{_text(number(c.measured))}</td>'
        f'<td class="number">{_text(number(c.published))}</td><td>{_text(c.note)}</td></tr>'
    )
