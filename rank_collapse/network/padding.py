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
    """(x, inputs) with `pad_to` tokens; the mask says that those added do not exist.

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
    pairs = [name for name in ("mask", "memory_mask") if np.ndim(inputs.get(name, ())) > 1]
    struct.refuse(
        (n > pad_to, f"pad_to={pad_to} is less than the {n} tokens of x"),
        (
            bool(pairs) or not {"edit", "log"}.isdisjoint(inputs),
            f"pad_to={pad_to} takes masks of tokens [n], and no edit or log",
        ),
    )

    def pad(a, axes):
        xp = jnp if isinstance(a, jax.core.Tracer) else np
        a = xp.asarray(a)
        return xp.pad(a, [(0, pad_to - n) if i in axes else (0, 0) for i in range(a.ndim)])

    mask = as_mask(inputs.get("mask", np.ones(n, bool)))
    axes = {"bias": (1, 2), "segments": (0,), "positions": (0,)}
    padded = {name: pad(a, axes[name]) if name in axes else a for name, a in inputs.items()}
    return pad(x, (0,)), padded | {"mask": pad(mask, (0,))}


def cut_tokens(result: T, n: int, axes: Mapping[str, int]) -> T:
    """The result with the first n tokens alone along the axis of each field that has tokens.

    Outside of transformations it is cut on the host: a slice of a JAX array would be compiled for
    every n.
    """

    def first(a, axis):
        if isinstance(a, jax.core.Tracer):
            return jax.lax.slice_in_dim(a, 0, n, axis=axis)
        return jax.device_put(np.take(np.asarray(a), np.arange(n), axis))

    fields = {name: (getattr(result, name), axis) for name, axis in axes.items()}
    return result.replace(**{k: first(a, axis) for k, (a, axis) in fields.items() if a is not None})
