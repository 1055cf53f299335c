"""Opens only regular files, since somebody else may have filled the folder.

A pipe waits for its writer, a device may never end, and a link may lead to any file of the user.
"""

import errno
import os
import stat
from typing import BinaryIO


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file, or a link to one, to read its bytes.

    Raises:
        OSError: It cannot be read, or is a folder, a pipe or a device; never waits for one.
    """
    return os.fdopen(_open_checked(path, os.O_RDONLY), "rb")


def open_in_place(path: str | os.PathLike, flags: int = 0) -> BinaryIO:
    """Open a regular file to read and write it where it is, made if absent; no link is followed.

    Args:
        path: Path of the file.
        flags: Further ones of `os.open`, such as `os.O_APPEND`.

    Raises:
        OSError: It cannot be written, or is a link, a folder, a pipe or a device.
    """
    try:
        number = _open_checked(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a link", str(path)) from None
    return os.fdopen(number, "ab+" if flags & os.O_APPEND else "rb+")


def read_regular(path: str | os.PathLike, max_bytes: int | None = None) -> bytes:
    """Read the bytes of a regular file, or of a link to one.

    Args:
        path: Path of the file.
        max_bytes: Largest size of the file; None for any.

    Raises:
        OSError: In the same cases as `open_regular`; or it is larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than {max_bytes}", str(path))
        return file.read()


def _open_checked(path, flags):
    """Open a regular file, without waiting for a file of another kind; returns its number."""
    try:
        number = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except ValueError as error:  # a null byte in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if stat.S_ISREG(os.fstat(number).st_mode):
        return number
    os.close(number)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))
