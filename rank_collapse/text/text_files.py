"""Files of text: UTF-8, tables, JSON. Each error is one line that names the file."""

import json
import os
from typing import Any

from rank_collapse.regular import read_regular

MAX_JSON = 100_000_000  # bytes: three times an index of 200,000 tensors or a large vocabulary


def read_utf8(path: str | os.PathLike, *, max_bytes: int | None = None) -> str:
    """Read a UTF-8 file, its line ends as "\\n", without a byte order mark.

    Args:
        path: Path of the file.
        max_bytes: Largest size of the file; None for any.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A folder, a pipe or a device, larger, not readable, or not UTF-8.
    """
    try:
        content = read_regular(path, max_bytes).decode("utf-8-sig")
        return content.replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start} is not a character") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def read_table(path: str | os.PathLike) -> dict[str, list[str]]:
    """Read the columns of a tab-separated file, by the names in its first line.

    Quotation marks are ordinary characters, as in GLUE's files. Empty lines are left out, cells
    missing at the end of a line are "".
    """
    header, *lines = read_utf8(path).split("\n")
    rows = [line.split("\t") for line in lines if line]

    def read_column(place):
        return [row[place] if place < len(row) else "" for row in rows]

    return {name: read_column(place) for place, name in enumerate(header.split("\t"))}


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not readable, of more than 100 MB, or not a JSON object.
    """
    text = read_utf8(path, max_bytes=MAX_JSON)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also of a number of many digits
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content
