"""The files of a checkpoint: its config.json, and its tensors by name.

Tensors come from a safetensors file, from a `torch.save` file, or from a model in memory.
"""

import contextlib
import os
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from rank_collapse.checks import refuse_if
from rank_collapse.extras import import_package
from rank_collapse.pretrained.entries import Settings
from rank_collapse.pretrained.published import suggest_names
from rank_collapse.printed import format_one_line, quote_value
from rank_collapse.text.text_files import read_json

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
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    "t = torch.load('{0}', weights_only=True); "
    "s.save_file({{k: v.clone() for k, v in t.items()}}, 'model.safetensors')\""
)


class FileTensor(NamedTuple):
    """A tensor in a file or in a model."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[object], np.ndarray]  # of some of its rows, or of ... for all


class Tensors:
    """The tensors of a model by name, each read when asked for.

    Args:
        folder, file: Folder and file of the tensors, for messages.
        entries: {name: `FileTensor`}.
    """

    def __init__(self, folder: Path, file: str, entries: dict[str, FileTensor]):
        self.folder, self.file, self.entries = folder, file, entries

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self.entries)

    def read(self, name: str, rows: object = ..., *, finite: bool = True) -> np.ndarray:
        """Read one tensor, or some of its rows.

        Args:
            name: Name of the tensor.
            rows: An index of its first axis; all by default.
            finite: Whether values that are not finite are an error.

        Raises:
            ValueError: A tensor with values that are not finite, where that is asked for.
        """
        entry = self.entries[name]
        array = entry.read(rows)
        if finite and array.dtype.kind in "fV" and not np.isfinite(array).all():
            raise ValueError(f"{entry.path}: tensor {name!r} holds values that are not finite")
        return array


def list_tensors(path: Path) -> dict[str, FileTensor]:
    """List the tensors of one file by name; no pickled code is executed.

    Raises:
        ValueError: A file that is cut short, damaged or of another kind, or a package that is not
            installed.
    """
    opened = os.stat(path)
    if path.suffix == ".bin":
        tensors = wrap_torch_tensors(path, _torch_file(path))
    else:
        tensors = _read_safetensors(path)
    return {
        name: stored._replace(read=partial(_read_unchanged, path, opened, stored.read))
        for name, stored in tensors.items()
    }


def _read_unchanged(path, opened, read, rows):
    """Read rows of a tensor, if nothing was written to its file since it was opened.

    The file is mapped, so reading a part that was cut off would end the process. Another file that
    took its place does not change the mapped one.

    Args:
        path: Path of the file.
        opened: Result of `os.stat` when the file was opened.
        read, rows: See `FileTensor`.

    Raises:
        ValueError: The file is cut short, or has changed.
    """
    with contextlib.suppress(FileNotFoundError):
        now = os.stat(path)
        is_same = (now.st_size, now.st_mtime_ns) == (opened.st_size, opened.st_mtime_ns)
        if now.st_ino == opened.st_ino and not is_same:
            raise ValueError(f"{path} is cut short, or was changed after it was opened")
    return read(rows)


def _read_safetensors(path):
    """List the tensors of a safetensors file by name."""
    safetensors = import_package("safetensors", str(path), "pretrained")
    try:
        file = safetensors.safe_open(path, "numpy")
    except safetensors.SafetensorError as error:
        reason = format_one_line(error, 300)
        raise ValueError(f"{path} is cut short, or is not a safetensors file: {reason}") from None
    tensors = {}
    for name in file.keys():  # noqa: SIM118
        part = file.get_slice(name)
        kind = part.get_dtype()
        if kind not in _DTYPES:
            quantised = ", of a quantised checkpoint" if kind.startswith(("F8", "F6", "F4")) else ""
            fault = f"tensor {quote_value(name)} has the unsupported dtype {kind}"
            raise ValueError(f"{path}: {fault}{quantised}")
        tensors[name] = FileTensor(
            path, np.dtype(_DTYPES[kind]), tuple(part.get_shape()), part.__getitem__
        )
    return tensors


def _torch_file(path):
    """Load the tensors of a `torch.save` file by name; from a training state, load those of its
    model."""
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"{path} needs torch, which is not installed (pip install torch); where it is "
            f"installed, {_CONVERT.format(path.name)}"
        ) from None
    mapped = zipfile.is_zipfile(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # of pickle, zipfile or torch
        raise ValueError(
            f"{path} is not a readable torch file: {format_one_line(error, 300)}"
        ) from None
    for inside in ("state_dict", "model_state_dict"):  # of Lightning, of torch's tutorials
        if isinstance(content, dict) and isinstance(content.get(inside), dict):
            content = content[inside]
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors")
    return {k: v for k, v in content.items() if isinstance(k, str) and torch.is_tensor(v)}


def wrap_torch_tensors(path: Path, tensors: Mapping[str, object]) -> dict[str, FileTensor]:
    """List tensors of torch by name.

    Args:
        path: Path of their file or model, for messages.
        tensors: {name: tensor}.

    Raises:
        ValueError: A tensor whose values are not an array in memory: nested, sparse, quantised, or
            on the device "meta".
    """
    return {name: _wrap_tensor(path, name, tensor) for name, tensor in tensors.items()}


def _wrap_tensor(path, name, tensor):
    """Return a torch tensor as `FileTensor`; raise a ValueError if its values cannot be read."""
    fault = _find_fault(tensor)
    if fault:
        raise ValueError(f"{path}: tensor {quote_value(name)} is {fault}, which is not supported")
    return FileTensor(
        path, numpy_dtype(tensor), tuple(tensor.shape), lambda rows: convert_tensor(tensor[rows])
    )


def _find_fault(tensor):
    """Return why the values of a torch tensor are not an array in memory; "" where they are."""
    kind, layout = str(tensor.dtype).removeprefix("torch."), str(tensor.layout)
    if getattr(tensor, "is_nested", False):
        return "nested"
    if layout != "torch.strided":
        return f"not dense ({layout.removeprefix('torch.')})"
    if tensor.device.type == "meta":
        return "on the device 'meta', without values"
    if getattr(tensor, "is_quantized", False) or not (kind == "bfloat16" or hasattr(np, kind)):
        return f"of dtype {kind}, as in a quantised checkpoint"
    return ""


def numpy_dtype(tensor: object) -> np.dtype:
    """Return the NumPy dtype of a tensor."""
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    refuse_if(
        not hasattr(np, kind),
        f"a tensor has the unsupported dtype {kind}, as in a quantised checkpoint",
    )
    return np.dtype(kind)


def convert_tensor(tensor: object) -> np.ndarray:
    """Convert a tensor to NumPy, on the CPU in the same memory."""
    refuse_if(tensor.device.type == "meta", "a tensor is on the device 'meta', without values")
    tensor, dtype = tensor.detach().cpu(), numpy_dtype(tensor)
    if dtype == ml_dtypes.bfloat16:
        import torch

        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()


def is_model(source: object) -> bool:
    """Check whether `source` is a model of `transformers`, by its state_dict and config."""
    return hasattr(source, "state_dict") and hasattr(getattr(source, "config", None), "to_dict")


def live_model(model: object) -> Tensors:
    """List the tensors of a PyTorch model of `transformers` in memory, as if they were read from a
    file.

    Args:
        model: The model.

    Raises:
        ValueError: It has an adapter of peft.
    """
    folder = Path(type(model).__name__)
    entries = wrap_torch_tensors(folder, model.state_dict())
    refuse_if(
        hasattr(model, "peft_config") or any(".lora_" in name for name in entries),
        f"{folder} has an adapter of peft, which is not measured: merge it by "
        "merge_and_unload(), or pass get_base_model() for the model without it",
    )
    return Tensors(folder, "state_dict()", entries)


WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def read_config(folder: str | os.PathLike) -> Settings:
    """Read the config.json of a checkpoint folder.

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
        hint = suggest_names(folder)
        raise FileNotFoundError(f"checkpoint folder {folder} does not exist{hint}")
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


