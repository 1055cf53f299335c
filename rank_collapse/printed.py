"""What others wrote, as it is printed: names in files, folders, messages of other packages."""

import re
import unicodedata
from typing import Any

_NOT_ASCII_PRINTABLE = re.compile(r"[^ -~]")


def escape_text(text: str) -> str:
    """The text with control characters as Python writes them; a terminal would obey them."""
    return _NOT_ASCII_PRINTABLE.sub(_escape, text)


def _escape(found):
    character = found[0]
    return ascii(character)[1:-1] if unicodedata.category(character)[0] == "C" else character


def quote_value(value: Any, most: int = 100) -> str:
    """repr(value), cut to a number of characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 20]}… ({len(text)} characters)"


def format_one_line(error: Any, most: int = 1000) -> str:
    """An error's message, or its type's name where it has none, escaped, in one line and cut."""
    text = escape_text(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= most else f"{text[: most - 1]}…"
