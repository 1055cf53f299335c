"""Tensors that take the place of others in the arguments and outputs of modules."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def replace_tensor(values: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """Return arguments or an output with another tensor in the place of one.

    Args:
        values: A tensor, or a tuple, list or mapping that has it.
        old, new: The tensors.
    """
    if values is old:
        return new
    if isinstance(values, Mapping):
        changed = {name: new if value is old else value for name, value in values.items()}
        return type(values)(changed) if type(values) is not dict else changed
    if isinstance(values, (tuple, list)):
        changed_list = [new if value is old else value for value in values]
        is_named = hasattr(values, "_fields")
        return type(values)(*changed_list) if is_named else type(values)(changed_list)
    return values


def convert_array(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Convert an array to a tensor of the shape, dtype and device of another.

    Args:
        array: Array of any float dtype.
        like: The tensor.
    """
    return torch.from_numpy(np.ascontiguousarray(array)).reshape(like.shape).to(like)
