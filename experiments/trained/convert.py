"""Files of other programs as checkpoint folders: torch, CTranslate2; GGUF in `gguf_file`.

Their SHA-256 was compared before (`packages.find_weights`), so their contents are known.
"""

import collections
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.lab import JsonObject
from rank_collapse.extras import import_package
from rank_collapse.runs.files import write_atomically

# Dtypes of torch by the class of their storage.
_STORAGES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "BoolStorage": np.bool_,
    "ByteStorage": np.uint8,
}


class _Stored(NamedTuple):
    """The numbers of one or several tensors."""

    dtype: type
    key: str
    count: int


class _Tensor(NamedTuple):
    """Where a tensor's numbers are."""

    storage: _Stored
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _TensorUnpickler(pickle.Unpickler):
    """Reads tensors and dictionaries; any other class is an error, so that no code is executed."""

    def find_class(self, module: str, name: str) -> Callable:
        """Returns the replacement of one of torch's classes and functions."""
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: _Tensor(*arguments[:4])
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not a tensor")

    def persistent_load(self, entry: tuple[str, ...]) -> _Stored:
        """Returns the place of a storage: its dtype, key and number of values."""
        _, dtype, key, _, count = entry[:5]
        return _Stored(dtype, key, count)


def read_torch(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads a pytorch_model.bin, in torch's present or its old format, as {name: array}.

    torch itself is not needed, and no pickled code is executed.

    Raises:
        pickle.UnpicklingError: A file with other classes than tensors.
    """
    with open(path, "rb") as file:
        state, buffers = (_read_zip if zipfile.is_zipfile(path) else _read_old)(file)
    return {name: _to_array(tensor, buffers) for name, tensor in state.items()}


def _read_zip(file):
    """Reads (the pickled dictionary, {key: bytes}) of the format of torch 1.6 and later."""
    archive = zipfile.ZipFile(file)
    (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    state = _TensorUnpickler(io.BytesIO(archive.read(pickled))).load()
    folder = pickled.removesuffix(".pkl")
    keys = {tensor.storage.key for tensor in state.values()}
    return state, {key: archive.read(f"{folder}/{key}") for key in keys}


def _read_old(file):
    """Reads a file of the older format: pickles, then every storage after its size.

    Returns:
        ({name: tensor}, {key of a storage: its bytes}).
    """
    for _ in ("magic number", "version", "system"):
        _TensorUnpickler(file).load()
    state, keys = _TensorUnpickler(file).load(), _TensorUnpickler(file).load()
    stored = {tensor.storage.key: tensor.storage for tensor in state.values()}
    buffers = {}
    for key in keys:
        (count,) = struct.unpack("<q", file.read(8))
        buffers[key] = file.read(count * np.dtype(stored[key].dtype).itemsize)
    return state, buffers


def _to_array(tensor, buffers):
    """Copies a tensor's numbers; strides of torch count values and not bytes."""
    dtype = np.dtype(tensor.storage.dtype)
    buffer = buffers[tensor.storage.key]
    strides = [step * dtype.itemsize for step in tensor.strides]
    offset = tensor.offset * dtype.itemsize
    return np.ndarray(tensor.shape, dtype, buffer, offset, strides).copy()


# CTranslate2 → names of transformers, of a layer of the encoder.
_WHISPER = {
    "self_attention/linear_1": "self_attn.out_proj",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
    "ffn/layer_norm": "final_layer_norm",
}
_KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
_DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)  # by the number of the type


def from_ctranslate2(path: str | os.PathLike, folder: str | os.PathLike) -> None:
    """Writes the encoder of a Whisper of CTranslate2 as a checkpoint, in float32.

    The bias of its keys is left out, because it adds the same number to all scores of a row.

    Args:
        path: A model.bin, not quantised.
        folder: Folder for config.json and model.safetensors.
    """
    stored = _ctranslate2(path)
    tensors = {"embed_positions.weight": stored["encoder/position_encodings/encodings"]}
    for name, values in stored.items():
        place, _, last = name.removeprefix("encoder/").rpartition("/")
        if not name.startswith("encoder/") or last not in _KINDS:
            continue
        layer, _, part = place.partition("/")
        stem = f"layers.{layer[6:]}" if part else ""
        if part == "self_attention/linear_0":
            split = zip("qkv", np.split(values, 3), strict=True)
            tensors |= {f"{stem}.self_attn.{k}_proj.{last}": a for k, a in split}
        elif part:
            tensors[f"{stem}.{_WHISPER[part]}.{_KINDS[last]}"] = values
        else:
            tensors[f"{place}.{_KINDS[last]}"] = values
    tensors = {name: a for name, a in tensors.items() if not name.endswith("k_proj.bias")}
    positions, d_model = tensors["embed_positions.weight"].shape
    config = {
        "model_type": "whisper",
        "d_model": d_model,
        "encoder_layers": sum(name.endswith("fc1.weight") for name in tensors),
        "encoder_attention_heads": int(stored["encoder/num_heads"]),
        "encoder_ffn_dim": len(tensors["layers.0.fc1.weight"]),
        "num_mel_bins": tensors["conv1.weight"].shape[1],
        "max_source_positions": positions,
    }
    write_checkpoint(folder, config, {f"model.encoder.{name}": a for name, a in tensors.items()})


def _ctranslate2(path):
    """Reads the tensors of a model.bin, by name."""
    with open(path, "rb") as file:

        def number(kind):
            return struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]

        def name():
            return file.read(number("H")).rstrip(b"\0").decode()

        number("I"), name(), number("I")  # version, the model's class, and its revision
        tensors = {}
        for _ in range(number("I")):
            key = name()
            shape = [number("I") for _ in range(number("B"))]
            kind, size = _DTYPES[number("B")], number("I")
            tensors[key] = np.frombuffer(file.read(size), kind).reshape(shape)
    return tensors


def write_checkpoint(
    folder: str | os.PathLike, config: JsonObject, tensors: Mapping[str, np.ndarray]
) -> None:
    """Writes a checkpoint folder of a config and tensors, in float32.

    Args:
        folder: The checkpoint folder.
        config: Content of config.json.
        tensors: Tensors by name.
    """
    write_tensors(folder, {name: a.astype(np.float32) for name, a in tensors.items()})
    write_config(folder, config)


def write_config(folder: str | os.PathLike, config: JsonObject) -> None:
    """Writes the config.json of a folder."""
    write_atomically(Path(folder) / "config.json", json.dumps(config, indent=1).encode())


def write_tensors(folder: str | os.PathLike, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes model.safetensors into a folder."""
    numpy_files = import_package("safetensors.numpy", str(folder), "pretrained")
    contiguous = {name: np.ascontiguousarray(a) for name, a in tensors.items()}
    path = Path(folder) / "model.safetensors"
    write_atomically(path, numpy_files.save(contiguous, metadata={"format": "pt"}))
