"""The statements of papers that are tested here, and what was found that no paper states.

docs/statements.md is their list, which is read here. Each has one statistic and the range in which
it holds, fixed before the runs; an experiment's `claims` gives its rows, one a setting. Answers are
written there by `experiments.reproduce --markdown`.
"""

import contextlib
import math
import re
from collections.abc import Mapping
from pathlib import Path

from rank_collapse.report.claims import FINDING, NO_CASE, Answer, Range, Statement

PAGE = Path(__file__).parents[2] / "docs" / "statements.md"
ENTRY = re.compile(
    r"^## (?P<key>.+)\n(?P<source>.+?): (?P<text>.+)\n\n- Statistic: (?P<statistic>.+)\.\n"
    r"(?:- Holds: (?P<range>.+)\. Fails: (?P<fails>.+)\.\n)?- Rows: (?P<rows>.+)\.\n"
    r"(?:- Before: .+\n)?- Now: (?P<now>.+)$",
    re.MULTILINE,
)


def statements_of(text: str) -> dict[str, Statement]:
    """The statements of a page, by key.

    Raises:
        ValueError: An entry that is not written as the others, or a second one of its name.
    """
    found = {}
    for part in re.split("^## ", text, flags=re.MULTILINE)[1:]:
        entry = ENTRY.fullmatch(f"## {part.strip()}")
        if entry is None or entry["key"] in found:
            raise ValueError(f"docs/statements.md: the entry {part.partition(chr(10))[0]!r}")
        claimed = range_of(entry["range"])
        found[entry["key"]] = Statement(
            entry["source"], entry["text"], entry["statistic"], claimed, entry["fails"] or "",
            always=claimed == NO_CASE, experiments=entry["rows"].split(", "),
        )  # fmt: skip
    return found


def range_of(text: str | None) -> Range | None:
    """The range that `range_text` writes so.

    Raises:
        ValueError: It writes none so.
    """
    with contextlib.suppress(ValueError):  # of float
        match text and text.split():
            case None:
                return None
            case ["no", "case"]:
                return NO_CASE
            case ["above", low]:
                return float(low), math.inf
            case ["below", high]:
                return -math.inf, float(high)
            case [low, "to", high]:
                return float(low), float(high)
    raise ValueError(f"docs/statements.md: the range {text!r}")


def now_text(answer: Answer, preset: str) -> str:
    """What an answer is, where, and from which sizes."""
    if answer.answer == FINDING:
        rows = f"{len(answer.rows)} row{'s' * (len(answer.rows) != 1)}"
        return f"{rows} in [the results](results.md) (sizes “{preset}”)."
    return f"**{answer.answer}** (sizes “{preset}”): {answer.where}."


def answered(text: str) -> dict[str, str]:
    """{key: its answer} of a page."""
    return {entry["key"]: entry["now"] for entry in ENTRY.finditer(text)}


def page(now: Mapping[str, str]) -> str:
    """The list with these answers, {key: `now_text`}; other statements were not run."""

    def with_answer(entry):
        return entry[0].removesuffix(entry["now"]) + now.get(entry["key"], "not run.")

    return ENTRY.sub(with_answer, PAGE.read_text("utf-8"))


STATEMENTS = statements_of(PAGE.read_text("utf-8"))
