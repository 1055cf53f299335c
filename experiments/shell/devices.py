"""The devices of a run: one XLA device per CPU core, and the mesh of those asked for."""

import contextlib
import glob
import importlib.metadata
import importlib.util
import os

import jax
from absl import flags
from jax.sharding import Mesh

from experiments.shell import compilation, several
from experiments.shell.process import SHARE
from rank_collapse.runs import limits
from rank_collapse.runs.seeds import seed_mesh


def cores() -> int:
    """Cores this process may use, of which each process of a sweep has its part."""
    all_ = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, all_ // share())


def accelerated() -> bool:
    """Whether JAX would look for accelerators: starting it to ask would take their memory."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    installed = plugins or importlib.util.find_spec("libtpu") is not None
    return bool(installed) and os.environ.get("JAX_PLATFORMS") != "cpu"


def gpus() -> list[str]:
    """GPUs that JAX in a child would use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    names = names if visible is None else [name for name in visible.split(",") if name]
    return names if accelerated() else []


def share() -> int:
    """How many processes of a sweep share the cores and the memory of this host."""
    return int(os.environ.get(SHARE, "1"))


def set_up_devices(options: flags.FlagValues) -> None:
    """Several processes, and one XLA device per CPU core; must come before any JAX computation.

    XLA does not spread a vmapped small matrix product over cores; one device per core does.
    Where JAX already runs (several binaries in one process) its devices are used as they are.

    Raises:
        ValueError: JAX does not start.
    """
    if "distributed" in options and options.distributed:
        several.join()
    start(options.num_devices)


def start(num_devices: int = 0) -> None:
    """Starts JAX with so many devices of a CPU; with one per core where it is 0.

    A process that runs several binaries starts it so for all of them, whatever the first asks for.

    Raises:
        ValueError: JAX does not start.
    """
    limits.check_address_space()
    compilation.keep_programs()
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", num_devices or cores())
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # a platform that is not there
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error) or "it is not installed"
        raise ValueError(f"JAX finds no device of JAX_PLATFORMS={asked!r}: {reason}") from error


def mesh(options: flags.FlagValues) -> Mesh:
    """The mesh of the devices asked for by --num_devices in each process; its axis is "seeds".

    Raises:
        ValueError: There are fewer devices.
    """
    devices = []
    for index in range(jax.process_count()):
        own = [d for d in jax.devices() if d.process_index == index]
        if options.num_devices > len(own):
            raise ValueError(f"num_devices={options.num_devices}, but only {len(own)} exist")
        devices += own[: options.num_devices or len(own)]
    return seed_mesh(devices)
