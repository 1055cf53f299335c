"""Saving and restoring a pytree of arrays by step, each in a file of its own.

Leaves are stored under their path in the tree, on the host, so that a state saved under one
number of devices is restored under another.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.runs.files import RunError, load_arrays, make_folder, write_arrays


def save(folder: str | os.PathLike, step: int, state: Any) -> None:
    """Saves a pytree of arrays (random keys too) as <folder>/<step>.npz, and keeps the newest.

    Args:
        folder: The folder of all steps; made if absent.
        step: A whole number that orders the states.
        state: The pytree; every array must be addressable from this process.

    Raises:
        RunError: The state cannot be written; earlier ones stay.
    """
    make_folder(folder)
    write_arrays(path_of(folder, step), flatten(state), compressed=False)
    for old in steps(folder)[:-1]:
        path_of(folder, old).unlink(missing_ok=True)


def path_of(folder: str | os.PathLike, step: int) -> Path:
    """The file of a step."""
    return Path(folder) / f"{step}.npz"


def steps(folder: str | os.PathLike) -> list[int]:
    """Steps with a saved state, oldest first."""
    return sorted(
        int(p.stem) for p in Path(folder).glob("*.npz") if p.stem.isascii() and p.stem.isdigit()
    )


def restore(folder: str | os.PathLike, step: int, like: Any) -> Any:
    """The state saved at a step, with the structure, dtypes and shardings of `like`.

    Raises:
        ValueError: The state on disk is damaged, or has other names or shapes than `like`.
    """
    try:
        saved = load_arrays(path_of(folder, step))
    except RunError as error:
        raise ValueError(f"checkpoint {step} is damaged: {error}") from error
    return unflatten(saved, like, f"checkpoint {step}")


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def flatten(state: Any) -> dict[str, np.ndarray]:
    """{path: numpy array} of a pytree's leaves, random keys as their data."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {_name(path): np.asarray(_data(leaf)) for path, leaf in leaves}


def unflatten(saved: Mapping[str, Any], like: Any, what: str) -> Any:
    """The pytree that `flatten` took apart, with the structure, dtypes and shardings of `like`.

    Args:
        saved: Arrays by path.
        like: Arrays, or jax.ShapeDtypeStruct.
        what: Whose arrays these are, for the message.

    Raises:
        ValueError: Other names or shapes than those of `like`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(like)
    expected = {_name(path): leaf for path, leaf in leaves}
    for name in sorted(expected.keys() | saved.keys()):
        there = np.shape(saved[name]) if name in saved else None
        here = np.shape(_data(expected[name])) if name in expected else None
        if there != here:
            raise ValueError(f"{what} has {name} of shape {there}, not {here}")
    restored = [_restored(saved[name], leaf) for name, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def _name(path):
    return jax.tree_util.keystr(path, simple=True, separator=".") or "state"


def _data(leaf):
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _restored(saved, like):
    """A saved numpy array as the type, dtype and sharding of `like`."""
    if is_key(like):
        return jax.random.wrap_key_data(saved, impl=jax.random.key_impl(like))
    if saved.dtype.kind == "V":  # numpy has no name for bfloat16 and stores its bytes
        saved = saved.view(like.dtype)
    if isinstance(like, jax.ShapeDtypeStruct):
        return jnp.asarray(saved, like.dtype)
    if isinstance(like, jax.Array):
        return jax.device_put(np.asarray(saved, like.dtype), like.sharding)
    return np.asarray(saved, np.asarray(like).dtype)


def as_json(value):
    """As JSON stores it: string keys, lists, plain numbers."""
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        return np.asarray(value).tolist()
    return str(value) if isinstance(value, Path) else value
