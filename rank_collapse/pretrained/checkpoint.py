"""A checkpoint folder as Hugging Face saves it: its config and its tensors, read one at a time.

Formats: model.safetensors, its sharded form with an index, pytorch_model.bin and its sharded form.
The folder is only read, and no pickled code is executed.
"""

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rank_collapse.pretrained import torch_tensors
from rank_collapse.pretrained.tensors import Stored, Tensors
from rank_collapse.text.files import read_json

_DTYPES = {
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
        NotADirectoryError: A file in the place of the folder.
        ValueError: A config.json that is not a JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        if folder.exists():
            raise NotADirectoryError(f"{folder} is a file; a checkpoint is the folder it is in")
        raise FileNotFoundError(f"checkpoint folder {folder} does not exist")
    return read_json(folder / "config.json")


class Checkpoint(Tensors):
    """The tensors of a checkpoint folder, by name; each is read from disk when asked for."""

    def __init__(self, folder: str | os.PathLike):
        """Finds the weight files of the folder and reads their indices.

        Raises:
            FileNotFoundError: No weight file, or a shard missing.
            ValueError: A file that is cut short or damaged, or whose package is not installed.
        """
        self.folder = Path(folder)
        found = [f for f in WEIGHT_FILES if (self.folder / f).is_file()]
        if not found:
            names = ", ".join(WEIGHT_FILES)
            raise FileNotFoundError(f"{self.folder} holds none of {names}")
        first = self.folder / found[0]
        self.entries = self._sharded(first) if first.suffix == ".json" else _stored(first)
        self.file = first.name

    def _sharded(self, index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map")
        for name, shard in weight_map.items():
            if not isinstance(shard, str):
                raise ValueError(f"{index} names no file for tensor {name!r}: {shard!r}")
        shards = {}
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise ValueError(f"{index} names a file outside its folder: {shard!r}")
            if not (self.folder / shard).is_file():
                raise FileNotFoundError(f"{self.folder / shard}, named by {index.name}, is missing")
            shards[shard] = _stored(self.folder / shard)
        for name, shard in sorted(weight_map.items()):
            if name not in shards[shard]:
                raise ValueError(f"tensor {name!r} of {index} is not in {shard}")
        return {name: shards[shard][name] for name, shard in weight_map.items()}

    def values(self, entry: Stored, name: str, rows: slice | None) -> np.ndarray:
        """A tensor, or some of its rows, from its file."""
        if entry.tensor is None:
            return _safetensors(entry.path, lambda file: _values(file, name, rows))
        entry.path.stat()
        # A copy: the file's own pages would be gone with the file.
        tensor = entry.tensor if rows is None else entry.tensor[rows]
        return np.array(torch_tensors.as_array(tensor))


def _stored(path):
    """The tensors of one file, by name."""
    if path.suffix != ".bin":
        return _safetensors(path, lambda file: _headers(path, file))
    return torch_tensors.stored(path, torch_tensors.torch_tensors(path))


def _safetensors(path, read):
    """read(the open file): it is opened each time, for threads and for files that change."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError(
            f"{path}: safetensors is not installed (pip install 'rank-collapse[pretrained]')"
        ) from None
    try:
        with safe_open(path, "numpy") as file:
            return read(file)
    except SafetensorError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{path}: cut short, or not a safetensors file: {reason}") from None


def _headers(path, file):
    found = {}
    for name in file.offset_keys():
        part = file.get_slice(name)
        kind, shape = part.get_dtype(), tuple(part.get_shape())
        if kind not in _DTYPES:
            quantised = ": a quantised checkpoint" if kind.startswith(("F8", "F6", "F4")) else ""
            raise ValueError(f"{path}: tensor {name!r} has the unsupported dtype {kind}{quantised}")
        found[name] = Stored(path, np.dtype(_DTYPES[kind]), shape)
    return found


def _values(file, name, rows):
    return file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
