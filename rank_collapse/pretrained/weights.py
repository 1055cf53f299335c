"""What every family's mapping is written with: named tensors of known shape, stacked by layer.

A mapping asks for tensors by name and shape. They come from a checkpoint, or are drawn as the
architecture initialises them; the mapping does not know which.
"""

import contextlib
import copy
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.network import layers
from rank_collapse.network.attention import AttentionParams
from rank_collapse.pretrained.lazy import LazyLayers, Table

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "linear": "identity",
}


def activation(name: Any) -> str:
    """Our name of an activation.

    Raises:
        ValueError: On one that is not known.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {tuple(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class Draw(NamedTuple):
    """How a tensor is drawn at initialisation: normal(0, std), else filled with `value`.

    `zero_row`: a row set to zero (the padding token); `truncate`: normal cut at two units.
    """

    std: float | None = None
    value: float = 0.0
    zero_row: int | None = None
    truncate: bool = False


class Weights:
    """The tensors of one model, checked against the shapes its config implies.

    Attributes:
        drawn: Whether they are drawn rather than read.
        lazy: Whether layers and tables are left where they are until they are asked for: `stack`
            then gives `LazyLayers` and `table` a `Table`.
        only_shapes: Whether `take` checks names and shapes and gives a zero of that shape; see
            `shapes`.
    """

    drawn = False

    def __init__(self, dtype: Any = jnp.float32, *, lazy: bool = False):
        self.dtype, self.lazy = np.dtype(dtype), lazy
        self._checks, self.only_shapes = True, False
        if jax.dtypes.canonicalize_dtype(self.dtype) != self.dtype:
            raise ValueError(f"dtype={self.dtype} needs jax_enable_x64")

    def has(self, name: str) -> bool:
        """Whether the model has the tensor."""
        raise NotImplementedError

    def take(self, name: str, *shape: int) -> np.ndarray:
        """One tensor of the given shape."""
        raise NotImplementedError

    def table(self, name: str, rows: int, width: int) -> Any:
        """A table of tokens: as `take` gives it, or a `Table` where layers are `lazy`."""
        return self._table(name, rows, width) if self.lazy else self.take(name, rows, width)

    def _table(self, name, rows, width):
        whole = self.take(name, rows, width)
        return Table(lambda first, last: whole[first:last], (rows, width))

    def shapes(self) -> "Weights":
        """The same model with `only_shapes`: another object, for a thread may be reading this."""
        found = copy.copy(self)
        found.only_shapes = True
        return found

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Inside, `take` refuses values that are not finite, as it does where nothing is lazy."""
        before, self._checks = self._checks, True
        try:
            yield
        finally:
            self._checks = before

    def unchecked(self) -> None:
        """From now on `take` leaves it to its caller to look for values that are not finite."""
        self._checks = False

    def first(self, *names: str) -> str:
        """The first of the names that the model has; the last where it has none of them."""
        return next((name for name in names if self.has(name)), names[-1])

    def linear(self, name: str, d_in: int, d_out: int, bias: bool = True):
        """(w [d_in, d_out], b [d_out] or None) of a torch Linear."""
        w = self.take(f"{name}.weight", d_out, d_in).T
        return w, self.take(f"{name}.bias", d_out) if bias else None

    def heads_in(self, name: str, d: int, h: int, k: int, bias: bool = True):
        """(w [h, d, k], b [h, k] or None) of a torch Linear from tokens to heads."""
        w, b = self.linear(name, d, h * k, bias)
        return w.reshape(d, h, k).transpose(1, 0, 2), None if b is None else b.reshape(h, k)

    def heads_out(self, name: str, d: int, h: int, v: int, bias: bool = True):
        """(w [h, v, d], b [d] or None) of a torch Linear from heads to tokens."""
        w, b = self.linear(name, h * v, d, bias)
        return w.reshape(h, v, d), b

    def norm(self, name: str, d: int, bias: bool = True) -> layers.NormParams:
        """Gain and bias of a norm."""
        gain = self.take(f"{name}.weight", d)
        return layers.NormParams(gain=gain, bias=self.take(f"{name}.bias", d) if bias else None)

    def attention(
        self, names: tuple[str, str, str, str], config: Any, bias: bool = True
    ) -> AttentionParams:
        """Attention from four torch Linears: query, key, value, output."""
        d, h, k, v = config.d_model, config.num_heads, config.qk_width, config.v_width
        w_q, b_q = self.heads_in(names[0], d, h, k, bias)
        w_k, b_k = self.heads_in(names[1], d, h, k, bias)
        w_v, b_v = self.heads_in(names[2], d, h, v, bias)
        w_o, b_o = self.heads_out(names[3], d, h, v, bias)
        return AttentionParams(
            w_q=w_q, b_q=b_q, w_k=w_k, b_k=b_k, w_v=w_v, b_v=b_v, w_o=w_o, b_o=b_o
        )

    def mlp(self, name_in: str, name_out: str, d: int, f: int) -> layers.MLPParams:
        """An MLP from two torch Linears."""
        w_in, b_in = self.linear(name_in, d, f)
        w_out, b_out = self.linear(name_out, f, d)
        return layers.MLPParams(w_in=w_in, b_in=b_in, w_out=w_out, b_out=b_out)

    def stack(self, rows: Iterable[Any], layer: Callable[[Any], Any]) -> Any:
        """layer(row) for every row, stacked: one leading layer axis, no second copy in memory.

        Where layers are `lazy`, `LazyLayers` in their place.
        """
        if self.lazy:
            return LazyLayers(self, rows, layer)
        stacked, treedef, rows = [], None, list(rows)
        for i, row in enumerate(rows):
            leaves, treedef = jax.tree.flatten(layer(row))
            if not stacked:
                stacked = [_aligned((len(rows), *a.shape), self.dtype) for a in leaves]
            for whole, leaf in zip(stacked, leaves, strict=True):
                whole[i] = leaf
        for i in range(len(stacked)):
            stacked[i] = _on_device(stacked[i])
        return jax.tree.unflatten(treedef, stacked)

    def to_device(self, tree: Any) -> Any:
        """The leaves of a tree that is not stacked, as JAX arrays of the weights' dtype."""

        def move(a):
            if isinstance(a, Table):
                return a
            own = _aligned(a.shape, self.dtype)
            own[...] = a
            return _on_device(own)

        return jax.tree.map(move, tree)


