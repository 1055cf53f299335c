"""Compiles the tests' programs fast: with XLA's older generator of small loops, in one module.

The older generator is three times as fast. A program that is split into 32 modules, for as many
cores, takes a sixth longer on one core. This file is imported before JAX starts. Compiled programs
stay in pytest's cache for the next run.
The options belong to jaxlib 0.10, which the tests were timed with. They are left out for others:
a jaxlib refuses to start with an option that it does not know.
"""

import functools
import os
from importlib import metadata
from pathlib import Path

_IS_JAXLIB_0_10 = metadata.version("jaxlib").startswith("0.10.")
_QUICK = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}
# `compiler_options` that compile a program as users' programs are
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if _IS_JAXLIB_0_10 else {}

if _IS_JAXLIB_0_10:  # this process and its children
    flags = os.environ.get("XLA_FLAGS", "")
    added = (f"--{name}={value}" for name, value in _QUICK.items() if name not in flags)
    os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402

# Set once more, in case a plugin of pytest has imported JAX already.
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0":
    jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

if (
    _IS_JAXLIB_0_10
):  # a context of MLIR takes as long as all else of a small program before it is compiled
    from jax._src.interpreters import mlir

    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

MOST_BYTES = 10**9  # of programs kept between runs; one whole run has about a fifth of it


def pytest_configure(config):
    """Names the folder of compiled programs, in the first process: workers inherit it."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or find_program_folder(config)
    if folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        jax.config.update("jax_compilation_cache_dir", folder)


def find_program_folder(config) -> str | None:
    """Returns the folder in pytest's cache, or None where nothing can be written."""
    cache = getattr(config, "cache", None)  # none with -p no:cacheprovider
    if cache is None:
        return None
    try:
        folder = cache.mkdir("programs")
        keep_newest(folder, MOST_BYTES)
    except (OSError, RuntimeError):
        return None
    return str(folder) if os.access(folder, os.W_OK) else None


def keep_newest(folder: Path, max_bytes: int) -> None:
    """Deletes the oldest programs until the others are `max_bytes` or fewer."""
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True):
        max_bytes -= path.stat().st_size
        if max_bytes < 0:
            path.unlink()
