"""The modules that run while a pass is measured, with the masks that they were given."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rank_collapse.watch.torch_masks import is_allowed


@dataclasses.dataclass(eq=False)
class Frame:
    """A module that runs now, its number among all that ran, and its call."""

    number: int
    module: nn.Module
    name: str
    args: Any
    kwargs: Any

    @functools.cached_property
    def masks(self) -> list[tuple[str, Tensor]]:
        """Lists (name, argument [b, n]) of the call whose name has "mask" or "pad" in it."""
        try:
            forward = inspect.signature(self.module.forward)
            arguments = forward.bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            arguments = self.kwargs
        return [(name, a) for name, a in _name_masks(arguments) if a.ndim == 2]


def _name_masks(arguments: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of masks in mappings, also of those inside them."""
    for name, argument in arguments.items():
        if isinstance(argument, Mapping):
            yield from _name_masks(argument)
        elif isinstance(argument, Tensor) and re.search("mask|pad", str(name)):
            yield str(name), argument


def list_sides(name, mask):
    """Reads which tokens exist from a mask of a module's call, which may mark them or the padding.

    Args:
        name: Name of the argument.
        mask: Tensor [b, n]: Bool, numbers, or floats that are added to scores.

    Returns:
        Two Bool [b, n], true where a token exists by the likelier and by the other reading.
    """
    is_added = mask.is_floating_point() and bool((mask <= 0).all())
    exists = is_allowed(mask) if is_added else mask > 0
    is_padding = "pad" in name and mask.dtype == torch.bool
    return (~exists, exists) if is_padding else (exists, ~exists)