class CheckpointWeights(Weights):
    """Tensors of a checkpoint, whatever prefix its model class put before their names."""

    def __init__(
        self,
        checkpoint: Any,
        anchors: Iterable[str],
        dtype: Any = jnp.float32,
        *,
        lazy: bool = False,
    ):
        """Finds the prefix: what stands before one of the `anchors`.

        Raises:
            ValueError: None of the anchors is in the checkpoint.
        """
        super().__init__(dtype, lazy=lazy)
        self.checkpoint = checkpoint
        self.names = set(checkpoint.names)
        anchors = tuple(anchors)
        prefixes = [
            name[: -len(anchor)]
            for anchor in anchors
            for name in self.names
            if name.endswith(anchor) and (name == anchor or name[: -len(anchor)].endswith("."))
        ]
        if not prefixes:
            where = checkpoint.folder / checkpoint.file
            raise ValueError(f"{where}: tensor {' or '.join(map(repr, anchors))} is missing")
        self.prefix = min(prefixes, key=len)

    def _stored(self, name):
        """The name in the file; old files call a norm's weight and bias gamma and beta."""
        full = self.prefix + name
        if full not in self.names and name in self.names:
            return name  # what stands outside of the model proper, such as a head
        for new, old in (("weight", "gamma"), ("bias", "beta")):
            if full not in self.names and full.endswith("." + new):
                candidate = full[: -len(new)] + old
                if candidate in self.names:
                    return candidate
        return full

    def has(self, name: str) -> bool:
        """Whether the checkpoint has the tensor, or any that begins with a name ending in '.'."""
        if name.endswith("."):
            return any(n.startswith(self.prefix + name) for n in self.names)
        return self._stored(name) in self.names

    def take(self, name: str, *shape: int) -> np.ndarray:
        """One tensor.

        Raises:
            ValueError: Missing, of another shape than the config implies, or of whole numbers.
        """
        stored = self._checked(name, shape)
        if self.only_shapes:
            return np.broadcast_to(np.zeros((), self.checkpoint.dtype(stored)), shape)
        return self.checkpoint.read(stored, finite=self._checks)

    def _table(self, name, rows, width):
        stored = self._checked(name, (rows, width))
        return Table(functools.partial(self.checkpoint.read_rows, stored), (rows, width))

    def _checked(self, name, shape):
        """The name in the file of a tensor that is there in this shape."""
        stored = self._stored(name)
        where = self.checkpoint.folder / self.checkpoint.file
        if stored not in self.names:
            raise ValueError(f"{where}: tensor {stored!r} is missing")
        found = self.checkpoint.shape(stored)
        if tuple(found) != shape:
            raise ValueError(
                f"{where}: tensor {stored!r} has shape {tuple(found)}, but config.json "
                f"implies {shape}"
            )
        dtype = np.dtype(self.checkpoint.dtype(stored))
        if dtype.kind not in "fV":
            raise ValueError(
                f"{where}: tensor {stored!r} is of {dtype}: a quantised checkpoint is not "
                "supported; save it in bfloat16 or float32"
            )
        return stored

    def check_depth(self, layer: str, depth: int) -> None:
        """Refuses more or fewer layers in the file than in the config; `layer` is a name with {}.

        Done first: a depth that only the config claims must not make the memory for its layers.
        """
        last = layer.format(depth - 1) + "."
        if not self.has(last):
            where = self.checkpoint.folder / self.checkpoint.file
            raise ValueError(
                f"{where}: tensor {self.prefix + last}* is missing, but config.json implies "
                f"{depth} layers"
            )
        beyond = layer.format(depth) + "."
        if self.has(beyond):
            where = self.checkpoint.folder / self.checkpoint.file
            raise ValueError(
                f"{where}: tensors {self.prefix + beyond}* exist, but config.json implies "
                f"{depth} layers"
            )


