"""Prints text, and escapes text that others wrote: names in files, messages of other packages.

All output of the commands goes through `print_lines`, so no part of a file's name or content
reaches the terminal as a control sequence.
"""

import os
import re
import sys
import unicodedata
import warnings
from typing import Any, SupportsIndex

_NOT_ASCII_PRINTABLE = re.compile(r"[^ -~]")
_FORMULA = ("=", "+", "-", "@")  # a spreadsheet computes a cell that begins so


def format_count(count: SupportsIndex, noun: str) -> str:
    """Write a number with its noun: "1 layer", "2 layers".

    Args:
        count: The number.
        noun: The noun in the singular, whose plural ends with an s.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def escape_text(text: str) -> str:
    """Escape control characters as Python writes them; a terminal would obey them.

    Among them are those that change the direction of the text, and ends of lines.
    """
    return _NOT_ASCII_PRINTABLE.sub(_escape, text)


def _escape(match):
    """Return a control character or an end of a line as its escape; others as they are."""
    character = match[0]
    category = unicodedata.category(character)
    is_escaped = category[0] == "C" or category in ("Zl", "Zp")  # control, format; ends of lines
    return ascii(character)[1:-1] if is_escaped else character


def escape_cell(value: object) -> Any:
    """Escape text for a table: control characters, and characters with which a spreadsheet begins a
    formula.

    Args:
        value: Value of a cell; only text that is not a number changes.
    """
    if not isinstance(value, str):
        return value
    text = escape_text(value)
    if not text.lstrip().startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def unescape_cell(text: str) -> str:
    """Remove the apostrophe that `escape_cell` writes before the beginning of a formula."""
    is_escaped = text.startswith("'") and text[1:].lstrip().startswith(_FORMULA)
    return text[1:] if is_escaped else text


def print_lines(*lines: object, file: object = None, flush: bool = False) -> None:
    """Print lines, each escaped: the text of one argument stays in one line.

    Args:
        *lines: Printed as str(line).
        file: A text stream; standard output by default.
        flush: Whether it is to be seen at once.
    """
    text = "".join(f"{escape_text(str(line))}\n" for line in lines)
    print(text, end="", file=file, flush=flush)


def print_warning(message: object, category: type[Warning], *_: object) -> None:
    """Print a warning of Python in one line on standard error: a `warnings.showwarning`.

    Args:
        message: Message of the warning.
        category: Class of the warning; warnings for programmers are not printed.
        *_: File and line of the warning, which do not help the user of a command.
    """
    if not issubclass(category, DeprecationWarning | PendingDeprecationWarning | ImportWarning):
        print_lines(f"warning: {format_one_line(message, 300)}", file=sys.stderr)


def prepare_streams() -> None:
    """Prepares the standard streams of a command.

    For a character that the encoding of standard output lacks, "?" is printed. A standard stream
    that the caller closed is the null device, also for other libraries and for child processes:
    else the next file that this process opens would take its number, and get their messages.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(null, number)
        else:
            if number == null:
                os.set_inheritable(number, True)
    if null > 2:
        os.close(null)
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def show_warnings_in_lines() -> None:
    """Make this process print warnings by `print_warning`."""
    warnings.showwarning = print_warning


def quote_value(value: object, max_length: int = 100) -> str:
    """Return repr(value) in one line, cut to a number of characters."""
    text = re.sub(r"\s*\n\s*", " ", repr(value))
    if len(text) <= max_length:
        return text
    return f"{text[: max_length - 20]}… ({len(text)} characters)"


def format_one_line(error: object, max_length: int = 1000) -> str:
    """Return an error's message, or the name of its type, escaped, in one line and cut."""
    text = escape_text(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def split_numbers(name: str) -> list[tuple]:
    """Return a key that sorts block_2 before block_10."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", name)]
