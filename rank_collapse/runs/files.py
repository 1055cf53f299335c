"""Files of a run: written whole, sealed with a checksum, and locked; every error is one line."""

import errno
import fcntl
import hashlib
import io
import json
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

# A zip file ends in two bytes, the length of a comment, and the comment: here the checksum.
_SEAL = b"sha256:"
_SEAL_LENGTH = len(_SEAL) + 64


class RunError(Exception):
    """A run folder cannot be used; the message is one line for the user."""


class InUseError(RunError):
    """Another process has the folder."""


class writing:
    """Turns an OSError into a RunError that names the path."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise RunError(f"cannot write to {self.path}: {reason}") from error
        return False


def make_folder(path: str | os.PathLike) -> None:
    """Makes a folder and its parents.

    Raises:
        RunError: It cannot be made or written to.
    """
    with writing(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise RunError(f"cannot write to {path}: permission denied")


def write_atomically(path: str | os.PathLike, data: bytes) -> None:
    """Writes a file under a temporary name in the same folder, then renames it.

    Raises:
        RunError: The file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        temporary.write_bytes(data)
        os.replace(temporary, path)


def delete(folder: str | os.PathLike, names: Iterable[str]) -> None:
    """Deletes files and folders of a folder, those that are there; of links the link alone.

    Raises:
        RunError: One cannot be deleted.
    """
    with writing(folder):
        for name in names:
            path = Path(folder) / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def lock(path: Path) -> TextIO:
    """An exclusive lock on a folder, held until the file is closed or the process ends.

    Where the file system has no locks there is none; sweeps do not rely on it (see `claims`).

    Raises:
        InUseError: Another process holds it.
        RunError: The folder cannot be written to.
    """
    with writing(path):
        file = open(path / ".lock", "a+")  # noqa: SIM115 (held open on purpose)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return file
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise InUseError(f"{path} is in use by another process ({holder})") from error
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {platform.node()}")
    file.flush()
    return file


def dump_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A compressed .npz file that ends in the SHA-256 of all before it, as the zip's comment."""
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    data = stream.getvalue()[:-2] + _SEAL_LENGTH.to_bytes(2, "little")
    return data + _SEAL + hashlib.sha256(data).hexdigest().encode()


def load_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, checked where `dump_arrays` wrote it.

    Raises:
        RunError: It cannot be read, or is not as it was written.
    """
    try:
        content = Path(path).read_bytes()
        data, seal = content[:-_SEAL_LENGTH], content[-_SEAL_LENGTH:]
        if (
            seal.startswith(_SEAL)
            and seal[len(_SEAL) :].decode() != hashlib.sha256(data).hexdigest()
        ):
            raise ValueError("its checksum is another")
        with np.load(io.BytesIO(content)) as saved:
            return dict(saved)
    except Exception as error:  # zipfile, zlib and numpy raise nearly any on damaged bytes
        raise _unreadable(path, error) from error


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RunError: It cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
    except (ValueError, OSError, RecursionError) as error:
        raise _unreadable(path, error) from error
    return content


def _unreadable(path, error):
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return RunError(f"{path} cannot be read ({reason}); use --overwrite")


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The fields in which two configs differ, as "name: old there, new here; ..."."""
    absent = "absent"
    parts = [
        f"{name} is {old.get(name, absent)!r} there, {new.get(name, absent)!r} here"
        for name in sorted(old.keys() | new.keys())
        if json.dumps(old.get(name, absent)) != json.dumps(new.get(name, absent))
    ]
    return "; ".join(parts)
