"""Files of text: UTF-8, tables, JSON. Each error is one line that names the file."""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

# An index of 200,000 tensors, and the largest published vocabularies, have a third of it.
MOST_JSON = 100_000_000


def read_utf8(path: str | os.PathLike) -> str:
    """The content of a UTF-8 file, its line ends as "\\n", without a byte order mark.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A folder, a pipe or a device, not readable, or not UTF-8.
    """
    try:
        # Opening a pipe would wait for its writer, and reading a device may never end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{path} cannot be read: it is not a regular file")
        return Path(path).read_text("utf-8-sig")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start} of it") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def read_table(path: str | os.PathLike) -> dict[str, list[str]]:
    """The columns of a tab-separated file, by the names in its first line.

    Quotation marks are ordinary characters, as in GLUE's files. Empty lines are left out, cells
    missing at the end of a line are "".
    """
    header, *lines = read_utf8(path).split("\n")
    rows = [line.split("\t") for line in lines if line]
    return {
        name: [row[place] if place < len(row) else "" for row in rows]
        for place, name in enumerate(header.split("\t"))
    }


def check_size(path: str | os.PathLike) -> None:
    """Refuses a JSON file of more than 100 MB.

    Raises:
        ValueError: It names the size.
    """
    with contextlib.suppress(OSError):  # which what reads it names
        if (size := os.path.getsize(path)) > MOST_JSON:
            raise ValueError(f"{path} is of {size} bytes: no JSON file of a model has {MOST_JSON}")


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not readable, of more than 100 MB, or not a JSON object.
    """
    check_size(path)
    text = read_utf8(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also of a number of many digits
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content
