"""Arrays in .npz and .safetensors files, read part by part along their first axis; equal arrays and
metadata are written as equal bytes."""

import contextlib
import json
import math
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from rank_collapse.checks import refuse_if
from rank_collapse.printed import format_one_line


class StoredArray(NamedTuple):
    """An array of a file.

    Attributes:
        shape, dtype: Shape and dtype of the array.
        read_rows: Yields its parts along the first axis in order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read_rows: Callable[[], Iterator[np.ndarray]]


@contextlib.contextmanager
def name_damage(path: Path) -> Iterator[None]:
    """Raises a ValueError that names the file, if it cannot be read within the context."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path} is damaged: {format_one_line(error, 200)}") from None
    except StopIteration:
        raise ValueError(f"{path} is damaged: an array ends early") from None
    except Exception as error:
        raise ValueError(f"{path} is damaged: {format_one_line(error, 200)}") from None


def open_safetensors(
    path: Path, wanted: Collection[str]
) -> tuple[dict[str, StoredArray], dict[str, str], list[str]]:
    """Opens the arrays of a .safetensors file.

    Parts are read from the file, not from the memory map of `safe_open`, whose pages would count as
    memory of the process.

    Args:
        path: The file.
        wanted: Names of the arrays that are opened.

    Returns:
        ({name: array}, metadata, the names of the other arrays).
    """
    import safetensors

    with safetensors.safe_open(path, framework="numpy") as file:
        names, metadata = set(file.keys()), file.metadata() or {}
        shapes = {n: tuple(file.get_slice(n).get_shape()) for n in names.intersection(wanted)}
        dtypes = {
            name: file.get_slice(name)[:0].dtype if shape else np.dtype(float)
            for name, shape in shapes.items()
        }
    with open(path, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    arrays = {}
    for name, shape in shapes.items():
        start = 8 + size + header[name]["data_offsets"][0]
        read = partial(_read_rows, path, name, start, shape, dtypes[name])
        arrays[name] = StoredArray(shape, dtypes[name], read)
    return arrays, metadata, sorted(names.difference(wanted))


def dump_safetensors(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Makes the bytes of a .safetensors file, with the metadata in alphabetical order.

    `safetensors` writes metadata in a random order, so that equal recordings would differ.

    Args:
        arrays: {name: array}, each contiguous.
        metadata: Text by name.
    """
    from safetensors.numpy import save

    data = save(dict(arrays), dict(metadata))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def _read_rows(path, name, start, shape, dtype):
    """Yield the parts of an array that lies in a file from a byte on.

    Args:
        path: The file.
        name: Name of the array, for messages.
        start: Number of bytes before the array.
        shape: Shape of the array; each part is one entry of the first axis.
        dtype: Dtype of the numbers.
    """
    with open(path, "rb") as stream:
        stream.seek(start)
        yield from _cut_rows(stream, path, name, shape, dtype)


def _cut_rows(stream, path, name, shape, dtype):
    """Yield the parts of an array that a stream continues with."""
    size = math.prod(shape[1:]) * dtype.itemsize
    for _ in range(shape[0]):
        data = stream.read(size)
        if len(data) < size:
            raise ValueError(f"{path} is damaged: {name} ends early")
        yield np.frombuffer(data, dtype).reshape(shape[1:])


def open_npz(
    path: Path, wanted: Collection[str]
) -> tuple[dict[str, StoredArray], dict[str, str], list[str]]:
    """Opens the arrays of an .npz file, which has no metadata.

    Args:
        path: Path of the file.
        wanted: Names of the arrays to open.

    Returns:
        ({name: array}, no metadata: {}, the names of the other arrays), as `open_safetensors`.
    """
    arrays, ignored = {}, []
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            if name not in wanted:
                ignored.append(name)
                continue
            with archive.open(member) as stream:
                shape, is_fortran, dtype = _read_header(stream)
            refuse_if(dtype.hasobject, f"{path}: {name} is not an array of numbers")
            read = _load_rows if is_fortran else _stream_rows
            arrays[name] = StoredArray(shape, dtype, partial(read, path, member))
    return arrays, {}, ignored


def _load_rows(path, member):
    """Yield the parts of an array in Fortran order, which is read as a whole."""
    with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
        array = np.lib.format.read_array(stream, allow_pickle=False)
    yield from array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def _stream_rows(path, member):
    """Yield the parts of an array in an .npz file, which is read once from its start."""
    with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
        shape, _, dtype = _read_header(stream)
        yield from _cut_rows(stream, path, member, shape, dtype)


def _read_header(stream):
    """Return (shape, whether in Fortran's order, dtype) of an .npy stream.

    NumPy writes bfloat16, which it does not know, as two bytes without a type.
    """
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError(f"version {version} of NumPy's format")
    shape, is_fortran, dtype = read(stream)
    return shape, is_fortran, np.dtype(ml_dtypes.bfloat16) if dtype == np.dtype("V2") else dtype
