"""What others wrote, as it is printed: names in files, folders, messages of other packages."""

import re
import unicodedata
from typing import Any

_NOT_ASCII_PRINTABLE = re.compile(r"[^ -~]")


def escape_text(text: str) -> str:
    """Escape control characters as Python writes them; a terminal would obey them."""
    return _NOT_ASCII_PRINTABLE.sub(_escape, text)


def _escape(match):
    character = match[0]
    return ascii(character)[1:-1] if unicodedata.category(character)[0] == "C" else character


def quote_value(value: Any, max_length: int = 100) -> str:
    """Return repr(value), cut to a number of characters."""
    text = repr(value)
    if len(text) <= max_length:
        return text
    return f"{text[: max_length - 20]}… ({len(text)} characters)"


def format_one_line(error: Any, max_length: int = 1000) -> str:
    """Return an error's message, or the name of its type, escaped, in one line and cut."""
    text = escape_text(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def split_numbers(name: str) -> list[tuple]:
    """Return a key that sorts block_2 before block_10."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name)]
