"""Files of a run folder: locked, arrays with checksums, JSON; every error is one line."""

import errno
import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from rank_collapse.runs.files import (
    RunError,
    damaged_file_error,
    name_write_errors,
    open_replacement,
)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class InUseError(RunError):
    """Another process has the folder."""


def delete_files(folder: str | os.PathLike, names: Iterable[str]) -> None:
    """Delete files and folders of a folder, those that are there; of links the link alone.

    Args:
        folder: It.
        names: Of the files and folders.

    Raises:
        RunError: One cannot be deleted.
    """
    with name_write_errors(folder):
        for name in names:
            path = Path(folder) / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def lock_folder(path: Path) -> TextIO:
    """Lock a folder until the returned file is closed or the process ends.

    Where the file system has no locks there is none.

    Args:
        path: The folder.

    Raises:
        InUseError: Another process holds the lock.
        RunError: The folder cannot be written to.
    """
    with name_write_errors(path / ".lock"):  # not through a link, whose target it would empty
        number = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    file = os.fdopen(number, "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return file
        holder = file.read().strip() or "unknown"
        file.close()
        raise InUseError(f"{path} is in use by another process ({holder})") from error
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {platform.node()}")
    file.flush()
    return file


def write_arrays(
    path: str | os.PathLike, arrays: Mapping[str, np.ndarray], *, compressed: bool = True
) -> None:
    """Write an .npz file, which has a checksum of each array.

    Args:
        path: The file.
        arrays: By name.
        compressed: Whether they are compressed.

    Raises:
        RunError: The file cannot be written.
    """
    with open_replacement(path) as file:
        (np.savez_compressed if compressed else np.savez)(file, **arrays)


def load_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Load the arrays of an .npz file, all of them, which checks their checksums.

    Raises:
        RunError: It cannot be read, or is not as it was written.
    """
    try:
        with open(path, "rb") as file, np.load(file) as saved:
            # Of one entry of the list, which has no checksum, others may be taken for a comment.
            if any(len(info.comment + info.extra) > 28 for info in saved.zip.infolist()):
                raise ValueError("its list of arrays is damaged")
            arrays = dict(saved)
            if any(np.asarray(array).dtype.kind not in "biufcV" for array in arrays.values()):
                raise ValueError("it holds more than arrays of numbers")  # V of bfloat16
            return arrays
    except Exception as error:  # zipfile, zlib and numpy raise nearly any on damaged bytes
        raise damaged_file_error(path, error) from error


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        RunError: It cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
    except (ValueError, OSError, RecursionError) as error:
        raise damaged_file_error(path, error) from error
    return content


def describe_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe the fields in which two configs differ: "name: old there, new here; ...".

    Args:
        old, new: Values by name, as JSON stores them.
    """
    absent = "absent"
    parts = [
        f"{name} is {old.get(name, absent)!r} there, {new.get(name, absent)!r} here"
        for name in sorted(old.keys() | new.keys())
        if json.dumps(old.get(name, absent)) != json.dumps(new.get(name, absent))
    ]
    return "; ".join(parts)
