"""The experiments as a page of Markdown: a figure and a few sentences each, numbers as CSV."""

import io
from collections.abc import Sequence

from experiments.lab.folder import table_bytes
from experiments.verdicts.page import Section

COLORS = 64  # of a figure's palette: a third of its size, without a visible difference


def render_markdown(
    title: str, intro: str, sections: Sequence[Section]
) -> tuple[str, dict[str, bytes]]:
    """Renders a page of Markdown, with the files that it links to.

    Args:
        title: Of the page.
        intro: Its first paragraph.
        sections: The experiments; their `details` say where and how long they ran.

    Returns:
        The page, and {path relative to it: a figure's PNG, or numbers as CSV}.
    """
    files: dict[str, bytes] = {}
    paragraphs = [f"# {title}", intro]
    for section in sections:
        section_paragraphs, section_files = _render_section(section)
        paragraphs += section_paragraphs
        files |= section_files
    return "\n\n".join(filter(None, paragraphs)) + "\n", files


def shrink_png(png: bytes) -> bytes:
    """Reduces a figure to a palette of few colours; bytes that are no image stay as they are."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(png)).convert("RGB")
    except OSError:
        return png
    smaller = io.BytesIO()
    image.quantize(COLORS, dither=Image.Dither.NONE).save(smaller, "png", optimize=True)
    return min(smaller.getvalue(), png, key=len)


def _render_section(section):
    """Renders one experiment: the first figure, links to further ones and to the numbers.

    Returns:
        Its paragraphs, and {path: content} of its files.
    """
    files = {
        f"results/{section.name}_{index}.png": shrink_png(png)
        for index, (png, _) in enumerate(section.figures)
    }
    captions = [_escape(caption) for _, caption in section.figures]
    figures = list(zip(captions, files, strict=True))
    paragraphs = [f"## {section.title}"]
    if section.status != "done":
        paragraphs.append(f"**{section.status}**")
    for caption, path in figures[:1]:
        paragraphs += [f"![{section.title}]({path})", f"*{caption}*"]
    paragraphs.append(f"**The paper.** {section.claim}")
    if section.came_out:
        paragraphs.append(f"**Result.** {section.came_out}")
    if section.comparisons:
        path = f"results/{section.name}.csv"
        files[path] = table_bytes(vars(c) for c in section.comparisons)
        paragraphs.append(f"Numbers, beside published ones: [CSV]({path}).")
    if figures[1:]:
        links = "\n".join(f"- [{caption}]({path})" for caption, path in figures[1:])
        title = f"{len(figures) - 1} more figure{'s' * (len(figures) != 2)}"
        # Unfolds on GitHub and on the site.
        opening = f'<details markdown="1"><summary>{title}</summary>'
        paragraphs.append(f"{opening}\n\n{links}\n\n</details>")
    return [*paragraphs, f"```\n{section.command}\n```", section.details], files


def _escape(caption):
    return caption.replace("\n", " ").replace("[", r"\[").replace("]", r"\]")