def open_weights(folder: str | os.PathLike) -> Tensors:
    """List the tensors of a checkpoint folder by name.

    Raises:
        FileNotFoundError: No weight file, or a shard missing.
        ValueError: A file that is cut short or damaged, or whose package is not installed.
    """
    folder = Path(folder)
    first = next((folder / f for f in WEIGHT_FILES if (folder / f).is_file()), None)
    if first is None:
        raise FileNotFoundError(f"{folder} holds none of {', '.join(WEIGHT_FILES)}")
    if first.suffix != ".json":
        return Tensors(folder, first.name, list_tensors(first))
    weight_map = read_json(first).get("weight_map")
    has_names = isinstance(weight_map, dict) and all(
        isinstance(shard, str) for shard in weight_map.values()
    )
    refuse_if(not has_names, f"{first} has no weight_map with file names")
    for shard in sorted(set(weight_map.values())):
        place = Path(shard)
        refuse_if(
            place.is_absolute() or ".." in place.parts,
            f"{first} names {quote_value(shard)}, which is outside of its folder",
        )
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"{folder / shard}, named by {first.name}, is missing")
    shards = {shard: list_tensors(folder / shard) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        refuse_if(
            name not in shards[shard], f"tensor {quote_value(name)} of {first} is not in {shard}"
        )
    return Tensors(folder, first.name, {n: shards[shard][n] for n, shard in weight_map.items()})
