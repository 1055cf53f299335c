"""The devices of a run: one XLA device per CPU core, and the mesh of the requested ones."""

import contextlib
import importlib.metadata
import importlib.util
import os

import jax
import platformdirs
from absl import flags
from jax.sharding import Mesh

from experiments.lab.grid import Options
from rank_collapse.runs.seeds import seed_mesh


def count_cores() -> int:
    """Counts the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def has_accelerator() -> bool:
    """Returns whether JAX would look for accelerators, without starting JAX, which takes their
    memory."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    installed = plugins or importlib.util.find_spec("libtpu") is not None
    return bool(installed) and os.environ.get("JAX_PLATFORMS") != "cpu"


def start_devices(num_devices: int = 0) -> None:
    """Starts JAX with this number of CPU devices; must come before any computation.

    XLA does not spread a vmapped small matrix product over cores; one device per core does.
    Compiled programs are stored for other runs, in JAX_COMPILATION_CACHE_DIR or this user's cache.

    Args:
        num_devices: 0 for one per core.

    Raises:
        ValueError: JAX does not start.
    """
    if jax.config.jax_compilation_cache_dir is None:
        folder = str(platformdirs.user_cache_path("rank_collapse"))
        jax.config.update("jax_compilation_cache_dir", folder)
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", num_devices or count_cores())
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # a platform that does not exist
        platforms = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error) or "it is not installed"
        raise ValueError(f"JAX finds no device of JAX_PLATFORMS={platforms!r}: {reason}") from error


def device_mesh(options: flags.FlagValues | Options) -> Mesh:
    """Returns the mesh of the first --num_devices devices; its axis is "seeds".

    Raises:
        ValueError: There are fewer devices.
    """
    devices, count = jax.devices(), options.num_devices
    if count > len(devices):
        raise ValueError(f"num_devices={count}, but only {len(devices)} exist")
    return seed_mesh(devices[: count or None])
