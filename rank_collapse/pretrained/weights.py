"""Named tensors of known shape, for the mappings of families, and layers read one by one.

A mapping asks for tensors by name and shape. They come from a checkpoint, or are drawn as the
architecture initialises them; the mapping does not know which. A layer is kept as it lies in the
file: its dtype, and its axes in the file's order. It becomes the parameters of the network on the
device, where the conversion costs least.
"""

import concurrent.futures
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse import struct
from rank_collapse.annotations import AnyArray, ArrayLike, DType, Leaf, Tree
from rank_collapse.checks import refuse, refuse_if
from rank_collapse.printed import format_count


class Weights:
    """The tensors of one model, checked against the shapes its config implies.

    Where they are `lazy`, `stack` gives `LazyLayers` and `table` a `Table`. `checks` says whether
    `take` refuses values that are not finite.
    """

    is_random = False

    def __init__(self, dtype: DType = jnp.float32, *, lazy: bool = False):
        self.dtype, self.lazy = np.dtype(dtype), lazy
        self.checks = True
        refuse_if(
            jax.dtypes.canonicalize_dtype(self.dtype) != self.dtype,
            f"dtype={self.dtype} needs jax_enable_x64",
        )

    def has_tensor(self, name: str) -> bool:
        """Check whether the model has the tensor."""
        raise NotImplementedError

    def take(self, name: str, *shape: int) -> np.ndarray:
        """Read one tensor of the given shape."""
        raise NotImplementedError

    def table(self, name: str, rows: int, width: int) -> Tree:
        """Read a table of tokens: as `take` gives it, or a `Table` where layers are `lazy`.

        Args:
            name: Name of the tensor.
            rows, width: Shape of the table.
        """
        return self._lazy_table(name, rows, width) if self.lazy else self.take(name, rows, width)

    def _lazy_table(self, name, rows, width):
        """Return a table [rows, width] whose rows are read when they are asked for; here from the
        whole tensor."""
        table = self.take(name, rows, width)
        return Table(lambda first, last: table[first:last], (rows, width))

    def stack(self, rows: Iterable[object], layer: Callable[[object], Tree]) -> Tree:
        """Stack layer(row) of every row: one leading layer axis, no second copy in memory.

        Args:
            rows: Arguments for `layer`.
            layer: row → a tree of arrays.

        Returns:
            A tree of arrays; `LazyLayers` where layers are `lazy`.
        """
        if self.lazy:
            return LazyLayers(self, rows, layer)
        stacked, treedef, rows = [], None, list(rows)
        for i, row in enumerate(rows):
            leaves, treedef = jax.tree.flatten(layer(row))
            if not stacked:
                stacked = [_allocate_aligned((len(rows), *a.shape), self.dtype) for a in leaves]
            for stacked_leaf, leaf in zip(stacked, leaves, strict=True):
                stacked_leaf[i] = leaf
        for i in range(len(stacked)):
            stacked[i] = _on_device(stacked[i])
        return jax.tree.unflatten(treedef, stacked)

    def to_device(self, tree: Tree) -> Tree:
        """Move the leaves of a tree that is not stacked to JAX, in the weights' dtype."""

        def move_leaf(a):
            """Copy one array to the device in the weights' dtype; a `Table` stays."""
            if isinstance(a, Table):
                return a
            copy = _allocate_aligned(a.shape, self.dtype)
            copy[...] = a
            return _on_device(copy)

        return jax.tree.map(move_leaf, tree)


_HEAD = "lm_head.weight"


