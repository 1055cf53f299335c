"""One self-contained HTML page of experiments: figures embedded, numbers, commands, verdicts."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """One line of a section's table.

    Attributes:
        quantity: What is compared, with its unit.
        measured: Our value.
        published: The paper's value or claim; None where it has none.
        agrees: Whether the two agree; None where that is not a question.
        note: Where the published value stands, or why the two differ.
    """

    quantity: str
    measured: Any
    published: Any = None
    agrees: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Section:
    """One experiment on the page.

    Attributes:
        name: Anchor.
        title: Heading.
        claim: What the paper says.
        command: How the numbers were made.
        status: "done", "failed" or "missing".
        figures: (PNG bytes, caption) pairs.
        comparisons: The table.
        reading: What the numbers say against the paper.
        details: Small print: the folder, the time.
        error: What a failed run printed.
    """

    name: str
    title: str
    claim: str
    command: str
    status: str = "done"
    figures: Sequence[tuple[bytes, str]] = field(default=())
    comparisons: Sequence[Comparison] = field(default=())
    reading: str = ""
    details: str = ""
    error: str = ""


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
.yes { color: #00664b } .no { color: #a33b00; font-weight: 600 }
.failed { color: #a33b00 } .small { color: #666; font-size: 13px }
"""


def render(title: str, intro: str, sections: Sequence[Section], footer: str = "") -> str:
    """The page as HTML; everything it needs is in it."""
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


def _text(value):
    return html.escape(str(value))


def _status(section):
    compared = [c.agrees for c in section.comparisons if c.agrees is not None]
    if section.status != "done":
        return f'<span class="failed">{_text(section.status)}</span>'
    return f"done, {sum(compared)} of {len(compared)} agree" if compared else "done"


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
            "<table><tr><th>quantity</th><th>measured</th><th>published</th><th>agrees</th>"
            f"<th></th></tr>{rows}</table>"
        )
    if section.reading:
        parts.append(f"<p><b>Against the paper:</b> {_text(section.reading)}</p>")
    if section.details:
        parts.append(f'<p class="small">{_text(section.details)}</p>')
    return "\n".join(parts)


def _row(c):
    agrees = {True: '<span class="yes">yes</span>', False: '<span class="no">no</span>', None: ""}
    return (
        f'<tr><td>{_text(c.quantity)}</td><td class="number">{_text(number(c.measured))}</td>'
        f'<td class="number">{_text(number(c.published))}</td><td>{agrees[c.agrees]}</td>'
        f"<td>{_text(c.note)}</td></tr>"
    )
