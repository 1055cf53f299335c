"""Where the tensors of a `torch.save` file lie, found without executing what the file pickles.

A pickle may name any Python callable. Here it may name only the few that rebuild a tensor, and
these are replaced by functions that note an offset; anything else is refused.
"""

import collections
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_STORAGES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


class Entry(NamedTuple):
    """One tensor in a file: `count` items from `offset`, seen with `strides` (in items)."""

    path: Path
    offset: int
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


class _Storage(NamedTuple):
    key: str
    dtype: Any
    size: int


class _View(NamedTuple):
    storage: _Storage
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _StorageType(NamedTuple):
    dtype: Any


def _rebuild_tensor(storage, start, shape, strides, *_):
    shape, strides = tuple(shape), tuple(strides)
    if not isinstance(storage, _Storage) or len(shape) != len(strides):
        raise pickle.UnpicklingError("it rebuilds a tensor from something else")
    # Any of them negative would let a view begin or end outside its storage.
    wrong = [n for n in (start, *shape, *strides) if type(n) is not int or n < 0]
    if wrong:
        raise pickle.UnpicklingError(f"{wrong[0]!r} is no offset, size or stride of a tensor")
    return _View(storage, start, shape, strides)


def _rebuild_parameter(view, *_):
    return view


_CALLABLES = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
}


class _Unpickler(pickle.Unpickler):
    """Knows tensors, their storages and ordered dictionaries, and nothing else."""

    def __init__(self, file: Any):
        super().__init__(file)
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CALLABLES:
            return _CALLABLES[module, name]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
            raise pickle.UnpicklingError(f"unknown persistent id {pid!r}")
        kind, key, _, size = pid[1:5]
        if not isinstance(kind, _StorageType) or (len(pid) > 5 and pid[5] is not None):
            raise pickle.UnpicklingError(f"unknown storage {pid!r}")
        return self.storages.setdefault(str(key), _Storage(str(key), kind.dtype, int(size)))


def torch_entries(path: Path) -> dict[str, Entry]:
    """The tensors of a state dict saved by `torch.save`, zip or older format, by name.

    Raises:
        ValueError: A file that is cut short, damaged, or that names anything but tensors.
    """
    try:
        views, offsets = (_read_zip if zipfile.is_zipfile(path) else _read_legacy)(path)
    except Exception as error:  # pickle and zipfile raise nearly any on bytes of a stranger's
        reason = " ".join(str(error).split())[:300] or "it is cut short"
        raise ValueError(f"{path}: not a readable torch file: {reason}") from None
    if isinstance(views, dict) and isinstance(views.get("state_dict"), dict):
        views = views["state_dict"]
    if not isinstance(views, dict):
        raise ValueError(f"{path}: holds a {type(views).__name__}, not a dictionary of tensors")
    entries = {}
    for name, view in views.items():
        if isinstance(view, _View):
            entries[str(name)] = _entry(path, name, view, offsets)
    return entries


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Items from a view's first to its last, both counted; its shape and strides are ≥ 0."""
    if not math.prod(shape):
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _entry(path, name, view, offsets):
    item = np.dtype(view.storage.dtype).itemsize
    end = view.start + extent(view.shape, view.strides)
    if view.storage.key not in offsets:
        raise ValueError(f"{path}: the data of tensor {name!r} is missing")
    offset, available = offsets[view.storage.key]
    if end > available // item:
        raise ValueError(f"{path}: tensor {name!r} reaches beyond its data: the file is cut short")
    return Entry(path, offset + view.start * item, view.storage.dtype, view.shape, view.strides)


def _read_zip(path):
    """(object, offsets of the storages) of the format of torch >= 1.6: an uncompressed zip."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
        infos = {info.filename: info for info in archive.infolist()}
        index = next((n for n in infos if n.endswith("/data.pkl") or n == "data.pkl"), None)
        if index is None:
            raise pickle.UnpicklingError("the archive has no data.pkl")
        folder = index[: -len("data.pkl")]
        for name, info in infos.items():
            if name.startswith(folder) and info.compress_type != zipfile.ZIP_STORED:
                raise pickle.UnpicklingError(f"{name} is compressed")
        with archive.open(index) as file:
            views = _Unpickler(file).load()
        if folder + "byteorder" in infos and archive.read(folder + "byteorder") != b"little":
            raise pickle.UnpicklingError("its byte order is not little-endian")
        offsets = {}
        for name, info in infos.items():
            if not name.startswith(folder + "data/"):
                continue
            # The local header repeats the name, with an extra field of its own length.
            raw.seek(info.header_offset + 26)
            sizes = np.frombuffer(raw.read(4), "<u2")
            start = info.header_offset + 30 + int(sizes.sum())
            offsets[name[len(folder) + 5 :]] = (start, min(info.file_size, size - start))
    return views, offsets


def _read_legacy(path):
    """(object, offsets of the storages) of the format before torch 1.6: pickles, then data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if _Unpickler(file).load() != _LEGACY_MAGIC:
            raise pickle.UnpicklingError("it does not begin as a torch file does")
        _Unpickler(file).load()  # protocol version
        system = _Unpickler(file).load()
        if isinstance(system, dict) and not system.get("little_endian", True):
            raise pickle.UnpicklingError("its byte order is not little-endian")
        unpickler = _Unpickler(file)
        views = unpickler.load()
        offsets = {}
        for key in _Unpickler(file).load():
            length = int(np.frombuffer(file.read(8), "<i8")[0])
            item = np.dtype(unpickler.storages[str(key)].dtype).itemsize
            offsets[str(key)] = (file.tell(), min(length * item, size - file.tell()))
            file.seek(length * item, 1)
    return views, offsets
