"""Tensors of torch by name: those of a `torch.save` file, and of a model in memory."""

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rank_collapse.pretrained.tensors import Stored, Tensors
from rank_collapse.printed import one_line, quoted
from rank_collapse.struct import refuse_if

_CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    "t = torch.load('{0}', weights_only=True); "
    "s.save_file({{k: v.clone() for k, v in t.items()}}, 'model.safetensors')\""
)
# Names that may share the bytes of one table: T5's shared, encoder, decoder and head.
_ALIASES = 4


def torch_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a state dict saved by `torch.save`, left in the file where it is a zip.

    Raises:
        ValueError: No torch here, or a file that is cut short, damaged, or that holds anything but
            tensors, or tensors of more values than its bytes could be.
    """
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"{path}: .bin files are read by torch, which is not installed (pip install torch); "
            f"where it is, {_CONVERT.format(path.name)}"
        ) from None
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped:  # a compressed pickle could be of any size
            with zipfile.ZipFile(path) as archive:
                wrong = [info.filename for info in archive.infolist() if info.compress_type]
            if wrong:
                raise ValueError(f"{wrong[0]} is compressed")
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # of pickle, zipfile or torch, on bytes of a stranger's
        # Not its advice to load the file without `weights_only`.
        parts = [part for part in str(error).split("\n\n") if "weights_only" not in part]
        reason = one_line(" ".join(parts), 300) if any(parts) else "torch takes it for no weights"
        raise ValueError(f"{path}: not a readable torch file: {reason}") from None
    for inside in ("state_dict", "model_state_dict"):  # of Lightning, of torch's tutorials
        if isinstance(found, dict) and isinstance(found.get(inside), dict):
            found = found[inside]
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, not a dictionary of tensors")
    tensors = {k: v for k, v in found.items() if isinstance(k, str) and torch.is_tensor(v)}
    for name, tensor in tensors.items():
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        refuse_if(
            not plain or tensor.is_quantized or tensor.is_nested,
            f"{path}: tensor {quoted(name)} is not a plain array",
        )
    size, total = path.stat().st_size, sum(map(num_bytes, tensors.values()))
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors.values())}
    refuse_if(
        total > _ALIASES * size or sum(storages.values()) > size,
        f"{path}: {total} bytes of tensors in a file of {size}: they repeat",
    )
    return tensors


def num_bytes(tensor: Any) -> int:
    """Size of a tensor's values, those that it repeats counted again."""
    return tensor.element_size() * math.prod(tensor.shape)


def is_model(source: Any) -> bool:
    """Whether `source` is a model of `transformers`: it has a state_dict and its kind of config."""
    config = getattr(source, "config", None)
    return hasattr(source, "state_dict") and hasattr(config, "to_dict")


def dtype_of(tensor: Any) -> np.dtype:
    """The numpy dtype of a tensor."""
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    refuse_if(
        not hasattr(np, kind), f"a tensor of the unsupported dtype {kind}: a quantised checkpoint"
    )
    return np.dtype(kind)


def as_array(tensor: Any) -> np.ndarray:
    """The values of a tensor, on the CPU in the same memory."""
    tensor, dtype = tensor.detach().cpu(), dtype_of(tensor)
    if dtype == ml_dtypes.bfloat16:
        import torch

        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()


def stored(path: Path, tensors: Mapping[str, Any]) -> dict[str, Stored]:
    """The entries of `Tensors` of tensors by name."""
    return {k: Stored(path, dtype_of(t), tuple(t.shape), t) for k, t in tensors.items()}


class LiveModel(Tensors):
    """The tensors of a model of `transformers` in memory, as `Checkpoint` has those of a folder."""

    file = "state_dict()"

    def __init__(self, model: Any):
        self.folder = Path(type(model).__name__)
        self.entries = stored(self.folder, model.state_dict())
        refuse_if(
            hasattr(model, "peft_config") or any(".lora_" in name for name in self.entries),
            f"{self.folder} has an adapter of peft, which is not measured: merge it by "
            "merge_and_unload(), or pass get_base_model() for the model without it",
        )

    def values(self, entry: Stored, name: str, rows: slice | None) -> np.ndarray:
        """A tensor, or some of its rows, in the model's memory."""
        refuse_if(
            entry.tensor.device.type == "meta",
            f"{self.folder}: tensor {name!r} is on the device 'meta'",
        )
        return as_array(entry.tensor if rows is None else entry.tensor[rows])