class CheckpointWeights(Weights):
    """Tensors of a checkpoint, whatever prefix its model class put before their names."""

    def __init__(
        self,
        checkpoint: Any,
        anchors: Iterable[str],
        dtype: DType = jnp.float32,
        *,
        lazy: bool = False,
        tied: bool = False,
    ):
        """Find the prefix of all names: the text before one of the `anchors`.

        Args:
            checkpoint: `Tensors` of the model.
            anchors: Ends of names, one of which is in every checkpoint.
            dtype, lazy: See `Weights`.
            tied: Whether the file may have the head in place of the table of tokens.
        """
        super().__init__(dtype, lazy=lazy)
        self.checkpoint = checkpoint
        self.names = set(checkpoint.names)
        anchors = tuple(anchors)
        prefixes = []
        for anchor, name in itertools.product(anchors, self.names):
            prefix = name.removesuffix(anchor)
            is_whole_part = not prefix or prefix.endswith(".")
            if name.endswith(anchor) and is_whole_part:
                prefixes.append(prefix)
        self.where = checkpoint.folder / checkpoint.file
        self.tied = anchors[0] if tied and not prefixes and _HEAD in self.names else None
        if self.tied:
            prefixes = ["model." if any(n.startswith("model.") for n in self.names) else ""]
        if not prefixes:
            raise ValueError(f"{self.where}: tensor {' or '.join(map(repr, anchors))} is missing")
        self.prefix = min(prefixes, key=len)

    def _name_in_file(self, name):
        """Return the name in the file; old files call a norm's weight and bias gamma and beta."""
        full = self.prefix + name
        if name == self.tied:
            return _HEAD
        if full not in self.names and name in self.names:
            return name  # what stands outside of the model proper, such as a head
        for new, old in (("weight", "gamma"), ("bias", "beta")):
            if full not in self.names and full.endswith("." + new):
                candidate = full[: -len(new)] + old
                if candidate in self.names:
                    return candidate
        return full

    def has_tensor(self, name: str) -> bool:
        """Check whether the checkpoint has the tensor; for a name that ends in ".", any below it.

        Args:
            name: Name without the prefix.
        """
        if name.endswith("."):
            return any(n.startswith(self.prefix + name) for n in self.names)
        return self._name_in_file(name) in self.names

    def take(self, name: str, *shape: int) -> np.ndarray:
        """Read one tensor.

        Args:
            name: Name without the prefix.
            *shape: Shape that the config implies.

        Raises:
            ValueError: Missing, of another shape than the config implies, or of whole numbers.
        """
        return self.checkpoint.read(self._find_tensor(name, shape), finite=self.checks)

    def _lazy_table(self, name, rows, width):
        """Return a table [rows, width] whose rows are read from the file when they are asked
        for."""
        stored = self._find_tensor(name, (rows, width))
        return Table(lambda a, b: self.checkpoint.read(stored, slice(a, b)), (rows, width))

    def _find_tensor(self, name, shape):
        """Return the name in the file of a tensor that exists in this shape.

        Args:
            name: Name without the prefix.
            shape: Shape that the config implies.

        Raises:
            ValueError: Missing, of another shape, or of whole numbers.
        """
        stored = self._name_in_file(name)
        where = self.where
        refuse_if(stored not in self.names, f"{where}: tensor {stored!r} is missing")
        _, dtype, actual_shape, _ = self.checkpoint.entries[stored]
        refuse_if(
            actual_shape != shape,
            f"{where}: tensor {stored!r} has shape {actual_shape}, but config.json implies {shape}",
        )
        refuse_if(
            dtype.kind not in "fV",
            f"{where}: tensor {stored!r} has dtype {dtype}; a quantised checkpoint is not "
            "supported; save it in bfloat16 or float32",
        )
        return stored

    def check_depth(self, layer: str, depth: int) -> None:
        """Raise an error for more or fewer layers in the file than in the config.

        Done first: a depth that only the config claims must not make the memory for its layers.

        Args:
            layer: Name of a layer with {} for its number.
            depth: Layers by the config.
        """
        implied = f"but config.json implies {format_count(depth, 'layer')}"
        last, beyond = f"{layer.format(depth - 1)}.", f"{layer.format(depth)}."
        refuse(
            (
                not self.has_tensor(last),
                f"{self.where}: tensor {self.prefix + last}* is missing, {implied}",
            ),
            (
                self.has_tensor(beyond),
                f"{self.where}: tensors {self.prefix + beyond}* exist, {implied}",
            ),
        )