class RandomWeights(Weights):
    """Tensors drawn as a family initialises them; each depends on the key and its name only."""

    drawn = True

    def __init__(
        self,
        key: Any,
        draw: Callable[[str], Draw],
        dtype: Any = jnp.float32,
        *,
        lazy: bool = False,
    ):
        super().__init__(dtype, lazy=lazy)
        self.seed = [int(word) for word in np.ravel(jax.random.key_data(key))]
        self.draw = draw

    def has(self, name: str) -> bool:
        """True: what the config asks for, the model has."""
        return not name.endswith(".")

    def check_depth(self, layer: str, depth: int) -> None:
        """Nothing to check."""

    def take(self, name: str, *shape: int) -> np.ndarray:
        """One tensor, drawn."""
        how = self.draw(name)
        if self.only_shapes:
            return np.broadcast_to(np.zeros((), np.float32), shape)
        if how.std is None:
            return np.full(shape, how.value, self.dtype)
        # numpy draws a hundred million normals several times faster than jax.random on a CPU.
        generator = np.random.Generator(np.random.Philox([*self.seed, zlib.crc32(name.encode())]))
        drawn = generator.standard_normal(shape, np.float32)
        while how.truncate and (far := np.abs(drawn) > 2).any():
            drawn[far] = generator.standard_normal(int(far.sum()), np.float32)
        drawn *= np.float32(how.std)
        if how.zero_row is not None and how.zero_row < shape[0]:
            drawn[how.zero_row] = 0.0
        return drawn


def _aligned(shape, dtype):
    """An uninitialised array that begins at a multiple of 64 bytes, as XLA wants its buffers."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count].view(dtype).reshape(shape)


def _on_device(array):
    """The array in JAX: on a CPU the same memory, elsewhere a copy made before this returns."""
    if jax.default_backend() == "cpu" and array.dtype.kind == "f":
        return jax.dlpack.from_dlpack(array)
    return jnp.asarray(array).block_until_ready()
