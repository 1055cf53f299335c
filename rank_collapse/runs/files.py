"""Files of a run: written whole; every error is one line."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rank_collapse.printed import format_one_line

# {file: what helps where it is damaged}; others are made again.
_REMEDIES = {
    "config.json": "use another folder, this one is of no run or damaged",
    "trainer_state.json": "transformers writes it anew at the next checkpoint",
}


class RunError(Exception):
    """A run folder cannot be used; the message is one line for the user."""


@contextlib.contextmanager
def name_write_errors(path: str | os.PathLike) -> Iterator[None]:
    """Raise a RunError that names the path instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write to {path}: {error.strerror or error}") from error


def make_folder(path: str | os.PathLike) -> None:
    """Makes a folder and its parents.

    Raises:
        RunError: It cannot be made or written to.
    """
    with name_write_errors(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise RunError(f"cannot write to {path}: permission denied")


def write_atomically(path: str | os.PathLike, data: bytes) -> None:
    """Write a file under a temporary name in the same folder, then rename it.

    Args:
        path: The file.
        data: All of it.

    Raises:
        RunError: The file cannot be written.
    """
    with open_replacement(path) as file:
        file.write(data)


@contextlib.contextmanager
def open_replacement(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Open a file under a temporary name, which replaces another when it is written.

    Args:
        path: Of the file that is replaced.

    Raises:
        RunError: The file cannot be written; the other is as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    with name_write_errors(path):
        try:
            with open(temporary, "wb+") as file:
                yield file
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def damaged_file_error(path: str | os.PathLike, reason: Any) -> RunError:
    """Make the error of a file that is not as it was written, and what helps.

    Args:
        path: The file.
        reason: What reading it said.
    """
    remade = "delete this file, and the same command makes it again"
    remedy = _REMEDIES.get(Path(path).name, remade)
    return RunError(f"{path} cannot be read ({format_one_line(reason, 200)}); {remedy}")
