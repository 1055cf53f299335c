"""Recordings of one run of a model: files of its residual stream that any program can write.

A recording is an .npz or .safetensors file with these arrays:

    residual          [L + 1, n, d]   the stream before the first layer and after each layer
    attention_branch  [L, n, d]       what the attention of each layer adds to the stream (optional)
    mlp_branch        [L, n, d]       what its MLP adds (optional)
    mask              [n]             1 for tokens that exist (optional)
    token_ids         [n]             the input (optional)
    logits            [n, vocabulary] the output (optional)

With b examples each array has one more axis before the axis of tokens: [L + 1, b, n, d], [b, n].
NumPy alone writes a recording: `np.savez("a.npz", residual=...)`.
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Int

from rank_collapse.agree.stored_arrays import (
    StoredArray,
    dump_safetensors,
    name_damage,
    open_npz,
    open_safetensors,
)
from rank_collapse.checks import refuse, refuse_if

Branch = Literal["attention_branch", "mlp_branch"]
BRANCHES: tuple[Branch, ...] = ("attention_branch", "mlp_branch")
NAMES = ("residual", *BRANCHES, "mask", "token_ids", "logits")
SUFFIXES = (".npz", ".safetensors")
# What a dtype rounds to: the largest relative error of one rounding.
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class Layer(NamedTuple):
    """One layer of a recording, in float64.

    Attributes:
        index: Index, from 0.
        before, after: The stream [b, n, d].
        branches: {name: [b, n, d]} of those that were recorded.
    """

    index: int
    before: Float[np.ndarray, "b n d"]
    after: Float[np.ndarray, "b n d"]
    branches: dict[str, Float[np.ndarray, "b n d"]]


@dataclass(frozen=True)
class Recording:
    """A file of a run, opened; layers are read one after the other.

    Attributes:
        path: Path of the file.
        arrays: {name: stored array} of `NAMES`.
        metadata: Text by name, such as the "dtype" that the model computed in.
        ignored: Names of other arrays of the file.
    """

    path: Path
    arrays: dict[str, StoredArray]
    metadata: dict[str, str]
    ignored: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Returns the number of layers."""
        return self.arrays["residual"].shape[0] - 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns (examples, tokens, width)."""
        *examples, n, d = self.arrays["residual"].shape[1:]
        return (examples[0] if examples else 1, n, d)

    @property
    def branches(self) -> tuple[str, ...]:
        """Returns the branches that were recorded."""
        return tuple(name for name in BRANCHES if name in self.arrays)

    def read_layers(self) -> Iterator[Layer]:
        """Yields the layers in order; at most one is in memory.

        Raises:
            ValueError: The file is damaged, or a state is not finite.
        """
        with name_damage(self.path):
            streams = {name: self.arrays[name].read_rows() for name in self.branches}
            states = self.arrays["residual"].read_rows()
            before = self._convert("residual", 0, next(states))
            for index in range(self.num_layers):
                after = self._convert("residual", index + 1, next(states))
                branches = {n: self._convert(n, index, next(rows)) for n, rows in streams.items()}
                yield Layer(index, before, after, branches)
                before = after

    def read_mask(self) -> Bool[np.ndarray, "b n"]:
        """Returns a mask of the tokens that exist; all of them if no mask was recorded."""
        b, n, _ = self.shape
        if "mask" not in self.arrays:
            return np.ones((b, n), bool)
        mask = self._read("mask").reshape(b, n)
        refuse_if(
            not np.isin(mask, (0, 1)).all(), f"{self.path}: mask has other values than 0 and 1"
        )
        refuse_if(not mask.any(), f"{self.path}: mask has no token that exists")
        return mask.astype(bool)

    def read_token_ids(self) -> Int[np.ndarray, "b n"] | None:
        """Returns the input, or None where it was not recorded."""
        return (
            None
            if "token_ids" not in self.arrays
            else self._read("token_ids").reshape(self.shape[:2])
        )

    def read_logits(self) -> Float[np.ndarray, "b n v"] | None:
        """Returns the output, or None where it was not recorded."""
        if "logits" not in self.arrays:
            return None
        logits = self._read("logits").astype(np.float32)
        logits = logits.reshape(*self.shape[:2], logits.shape[-1])
        # −∞ is a token that is ruled out.
        wrong = np.isnan(logits[self._exists]).any() or np.isposinf(logits[self._exists]).any()
        refuse_if(wrong, f"{self.path}: logits has a NaN or an infinity")
        return logits

    def _read(self, name):
        with name_damage(self.path):
            return np.stack(list(self.arrays[name].read_rows()))

    def _convert(self, name, index, rows):
        """Return a part in float64 as [b, n, d]; one that is not finite raises an error."""
        states = np.asarray(rows, np.float64).reshape(self.shape)
        if not np.isfinite(states[self._exists]).all():
            where = (
                "before layer 0"
                if name == "residual" and index == 0
                else (f"after layer {index - 1}" if name == "residual" else f"of layer {index}")
            )
            raise ValueError(f"{self.path}: {name} {where} has a NaN or an infinity")
        return np.where(self._exists[..., None], states, 0)

    @cached_property
    def _exists(self):
        return self.read_mask()


def open_recording(path: str | os.PathLike) -> Recording:
    """Opens a recording and checks its names and shapes; no state is read.

    Args:
        path: An .npz or .safetensors file.

    Raises:
        ValueError: The file is not a recording, is damaged, or its arrays do not fit.
    """
    path = Path(path)
    refuse(
        (not path.exists(), f"{path} does not exist"),
        (not path.is_file(), f"{path} is not a file"),
        (path.suffix not in SUFFIXES, f"{path} is neither .npz nor .safetensors"),
    )
    with name_damage(path):
        open_file = open_npz if path.suffix == ".npz" else open_safetensors
        arrays, metadata, ignored = open_file(path, NAMES)
    _check_arrays(path, arrays, ignored)
    return Recording(path, arrays, metadata, tuple(ignored))


def write_recording(
    path: str | os.PathLike, arrays: dict[str, Any], metadata: dict[str, str] | None = None
) -> None:
    """Writes a recording.

    Args:
        path: An .npz or .safetensors file; one that exists is replaced.
        arrays: {name: array} of `NAMES`.
        metadata: Text by name; a .safetensors file has room for it, an .npz file has not.

    Raises:
        ValueError: The arrays do not fit.
    """
    from rank_collapse.runs.files import write_atomically

    path = Path(path)
    refuse_if(path.suffix not in SUFFIXES, f"{path} is neither .npz nor .safetensors")
    arrays = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
    _check_arrays(
        path, {n: StoredArray(a.shape, a.dtype, lambda: iter(())) for n, a in arrays.items()}
    )
    if path.suffix == ".npz":
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        data = buffer.getvalue()
    else:
        data = dump_safetensors(arrays, metadata or {})
    write_atomically(path, data)


def record(source: Any, path: str | os.PathLike, **arrays: object) -> None:
    """Write the recording of a run in JAX or NumPy.

    Args:
        source: A `Trace` of `rc.apply`, or {name: array} of `NAMES`. A trace has its branches
            before their gain and their own norm: of a network that has these, give them as it adds
            them, by `rc.network.compute_added_branches`.
        path: An .npz or .safetensors file.
        arrays: mask=, token_ids= and logits=, in addition to a trace; other names of `NAMES`
            replace arrays of the trace.

    Raises:
        ValueError: The arrays do not fit.
    """
    collected = dict(source) if isinstance(source, Mapping) else collect_trace(source)
    collected |= {name: array for name, array in arrays.items() if array is not None}
    write_recording(path, {name: np.asarray(array) for name, array in collected.items()})


def collect_trace(trace: Any) -> dict[str, Any]:
    """Collect the arrays of a recording from a trace.

    Args:
        trace: Trace from `rc.apply`.
    """
    layers = {name: getattr(trace.layers, name) for name in BRANCHES}
    return {"residual": trace.hidden} | {n: a for n, a in layers.items() if a is not None}


def write_tensors(path: str | os.PathLike, tensors: Mapping[str, object], metadata: dict[str, str]):
    """Writes a recording of PyTorch's tensors, whose bfloat16 NumPy does not know.

    Args:
        path: See `write_recording`.
        tensors: {name: tensor} of `NAMES`, in the host's memory.
        metadata: Text by name.
    """
    arrays = {}
    for name, tensor in tensors.items():
        if str(tensor.dtype) == "torch.bfloat16":
            arrays[name] = tensor.float().numpy().astype(ml_dtypes.bfloat16)
        else:
            arrays[name] = tensor.numpy()
    write_recording(path, arrays, metadata)


def _check_arrays(path: Path, arrays: dict[str, StoredArray], ignored: Sequence[str] = ()) -> None:
    """Raises a ValueError for arrays that do not make a recording.

    Args:
        path: Path of the file, for messages.
        arrays: Its arrays by name.
        ignored: Names of further arrays in the file.
    """
    unknown = sorted((arrays.keys() - set(NAMES)).union(ignored))
    refuse_if(
        "residual" not in arrays,
        f"{path} has no array 'residual'; its arrays are {unknown or 'none'}",
    )
    shape = arrays["residual"].shape
    refuse(
        (
            len(shape) not in (3, 4),
            f"{path}: residual has shape {list(shape)}, not [layers + 1, tokens, width]",
        ),
        (len(shape) > 0 and shape[0] < 2, f"{path}: residual has no layer"),
        (
            min(shape, default=1) < 1,
            f"{path}: residual has shape {list(shape)}, with an axis of length "
            f"{min(shape, default=1)}",
        ),
    )
    depth, tokens = shape[0] - 1, shape[1:-1]  # tokens [n] or [b, n]
    wanted = dict.fromkeys(BRANCHES, (depth, *shape[1:]))
    wanted |= {"mask": tokens, "token_ids": tokens}
    for name, stored in arrays.items():
        if name in wanted and stored.shape != wanted[name]:
            raise ValueError(
                f"{path}: {name} has shape {list(stored.shape)}, not {list(wanted[name])} as "
                "residual needs it"
            )
        if name == "logits" and stored.shape[:-1] != tokens:
            raise ValueError(
                f"{path}: logits has shape {list(stored.shape)}, not {[*tokens, 'vocabulary']}"
            )
        is_float = stored.dtype.kind == "f" or stored.dtype == ml_dtypes.bfloat16
        if name in ("residual", "logits", *BRANCHES) and not is_float:
            raise ValueError(
                f"{path}: {name} has dtype {stored.dtype}, which is not a floating-point type"
            )
