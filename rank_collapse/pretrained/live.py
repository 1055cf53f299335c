"""A model of `transformers` that is in memory, in the place of a checkpoint folder."""

import math
from pathlib import Path
from typing import Any

import numpy as np


def is_model(source: Any) -> bool:
    """Whether `source` is a model rather than a folder: it has a config and a state_dict."""
    return hasattr(source, "state_dict") and hasattr(source, "config")


class LiveModel:
    """The tensors of a torch model by name, as `Checkpoint` has those of a folder."""

    file = "state_dict()"

    def __init__(self, model: Any):
        self.folder = Path(type(model).__name__)
        self.tensors = model.state_dict()

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return tuple(self.tensors[name].shape)

    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(t.element_size() * math.prod(t.shape) for t in self.tensors.values())

    def dtype(self, name: str) -> np.dtype:
        """The dtype of one tensor as `read` gives it."""
        kind = str(self.tensors[name].dtype).removeprefix("torch.")
        return np.dtype("float32" if kind == "bfloat16" else kind)

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows first .. last − 1 of a matrix."""
        return self.read(name)[first:last]

    def read(self, name: str, *, finite: bool = True) -> np.ndarray:
        """One tensor; bfloat16, which numpy lacks, as float32.

        Args:
            name: Which.
            finite: Whether to refuse values that are not finite.

        Raises:
            ValueError: A tensor with values that are not finite, or without values (on torch's
                device "meta").
        """
        tensor = self.tensors[name].detach()
        if tensor.device.type == "meta":
            raise ValueError(f"{self.folder}: tensor {name!r} is on the device 'meta'")
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        array = tensor.cpu().numpy()
        if finite and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{self.folder}: tensor {name!r} holds values that are not finite")
        return array
