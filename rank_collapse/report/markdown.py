"""The same experiments as a page of Markdown, with its figures as small files beside it."""

import io
from collections.abc import Sequence

from PIL import Image

from rank_collapse.report.claims import Claim
from rank_collapse.report.page import Section, count_line, number, span

COLORS = 64  # of a figure's palette: a third of its size, and no difference that one sees


def markdown(
    title: str,
    intro: str,
    sections: Sequence[Section],
    footer: str = "",
    untested: Sequence[tuple[str, str]] = (),
    folder: str = "results",
) -> tuple[str, dict[str, bytes]]:
    """(the page, {path of a figure relative to it: its PNG}).

    Args:
        sections: The experiments; their `details` say with what and how long they were made.
        untested: (section, statement) of the paper that none of them tests.
        folder: Where the figures go, beside the page.
    """
    claims = [claim for s in sections for claim in s.claims]
    figures: dict[str, bytes] = {}
    parts = [f"# {title}", intro]
    if claims:
        parts += ["## Claims", f"{count_line(claims)}.", claim_table(claims, untested)]
    for section in sections:
        parts += [f"## {section.title}", section.claim, f"```\n{section.command}\n```"]
        parts.append(section.details)
        if section.status != "done":
            parts.append(f"**{section.status}**")
        if section.reading:
            parts.append(section.reading)
        for index, (png, caption) in enumerate(section.figures):
            path = f"{folder}/{section.name}_{index}.png"
            figures[path] = small(png)
            parts += [f"![{_line(caption)}]({path})", f"*{_line(caption)}*"]
        if section.comparisons:
            rows = [(c.quantity, number(c.measured), number(c.published), c.note)
                    for c in section.comparisons]  # fmt: skip
            parts.append(_table(("quantity", "measured", "published", ""), rows))
    parts.append(footer)
    return "\n\n".join(part for part in parts if part) + "\n", figures


def claim_table(claims: Sequence[Claim], untested: Sequence[tuple[str, str]] = ()) -> str:
    """All claims, their statistics, intervals and verdicts, and what was not tested."""
    rows = [
        (c.section, c.statement, f"{c.statistic}; else {c.null}", span(c), c.seeds,
         f"**{c.verdict}**", c.why)
        for c in claims
    ]  # fmt: skip
    rows += [(where, what, "", "", "", "not tested", "") for where, what in untested]
    head = ("of the paper", "claim", "statistic", "mean and 95 % interval", "seeds", "verdict", "")
    return _table(head, rows)


def small(png: bytes) -> bytes:
    """A figure with a palette of few colours; what is no image stays as it is."""
    try:
        image = Image.open(io.BytesIO(png)).convert("RGB")
    except OSError:
        return png
    out = io.BytesIO()
    image.quantize(COLORS, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return min(out.getvalue(), png, key=len)


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_line(cell) for cell in line)} |" for line in lines)


def _line(value):
    return str(value).replace("|", r"\|").replace("\n", " ")
