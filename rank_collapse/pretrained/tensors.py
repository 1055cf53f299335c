"""Named tensors of known shapes, which are read one at a time."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Place(NamedTuple):
    """Where a tensor begins in a file, and what the file was then: bytes, time of change in ns."""

    begin: int
    size: int
    changed: int


class Stored(NamedTuple):
    """A tensor in a file or in a model: that of torch, or its place in a safetensors file."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    tensor: Any = None
    place: Place | None = None


class Tensors:
    """The tensors of a model by name.

    Attributes:
        folder, file: Where they are, for messages.
        entries: {name: `Stored`}.
    """

    folder: Path
    file: str
    entries: dict[str, Stored]

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

    def dtype(self, name: str) -> np.dtype:
        """The dtype of one tensor, as `read` gives it."""
        return self.entries[name].dtype

    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(e.dtype.itemsize * math.prod(e.shape) for e in self.entries.values())

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows first .. last − 1 of a matrix."""
        return self._checked(name, slice(first, last))

    def read(self, name: str, *, finite: bool = True) -> np.ndarray:
        """One tensor.

        Args:
            finite: Whether to refuse values that are not finite.

        Raises:
            FileNotFoundError: A file that is gone.
            ValueError: A tensor with values that are not finite, or that has none (on torch's
                device "meta"); a file that is cut short.
        """
        return self._checked(name, None, finite)

    def _checked(self, name, rows, finite=True):
        array = self.values(self.entries[name], name, rows)
        if finite and array.dtype.kind in "fV" and not np.isfinite(array).all():
            where = self.entries[name].path
            raise ValueError(f"{where}: tensor {name!r} holds values that are not finite")
        return array

    def values(self, entry: Stored, name: str, rows: slice | None) -> np.ndarray:
        """A tensor, or some of its rows, as it is."""
        raise NotImplementedError