def _allocate_aligned(shape, dtype):
    """Allocate an array that begins at a multiple of 64 bytes, as XLA wants its buffers."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count].view(dtype).reshape(shape)


def _on_device(array):
    """Move an array to JAX: on a CPU the same memory, elsewhere a copy made before this returns."""
    if jax.default_backend() == "cpu" and array.dtype.kind == "f":
        return jax.dlpack.from_dlpack(array)
    return jnp.asarray(array).block_until_ready()


class Stored(struct.Struct):
    """A tensor in the order of the file."""

    data: AnyArray  # The values
    # Where each axis of the tensor is in `data`; static
    axes: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def value(self) -> jax.Array:
        """Return the tensor; inside a program its transposition joins the next product."""
        return jnp.transpose(self.data, self.axes)


def as_stored(view: np.ndarray) -> Stored:
    """Convert a view to its memory in one piece and the order of its axes."""
    order_in_memory = sorted(range(view.ndim), key=lambda axis: -abs(view.strides[axis]))
    data = np.ascontiguousarray(view.transpose(order_in_memory))
    order_of_view = tuple(order_in_memory.index(axis) for axis in range(view.ndim))
    return Stored(data, order_of_view)


def stored_values(tree: Tree) -> Tree:
    """Return the tensors of a tree of `Stored`."""
    return jax.tree.map(lambda s: s.value, tree, is_leaf=lambda s: isinstance(s, Stored))


@jax.jit
def _finite_on_device(tree):
    return jnp.stack([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(tree)]).all()


def _is_finite(tree):
    """Return whether all numbers of a tree are finite."""
    if jax.default_backend() == "cpu":  # by NumPy in the same memory, which compiles nothing
        return all(np.isfinite(a).all() for a in jax.tree.leaves(tree))
    return _finite_on_device(tree)


class Table:
    """A table whose rows `read(first, last)`: the tokens' embedding, or a language-model head."""

    def __init__(self, read: Callable[[int, int], np.ndarray], shape: tuple[int, int]):
        self.read, self.shape = read, shape

    def rows(self, indices: ArrayLike) -> np.ndarray:
        """Read some of the rows, one by one."""
        return np.concatenate([self.read(int(i), int(i) + 1) for i in indices])

    def chunks(self, size: int) -> Iterable[tuple[int, np.ndarray]]:
        """Yield (first row, rows) of the full table, `size` at a time."""
        for first in range(0, self.shape[0], size):
            yield first, self.read(first, min(first + size, self.shape[0]))


class Unembedding(NamedTuple):
    """A causal language model's head: logits z = s (Y Wᵀ + b) of the output Y [n, d].

    With a cap c, c tanh(z/c) takes their place.

    Attributes:
        table: W [vocab, d], an array or a `Table`.
        bias: b [vocab]; None for none.
        softcap: c; None for none.
        scale: s.
    """

    table: Leaf
    bias: Leaf | None = None
    softcap: float | None = None
    scale: float = 1.0


class LazyLayers:
    """The rows of a stack, each read by `layer(row)` on request; the next one is read meanwhile."""

    def __init__(self, weights: "Weights", rows: Sequence[object], layer: Callable[[object], Tree]):
        self.weights, self.rows, self.layer = weights, list(rows), layer
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "weights")
        self._coming: dict[int, concurrent.futures.Future] = {}
        self._current: tuple[int, Tree] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, coming: int | None = None) -> Tree:
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
        """Free the memory."""
        for pending in self._coming.values():
            pending.cancel()
        self._coming, self._current = {}, None

    def _read(self, index):
        return jax.tree.map(as_stored, self.layer(self.rows[index]))

    def _move_to_device(self, index, stored):
        """Move the parameters of a layer to the device in the weights' dtype, and check that they
        are finite.

        If they are not, the layer is read again with a check of each tensor, so that the error
        names the tensor.

        Args:
            index: Index of the layer's row.
            stored: The parameters as they are in the file.

        Raises:
            ValueError: A value is not finite.
        """
        # One tensor after another, so that the file's copy of each goes before the next one's.
        leaves, treedef = jax.tree.flatten(stored)
        del stored
        for i in range(len(leaves)):
            leaves[i] = jnp.asarray(leaves[i]).astype(self.weights.dtype)
        device_tree = jax.tree.unflatten(treedef, leaves)
        if not (self.weights.is_random or _is_finite(device_tree)):
            self.weights.checks = True
            self.layer(self.rows[index])  # names the tensor
            raise ValueError(f"layer {self.rows[index]} has values that are not finite")
        return device_tree
