"""The same experiments as a page of Markdown: a figure and a few sentences each, numbers as CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.verdicts.page import Section

COLORS = 64  # of a figure's palette: a third of its size, without a visible difference


def markdown(title: str, intro: str, sections: Sequence[Section]) -> tuple[str, dict[str, bytes]]:
    """(the page, {path of a file relative to it, in results: a figure's PNG or numbers as CSV}).

    Args:
        sections: The experiments; their `details` say with what and how long they were made.
    """
    files: dict[str, bytes] = {}
    parts = [f"# {title}", intro]
    for section in sections:
        text, own = _section(section)
        parts += text
        files |= own
    return "\n\n".join(part for part in parts if part) + "\n", files


def table_of(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows of the same columns as CSV; numbers in full, nothing where there is none."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


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


def _section(section):
    """(paragraphs, {path: content}) of one experiment: the first figure is on the page, further
    ones and the numbers are links."""
    paths = [f"results/{section.name}_{i}.png" for i in range(len(section.figures))]
    captions = [_line(caption) for _, caption in section.figures]
    files = {path: small(png) for path, (png, _) in zip(paths, section.figures, strict=True)}
    parts = [f"## {section.title}"]
    if section.status != "done":
        parts.append(f"**{section.status}**")
    if paths:
        parts += [f"![{section.title}]({paths[0]})", f"*{captions[0]}*"]
    parts.append(f"**The paper.** {section.claim}")
    if section.came_out:
        parts.append(f"**Result.** {section.came_out}")
    if section.comparisons:
        numbers = f"results/{section.name}.csv"
        files[numbers] = table_of([vars(c) for c in section.comparisons])
        parts.append(f"Numbers, beside published ones: [CSV]({numbers}).")
    if further := list(zip(captions, paths, strict=True))[1:]:
        links = "\n".join(f"- [{caption}]({path})" for caption, path in further)
        count = f"{len(further)} more figure{'s' * (len(further) != 1)}"
        parts.append(_folded(count, links))
    return [*parts, f"```\n{section.command}\n```", section.details], files


def _folded(title, text):
    """Unfolds on GitHub and on the site."""
    return f'<details markdown="1"><summary>{title}</summary>\n\n{text}\n\n</details>'


def _line(value):
    return str(value).replace("\n", " ").replace("[", r"\[").replace("]", r"\]")
