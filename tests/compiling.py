"""How the tests compile: small loops by XLA's older generator, three times as fast, in one module.

A program split into 32 modules, to be compiled by as many cores, takes a sixth longer on one.
To be imported before JAX starts. What was compiled is kept in pytest's cache for the next run.
The options belong to the jaxlib that the tests were timed with; another one refuses to start with
an option that it does not know, so there they are left out.
"""

import os
from importlib import metadata
from pathlib import Path

_KNOWN = metadata.version("jaxlib").startswith("0.10.")
_QUICK = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}
# `compiler_options` of what users' programs are
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if _KNOWN else {}

if _KNOWN:  # this process and its children
    flags = os.environ.get("XLA_FLAGS", "")
    added = (f"--{name}={value}" for name, value in _QUICK.items() if name not in flags)
    os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402

# Said again, in case that a plugin of pytest has imported JAX before.
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0":
    jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

MOST_BYTES = 10**9  # of programs kept between runs; one whole run has about a fifth of it


def pytest_configure(config):
    """Names the folder of compiled programs, in the first process: workers inherit it."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or kept_programs(config)
    if folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        jax.config.update("jax_compilation_cache_dir", folder)


def kept_programs(config) -> str | None:
    """The folder in pytest's cache; none where nothing can be kept."""
    cache = getattr(config, "cache", None)  # none with -p no:cacheprovider
    if cache is None:
        return None
    try:
        folder = cache.mkdir("programs")
        keep_newest(folder, MOST_BYTES)
    except (OSError, RuntimeError):
        return None
    return str(folder) if os.access(folder, os.W_OK) else None


def keep_newest(folder: Path, most: int) -> None:
    """Deletes the programs compiled first, until the others are `most` bytes or fewer."""
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True):
        most -= path.stat().st_size
        if most < 0:
            path.unlink()
