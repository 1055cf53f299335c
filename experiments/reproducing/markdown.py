"""The experiments as a page of Markdown: a figure and a few sentences each, numbers as CSV."""

import io
from collections.abc import Sequence

from experiments.reproducing.filling import write_minus, write_numbers
from experiments.verdicts import STATEMENTS, describe_measured, setting_text
from experiments.verdicts.statement_page import Section
from rank_collapse.printed import format_count
from rank_collapse.report.intervals import LEVEL, describe_level

TERMS_LINK = "[Terms](#terms) that this section uses are explained at the top of the page."
STATEMENTS_INTRO = (
    "The first table has the number that we measured in each setting. The second table says what "
    "each statement claims, and which number we measure for it. The page on "
    "[statements](statements.md) says which statements hold."
)
COLORS = 64  # of a figure's palette: a third of its size, without a visible difference


def render_markdown(
    title: str, intro: str, terms: str, sections: Sequence[Section]
) -> tuple[str, dict[str, bytes]]:
    """Renders a page of Markdown, with the files that it links to.

    Args:
        title: Title of the page.
        intro: First paragraph of the page.
        terms: Explanation of the terms, a section to which each experiment links.
        sections: The experiments; their `details` say where and how long they ran.

    Returns:
        The page, and {path relative to it: a figure's PNG, or numbers as CSV}.
    """
    files: dict[str, bytes] = {}
    paragraphs = [f"# {title}", intro, "## Terms", terms]
    for section in sections:
        section_paragraphs, section_files = _render_section(section)
        paragraphs += section_paragraphs
        files |= section_files
    return "\n\n".join(filter(None, paragraphs)) + "\n", files


def shrink_png(png: bytes) -> bytes:
    """Reduces a figure to a palette of few colours; bytes that are not an image do not change."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(png)).convert("RGB")
    except OSError:
        return png
    smaller = io.BytesIO()
    image.quantize(COLORS).save(smaller, "png", optimize=True)
    return min(smaller.getvalue(), png, key=len)


def _render_section(section):
    """Renders one experiment: the first figure, the result, further figures, numbers.

    Returns:
        Its paragraphs, and {path: content} of its files.
    """
    files = {
        f"results/{section.name}_{index}.png": shrink_png(png)
        for index, (png, _) in enumerate(section.figures)
    }
    captions = [_escape(caption) for _, caption in section.figures]
    figures = list(zip(captions, files, strict=True))
    paragraphs = [f"## {section.title}", TERMS_LINK]
    if section.error:
        paragraphs.append("**failed**")
    for caption, path in figures[:1]:
        paragraphs += [f"![{section.title}]({path})", f"*{caption}*"]
    paragraphs.append(f"**The paper.** {section.claim}")
    if section.came_out:
        paragraphs.append(f"**Result.** {section.came_out}")
    path = f"results/{section.name}.csv"
    files[path] = write_numbers(section.comparisons, section.claims)
    paragraphs.append(
        f"A [CSV file]({path}) has all numbers of this experiment, and published numbers if there "
        "are any."
    )
    if section.claims:
        count = format_count(len(section.claims), "measurement")
        title = f"Statements about this experiment: {count}"
        paragraphs.append(_fold(title, _list_claims(section.claims)))
    if figures[1:]:
        links = "\n".join(f"- [{caption}]({path})" for caption, path in figures[1:])
        title = format_count(len(figures) - 1, "more figure")
        paragraphs.append(_fold(title, links))
    return [*paragraphs, f"```\n{section.command}\n```", section.details], files


def _fold(title, content):
    """Hides Markdown until a reader asks for it, on GitHub and on the site."""
    opening = f'<details markdown="1"><summary>{title}</summary>'
    return f"{opening}\n\n{content}\n\n</details>"


def _list_claims(claims):
    """Renders rows of statements as a table, each with its own 95 % interval, and a table that
    explains the statements."""
    lines = [
        STATEMENTS_INTRO,
        "",
        f"| statement | setting | measured | {describe_level(LEVEL)} interval | draws |",
        "|---|---|---|---|---|",
    ]
    for row in claims:
        interval = row.interval(LEVEL)
        ends = "{:.4g} to {:.4g}".format(*interval) if interval.is_finite else ""
        measured = "" if row.estimate is None else f"{row.estimate:.4g}"
        setting = setting_text(row, STATEMENTS[row.key])
        lines.append(_write_row(row.key, setting, measured, ends, str(row.draws)))
    return write_minus("\n".join(lines)) + "\n\n" + _explain_statements(claims)


def _explain_statements(claims):
    """Renders a table of the statements of rows: what each claims, and what its rows measure.

    Args:
        claims: Rows of the statements.
    """
    lines = ["| statement | claim | measured |", "|---|---|---|"]
    for key, statement in {row.key: STATEMENTS[row.key] for row in claims}.items():
        claim = f"{statement.text} ({statement.source})"
        lines.append(_write_row(key, _escape(claim), _escape(describe_measured(statement))))
    return write_minus("\n".join(lines))


def _write_row(*cells):
    """Writes a row of a table of Markdown."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _escape(caption):
    return caption.replace("\n", " ").replace("[", r"\[").replace("]", r"\]")
