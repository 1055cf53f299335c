"""The same experiments as a page of Markdown, with the figures in small files."""

import io
from collections.abc import Sequence

from rank_collapse.report.claims import FINDING, Answer
from rank_collapse.report.page import Section
from rank_collapse.report.wording import (
    JOINTLY,
    count_line,
    holds_text,
    note,
    number,
    span,
    standing,
)

COLORS = 64  # of a figure's palette: a third of its size, without a visible difference


def markdown(
    title: str,
    intro: str,
    sections: Sequence[Section],
    answers: Sequence[Answer] = (),
    untested: Sequence[str] = (),
) -> tuple[str, dict[str, bytes]]:
    """(the page, {path of a figure relative to it, in results: its PNG}).

    Args:
        sections: The experiments; their `details` say with what and how long they were made.
        answers: To the statements that they test.
        untested: Texts of those that they do not test.
    """
    figures: dict[str, bytes] = {}
    parts = [f"# {title}", intro]
    if answers or untested:
        table = answer_table(answers, untested)
        parts += ["## Statements", f"{count_line(answers)}. {JOINTLY}", table]
    for section in sections:
        parts += [f"## {section.title}", section.claim]
        if section.status != "done":
            parts.append(f"**{section.status}**")
        for index, (png, caption) in enumerate(section.figures):
            path = f"results/{section.name}_{index}.png"
            figures[path] = small(png)
            parts += [f"![{_line(caption)}]({path})", f"*{_line(caption)}*"]
        if section.comparisons:
            rows = [
                (c.quantity, number(c.measured), number(c.published), c.note)
                for c in section.comparisons
            ]
            table = _table(("quantity", "measured", "published", ""), rows)
            parts.append(_folded("Numbers, beside published ones", table))
        parts += [f"```\n{section.command}\n```", section.details]
    return "\n\n".join(part for part in parts if part) + "\n", figures


def answer_table(answers: Sequence[Answer], untested: Sequence[str] = ()) -> str:
    """Each statement with its answer and its rows below it, and what was not tested."""
    rows = []
    for a in answers:
        s = a.statement
        holds = f"; holds {holds_text(s)}" if s.claimed else ""
        answer = f"**{a.answer}**"
        rows.append((f"**{s.text}** {s.source}", f"{s.statistic}{holds}", standing(s), answer))
        for judged in a.rows:
            verdict = "" if a.answer == FINDING else judged.verdict
            row = judged.row
            rows.append((f"— {row.setting}", span(judged), note(row), verdict))
    rows += [(text, "", "", "not tested") for text in untested]
    return _table(("statement and settings", "statistic and joint interval", "", "answer"), rows)


def small(png: bytes) -> bytes:
    """A figure with a palette of few colours; what is no image stays as it is."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(png)).convert("RGB")
    except OSError:
        return png
    out = io.BytesIO()
    image.quantize(COLORS, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return min(out.getvalue(), png, key=len)


def _folded(title, text):
    """Unfolds on GitHub and on the site."""
    return f'<details markdown="1"><summary>{title}</summary>\n\n{text}\n\n</details>'


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_line(cell) for cell in line)} |" for line in lines)


def _line(value):
    return str(value).replace("|", r"\|").replace("\n", " ")
