"""Compiled programs that outlive a process: JAX's persistent cache, on by default."""

import contextlib
import functools
import glob
import hashlib
import os
import platform
import re
import warnings
from pathlib import Path

import jax
import platformdirs


def cache_folder() -> Path:
    """Of this user and this kind of processor: code compiled for one may not run on another."""
    features = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    name = hashlib.sha256(features.encode()).hexdigest()[:12]
    return platformdirs.user_cache_path("rank_collapse") / f"{platform.machine()}-{name}"


def keep_programs() -> None:
    """Programs that take a second or more to compile are compiled once, for all runs of this user.

    JAX's own settings win: JAX_COMPILATION_CACHE_DIR names another folder, and
    JAX_ENABLE_COMPILATION_CACHE=0 does without. Where the folder cannot be written nothing is kept.
    """
    if getattr(warnings.showwarning, "func", None) is not _show:
        warnings.showwarning = functools.partial(_show, warnings.showwarning)
    if jax.config.jax_compilation_cache_dir is not None:
        return
    with contextlib.suppress(OSError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            jax.config.update("jax_compilation_cache_dir", str(folder))


def _show(show, message, *about, **more):
    """Shows warnings, but for JAX's of an entry that is damaged: that is deleted.

    JAX would leave such an entry, as of a full disk, and compile that program in every run.
    """
    found = re.match(r"Error reading persistent compilation cache entry for '(.+?)'", str(message))
    folder = jax.config.jax_compilation_cache_dir
    if found is None or folder is None:
        show(message, *about, **more)
        return
    for path in Path(folder).glob(f"{glob.escape(found[1])}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
