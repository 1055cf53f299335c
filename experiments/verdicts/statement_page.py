"""The page of all experiments: their findings with a picture each, sections, and all statements."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.verdicts.claims import Answer, Row, count_answers
from experiments.verdicts.verdict_wording import (
    JOINTLY,
    count_line,
    count_text,
    criterion_text,
    estimate_text,
    refuting_text,
    row_note,
    setting_text,
    verdict_counts,
)
from rank_collapse import report
from rank_collapse.report.page import (
    embed_png,
    escape_html,
    format_number,
    render_inline,
    wrap_wide,
)

# How cards and statements are drawn, beside `rank_collapse.report.style`
STYLE = """
:root { --holds: #00664b; --part: #7d6200; --fails: #a33b00; --open: #5f5f5f }
@media (prefers-color-scheme: dark) {
  :root { --holds: #4fc79f; --part: #e0b93c; --fails: #ff9156; --open: #aaaaaa }
}
section > details.statement > summary { color: inherit }
.source { color: var(--soft) }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(19em, 1fr)); gap: 1.6em;
         margin: 1.4em 0 }
.card { text-decoration: none } .card img { width: 100%; background: #fff; border-radius: 4px }
.card p { margin: .4em 0 } .card .small::before { content: "→ " }
.card:hover .small { text-decoration: underline }
.answer { font-weight: 600 }
.settings { font-weight: 400 }
.holds, .within { color: var(--holds) }
.in-some-settings, .not-in-all-settings { color: var(--part) }
.does-not-hold, .outside, .failed { color: var(--fails) }
.open, .not-rejected, .undecided, .not-measured, .must-hold, .finding { color: var(--open) }
.counts { display: flex; flex-wrap: wrap; gap: .2em 1.4em; font-size: 17px; margin: .8em 0 }
.statement { border-bottom: 1px solid var(--line) }
.statement > summary { display: grid; gap: .2em 1.2em; padding: .7em 0; align-items: start;
                       grid-template-columns: 9.5em repeat(2, minmax(0, 1fr)); list-style: none }
.statement > summary::-webkit-details-marker { display: none }
.statement > summary .answer::before { content: "▸ " }
.statement[open] > summary .answer::before { content: "▾ " }
.statement > summary:hover { background: var(--fold) }
.statement > div { background: var(--fold); padding: .4em 1em; margin-bottom: .8em }
.statement p { margin: .5em 0 }
@media (min-width: 800px) { .card.broad { grid-column: span 2 } }
@media (max-width: 700px) {
  .statement > summary { grid-template-columns: minmax(0, 1fr) }
  .statement > div { padding: .4em .6em }
}
@media print {
  :root { --holds: #00664b; --part: #7d6200; --fails: #a33b00; --open: #5f5f5f }
  .statement > summary { break-inside: avoid }
}
"""
COUNTS_TITLE = "settings within the range / outside it / undecided"


@dataclass(frozen=True)
class Comparison:
    """Two numbers side by side, without a verdict; `Answer` has verdicts."""

    quantity: str  # What is compared, with its unit
    measured: float | str  # Our value
    published: float | str | None = None  # The paper's value; None where it has none
    note: str = ""  # Where the published value stands, or why the two differ
    source: str = "published"  # What `published` is: a law, a theory, or another computation


@dataclass(frozen=True)
class Section:
    """One experiment on the page."""

    name: str  # Anchor
    title: str  # Heading
    claim: str  # What the paper says; "" where none does
    command: str  # How the numbers were made
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
) -> str:
    """Renders the page of statements as HTML that needs no other files.

    Sections with a picture on the first screen come first, so that the menu has the pictures'
    order.

    Args:
        title: Title of the page.
        intro: First paragraph of the page.
        sections: The experiments.
        footer: Last line of the page.
        answers: Answers to the statements that the sections test.
    """
    sections = sorted(sections, key=lambda section: not (section.finding and section.picture))
    parts = [_report_section(section, answers) for section in sections]
    if answers:
        body = render_board(answers)
        parts.append(report.Section("statements", "All statements", "", body=body))
    return report.render(title, intro, parts, footer, opening=_render_cards(sections), style=STYLE)


def comparison_line(row: Comparison) -> str:
    """Writes "full model: 0.98 (published 0.9); note"."""
    line = f"{row.quantity}: {format_number(row.measured)}"
    if row.published is not None:
        line += f" ({_published_with_source(row)})"
    return f"{line}; {row.note}" if row.note else line


def _published_with_source(row):
    """Writes "published 0.9" and "published 1 of 8", but "published: falls"."""
    text = format_number(row.published)
    is_number = not isinstance(row.published, str) or text[:1].isdigit()
    return f"{row.source} {text}" if is_number else f"{row.source}: {text}"


def _report_section(section, answers):
    """Makes the section of one experiment: its finding, the paper's claim and the result on top.

    Args:
        section: Section of the experiment.
        answers: Answers to all statements.
    """
    paragraphs = {
        "Here: ": section.finding,
        "The paper: ": section.claim,
        "Reference run: ": section.came_out,
    }
    body = "".join(
        f"<p><b>{label}</b>{render_inline(text)}</p>" for label, text in paragraphs.items() if text
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
        ' <span class="failed">failed</span>' if section.error else "",
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
        is_named = c.published is not None and c.source != "published"
        text = _published_with_source(c) if is_named else format_number(c.published)
        published = f'<td class="number">{escape_html(text)}</td>' * has_published
        table += f'<tr><td>{escape_html(c.quantity)}</td><td class="number">'
        table += f"{escape_html(format_number(c.measured))}</td>{published}"
        table += f"<td>{escape_html(c.note)}</td></tr>"
    title = "Numbers" + ", with published ones" * has_published
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


def render_board(answers: Sequence[Answer]) -> str:
    """Renders all statements, folded under their counts.

    Args:
        answers: Answers of the statements.
    """
    counts = {answer: count for answer, count in count_answers(answers).items() if count}
    count_html = "".join(
        f'<span class="answer {_css_class(name)}">{name}: {count}</span>'
        for name, count in counts.items()
    )
    statements = "".join(map(render_statement, answers))
    return (
        f'<p class="counts">{count_html}</p>'
        f"<p>{escape_html(count_line(answers))}</p>"
        f"<details><summary>How they are judged</summary><p>{escape_html(JOINTLY)}</p></details>"
        f"<details><summary>All statements</summary>{statements}</details>"
    )


def render_statement(answer: Answer) -> str:
    """Renders one statement: its answer, text and quantity; settings with numbers unfold."""
    statement, rows = answer.statement, ""
    for j in answer.rows:
        verdict = j.verdict if statement.claimed else ""
        setting = escape_html(setting_text(j.row, statement))
        rows += f'<tr><td>{setting}</td><td class="number">'
        rows += f"{escape_html(estimate_text(j))}</td><td>{escape_html(row_note(j.row))}</td>"
        rows += f'<td class="{_css_class(j.verdict)}">{verdict}</td></tr>'
    quantity = "; ".join(filter(None, [statement.statistic, criterion_text(statement)]))
    counts = ""
    if statement.claimed:
        quantity += f"; refuted by: {refuting_text(statement)}"
        counts = verdict_counts([j.verdict for j in answer.rows])
    return (
        f'<details class="statement"><summary>'
        f'<span class="answer {_css_class(answer.answer)}">{escape_html(answer.in_words)} '
        f'<span class="settings" title="{COUNTS_TITLE}">{counts}</span></span>'
        f"<span>{escape_html(statement.text)} "
        f'<span class="source">{escape_html(statement.source)}</span></span>'
        f'<span class="small">{escape_html(quantity)}</span></summary>'
        f"{wrap_wide(f'<table>{rows}</table>')}</details>"
    )


def _css_class(words):
    return escape_html(words).replace(" ", "-")
