"""Files of text: UTF-8, tables, JSON. Each error is one line that names the file."""

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 100_000_000  # of JSON: three times an index of 200,000 tensors or a large vocabulary


def read_utf8(path: str | os.PathLike) -> str:
    """Read a UTF-8 file, its line ends as "\\n", without a byte order mark.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A folder, a pipe or a device, not readable, or not UTF-8.
    """
    try:
        mode = os.stat(path).st_mode  # a pipe waits for its writer, and a device may never end
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"{path} cannot be read: it is not a regular file")
        return Path(path).read_text("utf-8-sig")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start} of it") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def read_table(path: str | os.PathLike) -> dict[str, list[str]]:
    """Read the columns of a tab-separated file, by the names in its first line.

    Quotation marks are ordinary characters, as in GLUE's files. Empty lines are left out, cells
    missing at the end of a line are "".
    """
    header, *lines = read_utf8(path).split("\n")
    rows = [line.split("\t") for line in lines if line]
    return {
        name: [row[place] if place < len(row) else "" for row in rows]
        for place, name in enumerate(header.split("\t"))
    }


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not readable, of more than 100 MB, or not a JSON object.
    """
    if os.path.isfile(path) and (size := os.path.getsize(path)) > MOST_BYTES:
        raise ValueError(f"{path} is of {size} bytes: no JSON file of a model has {MOST_BYTES}")
    text = read_utf8(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also of a number of many digits
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content
