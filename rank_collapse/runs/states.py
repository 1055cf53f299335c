"""Saving and restoring a pytree of arrays by step, through orbax.

Leaves are stored under their path in the tree, on the host, so that a state saved under one
number of devices is restored under another. Beside orbax's files lies SHA256SUMS, as `sha256sum`
writes and checks it: files that changed since are refused before orbax opens them.
"""

import gc
import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def save(folder: str | os.PathLike, step: int, state: Any, keep: int = 1) -> None:
    """Saves a pytree of arrays (random keys too) as <folder>/<step>; keeps the newest `keep`.

    Args:
        folder: The folder of all steps; made if absent.
        step: A whole number that orders the states.
        state: The pytree; every array must be addressable from this process.
        keep: How many states remain.

    Raises:
        OSError: The state cannot be written; earlier ones stay.
    """
    folder = Path(folder)
    final, temporary = folder / str(step), folder / f"tmp-{step}"
    _clear_unfinished(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = flatten(state)
    with _checkpointer() as checkpointer:
        target = temporary.absolute()
        _, failed = _attempt(lambda: checkpointer.save(target, arrays))
    if failed:
        _clear_unfinished(folder)
        code = re.search(r"os_error_code='(\d+)'", failed)
        raise OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(failed[:300])
    (temporary / _SUMS).write_text(_sums(temporary))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / str(old), ignore_errors=True)


def steps(folder: str | os.PathLike) -> list[int]:
    """Steps with a saved state, oldest first."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def restore(folder: str | os.PathLike, step: int, like: Any) -> Any:
    """The state saved at a step, with the structure, dtypes and shardings of `like`.

    Raises:
        ValueError: The state on disk is damaged, or has other names or shapes than `like`.
    """
    path = (Path(folder) / str(step)).absolute()
    try:
        whole = (path / _SUMS).read_text() == _sums(path)
    except (OSError, UnicodeDecodeError):
        whole = False
    if not whole:
        raise ValueError(f"checkpoint {step} is damaged: its files are not those of {_SUMS}")
    with _checkpointer() as checkpointer:
        saved, failed = _attempt(lambda: dict(checkpointer.restore(path)))
    if failed:
        raise ValueError(f"checkpoint {step} cannot be read ({failed[:200]})")
    return unflatten(saved, like, f"checkpoint {step}")


_SUMS = "SHA256SUMS"


def _sums(folder):
    """A line for each file below a folder: its SHA-256 and its path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / _SUMS)
    lines = [(hashlib.sha256(p.read_bytes()).hexdigest(), p.relative_to(folder)) for p in files]
    return "".join(f"{digest}  {name.as_posix()}\n" for digest, name in lines)


def _clear_unfinished(folder):
    """Deletes what a save that was cut off has left, under orbax's temporary names too."""
    for unfinished in folder.glob("tmp-*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def _attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """(what orbax returns, ""), or (None, what went wrong in one line).

    Its threads print what they raise, and it leaves coroutines that never end, which complain when
    they are collected: here neither is heard.
    """
    logger, hook = logging.getLogger("absl"), sys.unraisablehook
    before, logger.disabled = logger.disabled, True
    sys.unraisablehook = lambda _: None
    try:
        try:
            return call(), ""
        except Exception as error:  # it and what it reads with raise nearly any
            failed = " ".join(str(error).split()) or type(error).__name__
        gc.collect()
        return None, failed
    finally:
        logger.disabled, sys.unraisablehook = before, hook


def _checkpointer():
    # Imported here: orbax takes a second to import, and most runs keep no checkpoint.
    import orbax.checkpoint as ocp

    if jax.process_count() == 1:
        return ocp.PyTreeCheckpointer()
    # By default all processes would have to take part; here one of them reads and writes alone.
    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


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
    if isinstance(like, jax.ShapeDtypeStruct):
        return jnp.asarray(saved, like.dtype)
    if isinstance(like, jax.Array):
        return jax.device_put(np.asarray(saved, like.dtype), like.sharding)
    return np.asarray(saved, np.asarray(like).dtype)
