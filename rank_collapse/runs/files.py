"""Files of a run: written whole, and locked; every error is one line.

This module writes everything that goes into a user's folder: under a temporary name that nobody can
foresee, or in place (`open_log`), and never through a link.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rank_collapse.printed import format_one_line
from rank_collapse.regular import open_in_place, open_regular, read_regular

# {file: what helps where it is damaged}; others are made again.
_REMEDIES = {
    "config.json": "use another folder: this one is damaged, or it is not a run folder",
    "sweep.json": "use another folder, this one is damaged",
    "trainer_state.json": "transformers writes it anew at the next checkpoint",
}
_TEMPORARY = ".rank_collapse-"  # files that are being written; a killed process leaves them
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class RunError(Exception):
    """A run folder cannot be used; the message is one line for the user."""


class InUseError(RunError):
    """Another process has the folder."""


@contextlib.contextmanager
def name_write_errors(path: str | os.PathLike) -> Iterator[None]:
    """Raise a RunError that names the path instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write to {path}: {error.strerror or error}") from error


def make_folder(path: str | os.PathLike) -> None:
    """Make a folder and its parents; the folder that the user names may be a link to one.

    Raises:
        RunError: The folder cannot be made or written to.
    """
    with name_write_errors(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    check_writable(path)


def check_writable(path: str | os.PathLike) -> None:
    """Checks that files can be written into a folder.

    Raises:
        RunError: They cannot.
    """
    if not os.access(path, os.W_OK | os.X_OK):
        raise RunError(f"cannot write to {path}: permission denied")


def make_subfolder(path: str | os.PathLike) -> None:
    """Make a folder inside the folder that the user names; it must not be a link.

    Raises:
        RunError: It is a link, which may lead out of the folder; or it cannot be made.
    """
    check_no_links(Path(path).parent, [Path(path).name])
    make_folder(path)


def check_no_links(folder: str | os.PathLike, names: Iterable[str]) -> None:
    """Check that some folders of a folder, and all folders inside them, are not links.

    Args:
        folder: Folder that the user names.
        names: Names of folders in it, which need not exist.

    Raises:
        RunError: One is a link, so files would be written outside of the folder.
    """
    for name in names:
        path = Path(folder) / name
        inner = [Path(root) / d for root, folders, _ in os.walk(path) for d in folders]
        for link in filter(Path.is_symlink, [path, *inner]):
            raise RunError(f"cannot write to {link}: it is a link, to {os.readlink(link)}")


def write_atomically(path: str | os.PathLike, data: bytes) -> None:
    """Write a file under a temporary name in the same folder, then rename it.

    Args:
        path: The file.
        data: Bytes of the whole file.

    Raises:
        RunError: The file cannot be written.
    """
    with open_replacement(path) as file:
        file.write(data)


@contextlib.contextmanager
def open_replacement(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Open a file under a temporary name, which replaces another when it is written.

    Args:
        path: Path of the file that is replaced; of a link the link.

    Raises:
        RunError: The file cannot be written; the other is as it was.
    """
    path = Path(path)
    temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}.tmp")
    with name_write_errors(path):
        try:
            # A new file, so that no link is followed; with the permissions of any other.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, 0o666), "wb+") as file:
                yield file
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def delete_temporary(folder: str | os.PathLike) -> None:
    """Delete what processes that were killed have left of `open_replacement`; the caller locks.

    Args:
        folder: The folder, with all folders inside it.
    """
    with name_write_errors(folder):
        for path in Path(folder).rglob(f"{_TEMPORARY}*.tmp"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def open_log(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Open a file to append lines to it; made if absent.

    If the file has a second name (a hard link), only this name gets the lines.

    Args:
        path: Path of the file.

    Raises:
        RunError: It cannot be written, or is a link, a folder, a pipe or a device.
    """
    with name_write_errors(path):
        file = open_in_place(path, os.O_APPEND)
        if os.fstat(file.fileno()).st_nlink > 1:
            with file:
                file.seek(0)
                write_atomically(path, file.read())
            file = open_in_place(path, os.O_APPEND)
        with file:
            yield file


def delete_files(folder: str | os.PathLike, names: Iterable[str]) -> None:
    """Delete those files and folders of a folder that exist; of a link, delete only the link.

    Args:
        folder: Folder that holds them.
        names: Names of the files and folders.

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


def lock_folder(path: Path) -> BinaryIO:
    """Lock a folder until the returned file is closed or the process ends.

    If the file system has no locks, the folder is not locked.

    Args:
        path: The folder.

    Raises:
        InUseError: Another process holds the lock.
        RunError: The folder cannot be written to.
    """
    with name_write_errors(path / ".lock"):
        file = open_in_place(path / ".lock")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return file
        holder = file.read(200).decode(errors="replace").strip() or "unknown"
        file.close()
        raise InUseError(f"{path} is in use by another process ({holder})") from error
    if os.fstat(file.fileno()).st_nlink == 1:  # else it may be any file of the user
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {platform.node()}".encode())
        file.flush()
    return file


def write_arrays(
    path: str | os.PathLike, arrays: Mapping[str, np.ndarray], *, compressed: bool = True
) -> None:
    """Write an .npz file, which has a checksum of each array.

    Args:
        path: The file.
        arrays: Arrays by name.
        compressed: Whether they are compressed.

    Raises:
        RunError: The file cannot be written.
    """
    writable = {name: _as_writable(array) for name, array in arrays.items()}
    with open_replacement(path) as file:
        (np.savez_compressed if compressed else np.savez)(file, **writable)


def _as_writable(array):
    """Convert an array of a dtype that NumPy does not have, such as bfloat16, to its bytes.

    NumPy writes float8_e5m2 under a name that it cannot read.
    """
    array = np.asarray(array)
    is_foreign = array.dtype.isbuiltin == 2
    return array.view(f"V{array.dtype.itemsize}") if is_foreign else array


def load_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Load the arrays of an .npz file, all of them, which checks their checksums.

    Raises:
        RunError: The file cannot be read, or differs from what was written.
    """
    try:
        with open_regular(path) as file, np.load(file) as saved:
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
        RunError: The file cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(read_regular(path))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
    except (ValueError, OSError, RecursionError) as error:
        raise damaged_file_error(path, error) from error
    return content


def damaged_file_error(path: str | os.PathLike, reason: object) -> RunError:
    """Make the error of a damaged file, with advice.

    Args:
        path: The file.
        reason: Message of the error from reading it.
    """
    remade = "delete this file, and the same command makes it again"
    remedy = _REMEDIES.get(Path(path).name, remade)
    return RunError(f"{path} cannot be read ({format_one_line(reason, 200)}); {remedy}")


def describe_difference(old: Mapping[str, object], new: Mapping[str, object]) -> str:
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
