"""Weights that are read when they are needed: layers one by one, tables by rows.

A layer is kept as it lies in the file: its dtype, and its axes in the file's order. It becomes the
parameters of the network on the device, where the conversion costs least.
"""

import concurrent.futures
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse import struct


class Stored(struct.Struct):
    """A tensor in the order of the file."""

    data: Any  # The values
    # Where each axis of the tensor is in `data`; static
    axes: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def value(self) -> jax.Array:
        """Returns the tensor; inside a program its transposition joins the next product."""
        return jnp.transpose(self.data, self.axes)


def as_stored(view: np.ndarray) -> Stored:
    """Convert a view to its memory in one piece and the order of its axes."""
    order = sorted(range(view.ndim), key=lambda i: -abs(view.strides[i]))
    data = np.ascontiguousarray(view.transpose(order))
    return Stored(data, tuple(order.index(i) for i in range(view.ndim)))


def stored_values(tree: Any) -> Any:
    """Returns the tensors of a tree of `Stored`."""
    return jax.tree.map(lambda s: s.value, tree, is_leaf=lambda s: isinstance(s, Stored))


@jax.jit
def _finite_on_device(tree):
    return jnp.stack([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(tree)]).all()


def _is_finite(tree):
    if jax.default_backend() == "cpu":  # by NumPy in the same memory, which compiles nothing
        return all(np.isfinite(a).all() for a in jax.tree.leaves(tree))
    return _finite_on_device(tree)


class Table:
    """A table whose rows `read(first, last)`: the tokens' embedding, or a language-model head."""

    def __init__(self, read: Callable[[int, int], np.ndarray], shape: tuple[int, int]):
        self.read, self.shape = read, shape

    def rows(self, indices: Any) -> np.ndarray:
        """Read some of the rows, each by itself."""
        return np.concatenate([self.read(int(i), int(i) + 1) for i in indices])

    def chunks(self, size: int) -> Iterable[tuple[int, np.ndarray]]:
        """Yields (first row, rows) of the full table, `size` at a time."""
        for first in range(0, self.shape[0], size):
            yield first, self.read(first, min(first + size, self.shape[0]))


class Unembedding(NamedTuple):
    """A causal language model's head: logits z = s (Y Wᵀ + b) of the output Y [n, d].

    With a cap c, c tanh(z/c) takes their place.
    """

    table: Any  # W [vocab, d], an array or a `lazy.Table`
    bias: Any = None  # b [vocab]; None for none
    softcap: float | None = None  # c; None for none
    scale: float = 1.0  # s


class LazyLayers:
    """The rows of a stack, each read by `layer(row)` on request; the next one is read meanwhile."""

    def __init__(self, weights: Any, rows: Sequence[Any], layer: Callable[[Any], Any]):
        self.weights, self.rows, self.layer = weights, list(rows), layer
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "weights")
        self._coming: dict[int, concurrent.futures.Future] = {}
        self._current: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, coming: int | None = None) -> Any:
        """Read one row's parameters to the device, in the weights' dtype, as a tree of `Stored`.

        Args:
            index: Index of the row.
            coming: The row that a thread reads from now on; None for none.

        Raises:
            ValueError: A tensor that is missing, of another shape or not finite.
        """
        if self._current is None or self._current[0] != index:
            self._current = None  # frees its memory before the next row is on the device
            pending = self._coming.pop(index, None)
            stored = self._read(index) if pending is None else pending.result()
            pending = None  # it holds the row, too
            self._current = index, self._move_to_device(index, stored)
        if coming is not None and coming != index and coming not in self._coming:
            self._coming = {coming: self._reader.submit(self._read, coming)}
        return self._current[1]

    def drop(self) -> None:
        """Frees the memory."""
        for pending in self._coming.values():
            pending.cancel()
        self._coming, self._current = {}, None

    def _read(self, index):
        return jax.tree.map(as_stored, self.layer(self.rows[index]))

    def _move_to_device(self, index, stored):
        """Move a row to the device in the weights' dtype, and check that it is finite."""
        # One tensor after another, so that the file's copy of each goes before the next one's.
        leaves, treedef = jax.tree.flatten(stored)
        del stored
        for i in range(len(leaves)):
            leaves[i] = jnp.asarray(leaves[i]).astype(self.weights.dtype)
        device_tree = jax.tree.unflatten(treedef, leaves)
        if not (self.weights.is_random or _is_finite(device_tree)):
            self.weights.checks = True
            self.layer(self.rows[index])  # names the tensor
            raise ValueError(f"layer {self.rows[index]}: values that are not finite")
        return device_tree
