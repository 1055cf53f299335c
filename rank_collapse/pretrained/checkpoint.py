"""A checkpoint folder as Hugging Face saves it: its config and its tensors, read one at a time.

Formats: model.safetensors, its sharded form with an index, pytorch_model.bin and its sharded form.
The folder is only read, and no pickled code is executed.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rank_collapse.extras import required
from rank_collapse.pretrained import torch_tensors
from rank_collapse.pretrained.tensors import Place, Stored, Tensors
from rank_collapse.printed import one_line, quoted
from rank_collapse.struct import refuse_if
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
_LONGEST = 255  # characters of a name: what a file system has for one
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
            gguf = "; a .gguf file has to be converted" if folder.suffix == ".gguf" else ""
            raise NotADirectoryError(
                f"{folder} is a file; a checkpoint is the folder it is in{gguf}"
            )
        raise FileNotFoundError(f"checkpoint folder {folder} does not exist")
    refuse_if(
        (folder / "adapter_config.json").exists(),
        f"{folder} holds an adapter of peft (adapter_config.json), which is not measured: save the "
        "merged model, model.merge_and_unload().save_pretrained(FOLDER)",
    )
    refuse_if(
        not (folder / "config.json").exists() and any(folder.glob("*.gguf")),
        f"{folder} holds a .gguf file and no config.json: convert it, "
        "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(NEW)",
    )
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
                where = f"tensor {quoted(name)}: {quoted(shard)}"
                raise ValueError(f"{index} names no file for {where}")
        shards = {}
        for shard in sorted(set(weight_map.values())):
            refuse_if(
                Path(shard).name != shard or len(shard) > _LONGEST or not shard.isprintable(),
                f"{index} names no file of its folder: {quoted(shard)}",
            )
            if not (self.folder / shard).is_file():
                raise FileNotFoundError(f"{self.folder / shard}, named by {index.name}, is missing")
            shards[shard] = _stored(self.folder / shard)
        for name, shard in sorted(weight_map.items()):
            refuse_if(
                name not in shards[shard], f"tensor {quoted(name)} of {index} is not in {shard}"
            )
        return {name: shards[shard][name] for name, shard in weight_map.items()}

    def values(self, entry: Stored, name: str, rows: slice | None) -> np.ndarray:
        """A tensor, or some of its rows, from its file."""
        if entry.tensor is None:
            return _read(entry, rows)
        entry.path.stat()
        # A copy: the file's own pages would be gone with the file.
        tensor = entry.tensor if rows is None else entry.tensor[rows]
        return np.array(torch_tensors.as_array(tensor))


def _stored(path):
    """The tensors of one file, by name."""
    if path.suffix == ".bin":
        found = torch_tensors.stored(path, torch_tensors.torch_tensors(path))
    else:
        found = _safetensors(path)
    for name in found:  # which messages repeat
        refuse_if(
            len(name) > _LONGEST or not name.isprintable(),
            f"{path}: {quoted(name)} is not a tensor's name",
        )
    return found


def _safetensors(path):
    """The tensors of a safetensors file, whose package checks its header here, once."""
    safetensors = required("safetensors", str(path), "pretrained")
    try:
        with safetensors.safe_open(path, "numpy"):
            pass
    except safetensors.SafetensorError as error:
        reason = one_line(error, 300)
        raise ValueError(f"{path}: cut short, or not a safetensors file: {reason}") from None
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header, known = json.loads(file.read(size)), os.fstat(file.fileno())
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if (kind := entry["dtype"]) not in _DTYPES:
            what = f"tensor {quoted(name)} has the unsupported dtype {kind}"
            quantised = ": a quantised checkpoint" if kind.startswith(("F8", "F6", "F4")) else ""
            raise ValueError(f"{path}: {what}{quantised}")
        place = Place(8 + size + entry["data_offsets"][0], known.st_size, known.st_mtime_ns)
        found[name] = Stored(path, np.dtype(_DTYPES[kind]), tuple(entry["shape"]), None, place)
    return found


def _read(entry, rows):
    """A tensor, or some of its rows, of a safetensors file, which is opened each time: for threads,
    and without a map of its pages, for a file that is cut short meanwhile."""
    shape, (begin, size, changed) = entry.shape, entry.place
    if rows is not None:
        first, last, _ = rows.indices(shape[0])
        begin += first * math.prod(shape[1:]) * entry.dtype.itemsize
        shape = (last - first, *shape[1:])
    count = math.prod(shape) * entry.dtype.itemsize
    with open(entry.path, "rb") as file:
        file.seek(begin)
        found, now = np.fromfile(file, np.uint8, count), os.fstat(file.fileno())
    refuse_if(
        len(found) < count or (now.st_size, now.st_mtime_ns) != (size, changed),
        f"{entry.path}: cut short, or changed since it was opened",
    )
    return found.view(entry.dtype).reshape(shape)
