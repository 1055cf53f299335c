"""One self-contained HTML page of experiments: figures embedded, numbers, commands, verdicts."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rank_collapse.report.claims import VERDICTS, Claim, counted


@dataclass(frozen=True)
class Comparison:
    """Two numbers side by side, without a verdict: see `Claim` for those."""

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
    claims: Sequence[Claim] = field(default=())  # What of the paper was tested, and how it came out
    comparisons: Sequence[Comparison] = field(default=())  # Numbers beside published ones
    table: Sequence[Mapping[str, Any]] = field(default=())  # Rows of numbers by column
    reading: str = ""  # What the numbers say against the paper
    details: str = ""  # Small print: the folder, the time
    error: str = ""  # What a failed run printed


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
.supported { color: #00664b } .contradicted { color: #a33b00; font-weight: 600 }
.undecided { color: #666 }
.failed { color: #a33b00 } .small { color: #666; font-size: 13px }
"""


def render(
    title: str,
    intro: str,
    sections: Sequence[Section],
    footer: str = "",
    untested: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as HTML; everything it needs is in it.

    Args:
        untested: (section, statement) of the paper that no experiment of the page tests.
    """
    claims = [claim for s in sections for claim in s.claims]
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
        + (claim_table(claims, untested) if claims else "")
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


def count_line(claims: Sequence[Claim]) -> str:
    """ "12 claims tested: 9 supported, 2 contradicted, 1 undecided"."""
    counts = ", ".join(f"{n} {verdict}" for verdict, n in counted(claims).items())
    return f"{len(claims)} claim{'s' * (len(claims) != 1)} tested: {counts}"


def span(claim: Claim) -> str:
    """The statistic and its interval, "2.9 (2.8 to 3.1)"."""
    if claim.estimate is None:
        return "—"
    if claim.interval is None:
        return number(claim.estimate)
    low, high = map(number, claim.interval)
    return f"{number(claim.estimate)} ({low} to {high})"


def claim_line(claim: Claim) -> str:
    """ "supported    Section 3.1: ... 2.9 (2.8 to 3.1)"."""
    return f"{claim.verdict:12s} {claim.section}: {claim.statement} {span(claim)}"


def comparison_line(row: Comparison) -> str:
    """ "whole model: 0.98, beside 0.9; note"."""
    beside = "" if row.published is None else f", beside {number(row.published)}"
    return f"{row.quantity}: {number(row.measured)}{beside}" + (f"; {row.note}" * bool(row.note))


def claim_table(claims: Sequence[Claim], untested: Sequence[tuple[str, str]] = ()) -> str:
    """All claims with their intervals and verdicts, and what was not tested."""
    rows = "".join(
        f"<tr><td>{_text(c.section)}</td><td>{_text(c.statement)}</td>"
        f"<td>{_text(c.statistic)}; else {_text(c.null)}</td>"
        f'<td class="number">{_text(span(c))}</td><td>{c.seeds}</td>'
        f'<td class="{c.verdict}">{c.verdict}</td><td>{_text(c.why)}</td></tr>'
        for c in claims
    )
    rows += "".join(
        f"<tr><td>{_text(section)}</td><td>{_text(statement)}</td><td>not tested by these "
        "experiments</td><td></td><td></td><td></td><td></td></tr>"
        for section, statement in untested
    )
    return (
        f'<p class="verdicts"><b>{_text(count_line(claims))}.</b> The interval holds 95 % over '
        f"seeds; {VERDICTS[0]}: all of it is where the claim has it, {VERDICTS[1]}: none of it, "
        f"{VERDICTS[2]}: part of it, or too few seeds.</p>"
        "<table><tr><th>of the paper</th><th>claim</th><th>statistic</th>"
        "<th>mean and interval</th><th>seeds</th><th>verdict</th><th></th></tr>"
        f"{rows}</table>"
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
    return f"done; {count_line(section.claims)}" if section.claims else "done"


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
    if section.claims:
        parts.append(claim_table(section.claims))
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
