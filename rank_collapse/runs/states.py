"""Saving and restoring a pytree of arrays by step, each step in its own file.

Leaves are stored under their path in the tree, on the host, so a state saved with one number of
devices can be restored with another.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.annotations import Leaf, Tree
from rank_collapse.runs.files import RunError, load_arrays, make_folder, write_arrays


def save_state(folder: str | os.PathLike, step: int, state: Tree) -> None:
    """Save a pytree of arrays (random keys too) as <folder>/<step>.npz, and keep the newest.

    Args:
        folder: The folder of all steps; made if absent.
        step: A whole number that orders the states.
        state: The pytree; every array must be addressable from this process.

    Raises:
        RunError: The state cannot be written; earlier ones stay.
    """
    make_folder(folder)
    write_arrays(state_path(folder, step), flatten_state(state), compressed=False)
    for old in list_steps(folder)[:-1]:
        state_path(folder, old).unlink(missing_ok=True)


def state_path(folder: str | os.PathLike, step: int) -> Path:
    """Return the file of a step."""
    return Path(folder) / f"{step}.npz"


def list_steps(folder: str | os.PathLike) -> list[int]:
    """List the steps with a saved state, oldest first."""
    return sorted(
        int(p.stem) for p in Path(folder).glob("*.npz") if p.stem.isascii() and p.stem.isdigit()
    )


def restore_state(folder: str | os.PathLike, step: int, like: Tree) -> Any:
    """Restore the state saved at a step.

    Args:
        folder, step: See `save_state`.
        like: A pytree with the structure, dtypes and shardings of the result.

    Raises:
        ValueError: The state on disk is damaged, or has other names or shapes than `like`.
    """
    try:
        saved = load_arrays(state_path(folder, step))
    except RunError as error:
        raise ValueError(f"checkpoint {step} is damaged: {error}") from error
    return unflatten_state(saved, like, f"checkpoint {step}")


def is_key(leaf: Leaf) -> bool:
    """Return whether a leaf is an array of random keys."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def flatten_state(state: Tree) -> dict[str, np.ndarray]:
    """Convert a pytree to {path: numpy array} of its leaves, random keys as their data."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {_leaf_name(path): np.asarray(_leaf_array(leaf)) for path, leaf in leaves}


def unflatten_state(saved: Mapping[str, object], like: Tree, subject: str) -> Any:
    """Restore the pytree that `flatten_state` took apart.

    Args:
        saved: Arrays by path.
        like: Arrays, or jax.ShapeDtypeStruct, with the structure, dtypes and shardings of the
            result.
        subject: Owner of the arrays, for the message.

    Raises:
        ValueError: Names or shapes that differ from those of `like`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(like)
    expected = {_leaf_name(path): leaf for path, leaf in leaves}
    for name in sorted(expected.keys() | saved.keys()):
        shape = np.shape(saved[name]) if name in saved else None
        wanted = np.shape(_leaf_array(expected[name])) if name in expected else None
        if shape != wanted:
            raise ValueError(f"{subject} has {name} of shape {shape}, not {wanted}")
    restored = [_restore_leaf(saved[name], leaf) for name, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def name_parts(tree: Any) -> dict[str, Any]:
    """Flatten a nested dictionary to {path: leaf}, with "/" between the names of the levels."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _leaf_name(path):
    return jax.tree_util.keystr(path, simple=True, separator=".") or "state"


def _leaf_array(leaf):
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _restore_leaf(saved, like):
    """Convert a saved NumPy array to the type, dtype and sharding of the leaf that it replaces.

    Args:
        saved: The array; the data of a random key.
        like: The leaf: a random key, an array, or a `jax.ShapeDtypeStruct`.
    """
    if is_key(like):
        return jax.random.wrap_key_data(saved, impl=jax.random.key_impl(like))
    if saved.dtype.kind == "V":  # numpy has no name for bfloat16 and stores its bytes
        saved = saved.view(like.dtype)
    if isinstance(like, jax.ShapeDtypeStruct):
        return jnp.asarray(saved, like.dtype)
    if isinstance(like, jax.Array):
        return jax.device_put(np.asarray(saved, like.dtype), like.sharding)
    return np.asarray(saved, np.asarray(like).dtype)


def as_json(value: object) -> Any:
    """Convert to what JSON stores: string keys, lists, plain numbers."""
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        return np.asarray(value).tolist()
    return str(value) if isinstance(value, Path) else value
