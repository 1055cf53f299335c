"""`pad_to`: inputs of several lengths through one compiled program."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse import struct
from rank_collapse.network.inputs import as_mask

T = TypeVar("T", bound=struct.Struct)


def pad_inputs(x: Any, pad_to: int, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pad x and the inputs to `pad_to` tokens; the mask says that those added do not exist.

    Args:
        x: States [n, d] or token ids [n], n ≤ pad_to.
        pad_to: The number of tokens that they get.
        inputs: Further arguments of a pass over the network. mask [n], bias [h, n, n], segments
            and positions [n] are padded too; memory and memory_mask [m] stay as they are.

    Raises:
        ValueError: More tokens than pad_to; a mask of pairs of tokens, an edit or a trace, which
            belong to n tokens.
    """
    n, inputs = np.shape(x)[0], {name: a for name, a in inputs.items() if a is not None}
    has_pairs = any(np.ndim(inputs.get(name, ())) > 1 for name in ("mask", "memory_mask"))
    if n > pad_to:
        raise ValueError(f"pad_to={pad_to} is less than the {n} tokens of x")
    if has_pairs or not {"edit", "log"}.isdisjoint(inputs):
        raise ValueError(f"pad_to={pad_to} takes masks of tokens [n], and no edit or log")

    def pad(a, axes):
        xp = jnp if isinstance(a, jax.core.Tracer) else np
        a = xp.asarray(a)
        return xp.pad(a, [(0, pad_to - n) if i in axes else (0, 0) for i in range(a.ndim)])

    mask = as_mask(inputs.get("mask", np.ones(n, bool)))
    axes = {"bias": (1, 2), "segments": (0,), "positions": (0,)}
    padded = {name: pad(a, axes[name]) if name in axes else a for name, a in inputs.items()}
    return pad(x, (0,)), padded | {"mask": pad(mask, (0,))}


def cut_tokens(result: T, n: int, axes: Mapping[str, int]) -> T:
    """Cut a result to its first n tokens.

    Outside of transformations it is cut on the host: a slice of a JAX array would be compiled for
    every n.

    Args:
        result: A Struct; fields that are None stay.
        n: The number of tokens.
        axes: The axis of tokens of each field that has them, by name.
    """

    def cut_axis(a, axis):
        if isinstance(a, jax.core.Tracer):
            return jax.lax.slice_in_dim(a, 0, n, axis=axis)
        return jax.device_put(np.take(np.asarray(a), np.arange(n), axis))

    arrays = {name: getattr(result, name) for name in axes}
    return result.replace(
        **{name: cut_axis(a, axes[name]) for name, a in arrays.items() if a is not None}
    )
