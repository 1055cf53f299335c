"""A checkpoint folder as Hugging Face saves it: its config and its tensors, read one at a time.

Formats: model.safetensors, its sharded form with an index, pytorch_model.bin and its sharded form.
The folder is only read, and no pickled code is executed (see `torch_file`).
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rank_collapse.pretrained.torch_file import Entry, extent, torch_entries
from rank_collapse.text.files import read_json

_SAFE_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """The config.json of a checkpoint folder, as a dictionary.

    Raises:
        FileNotFoundError: No such folder, or no config.json in it.
        ValueError: A config.json that is not a JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"checkpoint folder {folder} does not exist")
    return read_json(folder / "config.json")


class Checkpoint:
    """The tensors of a checkpoint folder, by name; each is read from disk when asked for."""

    def __init__(self, folder: str | os.PathLike):
        """Finds the weight files of the folder and reads their indices.

        Raises:
            FileNotFoundError: No weight file, or a shard missing.
            ValueError: A file that is cut short or damaged.
        """
        self.folder = Path(folder)
        found = [f for f in WEIGHT_FILES if (self.folder / f).is_file()]
        if not found:
            names = ", ".join(WEIGHT_FILES)
            raise FileNotFoundError(f"{self.folder} holds none of {names}")
        first = self.folder / found[0]
        self.entries = self._sharded(first) if first.suffix == ".json" else _entries(first)
        self.file = first.name

    def _sharded(self, index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map")
        for name, shard in weight_map.items():
            if not isinstance(shard, str):
                raise ValueError(f"{index} names no file for tensor {name!r}: {shard!r}")
        entries = {}
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise ValueError(f"{index} names a file outside its folder: {shard!r}")
            if not (self.folder / shard).is_file():
                raise FileNotFoundError(f"{self.folder / shard}, named by {index.name}, is missing")
            entries.update(_entries(self.folder / shard))
        absent = sorted(set(weight_map) - set(entries))
        if absent:
            raise ValueError(f"tensor {absent[0]!r} of {index} is not in {weight_map[absent[0]]}")
        return entries

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self.entries)

    @property
    def paths(self) -> list[Path]:
        """The files that hold them."""
        return sorted({entry.path for entry in self.entries.values()})

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self.entries[name].shape

    def num_bytes(self) -> int:
        """Size of all tensors on disk."""
        return sum(np.dtype(e.dtype).itemsize * math.prod(e.shape) for e in self.entries.values())

    def dtype(self, name: str) -> Any:
        """The dtype of one tensor."""
        return self.entries[name].dtype

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows first .. last − 1 of a matrix, in the file's dtype.

        Raises:
            ValueError: As `read`.
        """
        entry = self.entries[name]
        if entry.strides is not None:
            return self.read(name)[first:last]
        rows, width = entry.shape
        item = np.dtype(entry.dtype).itemsize
        part = entry._replace(
            offset=entry.offset + first * width * item, shape=(min(last, rows) - first, width)
        )
        return self._read(part, name, True)

    def read(self, name: str, *, finite: bool = True) -> np.ndarray:
        """One tensor, in the file's dtype.

        Args:
            name: Which.
            finite: Whether to refuse values that are not finite.

        Raises:
            ValueError: A tensor with values that are not finite, a file cut short, or a tensor
                that repeats its values (a stride of 0), which a few bytes could make as large as
                they like.
        """
        return self._read(self.entries[name], name, finite)

    def _read(self, entry, name, finite):
        if math.prod(entry.shape) == 0:
            return np.zeros(entry.shape, entry.dtype)
        count = math.prod(entry.shape)
        if entry.strides is not None:
            count = extent(entry.shape, entry.strides)
            if math.prod(entry.shape) > count:
                raise ValueError(
                    f"{entry.path}: tensor {name!r} of shape {entry.shape} has only {count} values"
                )
        # numpy reads registered dtypes only; bfloat16 travels as two bytes.
        item = np.dtype(entry.dtype).itemsize
        raw = np.fromfile(entry.path, np.uint8, count * item, offset=entry.offset)
        if raw.size != count * item:
            raise ValueError(f"{entry.path}: cut short within tensor {name!r}")
        array = raw.view(entry.dtype)
        if entry.strides is None:
            array = array.reshape(entry.shape)
        else:
            strides = tuple(s * item for s in entry.strides)
            array = np.lib.stride_tricks.as_strided(array, entry.shape, strides)
        if finite and array.dtype.kind in "fV" and not np.isfinite(array).all():
            raise ValueError(f"{entry.path}: tensor {name!r} holds values that are not finite")
        return array


def _entries(path):
    return torch_entries(path) if path.suffix == ".bin" else safetensors_entries(path)


def safetensors_entries(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file: eight bytes of length, a JSON header, the data.

    Raises:
        ValueError: A file that is cut short or damaged, tensors that overlap, or a dtype without a
            numpy twin.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            raise ValueError(f"{path}: cut short within its header")
        try:
            header = json.loads(file.read(length).decode("utf-8"))
            spans = {k: _span(v) for k, v in header.items() if k != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{path}: its header is not that of a safetensors file") from None
    entries, last = {}, 0
    for name, (kind, shape, begin, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if kind not in _SAFE_DTYPES:
            quantised = ": a quantised checkpoint" if kind.startswith(("F8", "F6", "F4")) else ""
            raise ValueError(f"{path}: tensor {name!r} has the unsupported dtype {kind}{quantised}")
        dtype = _SAFE_DTYPES[kind]
        if end - begin != math.prod(shape) * np.dtype(dtype).itemsize:
            raise ValueError(f"{path}: tensor {name!r} of shape {shape} has {end - begin} bytes")
        if 8 + length + end > size:
            raise ValueError(
                f"{path}: cut short: tensor {name!r} ends at byte {8 + length + end} of {size}"
            )
        if begin < last:
            raise ValueError(f"{path}: tensor {name!r} begins within the tensor before it")
        last = end
        entries[name] = Entry(path, 8 + length + begin, dtype, shape)
    return {name: entries[name] for name in spans}


def _span(fields):
    """(dtype, shape, begin, end) of a tensor in a header, each of its type and none negative."""
    kind, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    if type(kind) is not str or any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise ValueError
    return kind, shape, begin, end
