"""Memory: what a run may take, what programs and arrays need, and what was in use."""

import contextlib
import os
import resource
from pathlib import Path
from typing import Any

import jax

from experiments.shell.devices import share

SHARE = 0.8  # of what is free, where no budget is given


def budget(gigabytes: float | None, devices: list[Any]) -> int:
    """Bytes that the arrays of a run may take on these devices, of this process.

    Processes of a sweep that share a host share what is asked for, or free.

    Args:
        gigabytes: What is asked for (10⁹ bytes); None for most of what is free.
        devices: Of the run.
    """
    if gigabytes is not None:
        return int(gigabytes * 1e9) // share()
    own = [d for d in devices if d.process_index == jax.process_index()]
    stats = [device.memory_stats() or {} for device in own]
    if stats and all("bytes_limit" in s for s in stats):
        return int(SHARE * sum(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats))
    return int(SHARE * free()) // share()


def free() -> int:
    """Bytes of the machine's memory, or of this container's, that nobody uses."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        found.append(_kilobytes("/proc/meminfo", "MemAvailable"))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            folder = Path("/sys/fs/cgroup")
            found.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    return max(min(found), 0)


def peak(devices: list[Any] | None = None) -> int:
    """Largest size so far, in bytes: of the arrays on accelerators, else of this process."""
    stats = [device.memory_stats() or {} for device in devices or []]
    if stats and all("peak_bytes_in_use" in s for s in stats):
        return sum(s["peak_bytes_in_use"] for s in stats)
    with contextlib.suppress(OSError, StopIteration, ValueError):
        # Where there is one: getrusage's starts at the size of the process this one came from.
        return _kilobytes("/proc/self/status", "VmHWM")
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if os.uname().sysname == "Darwin" else 1024 * largest


def _kilobytes(path, name):
    """Bytes of a line "name:  42 kB"."""
    lines = Path(path).read_text("ascii").splitlines()
    return 1024 * int(next(x for x in lines if x.startswith(name)).split()[1])


def program_bytes(compiled: Any) -> int:
    """What a compiled program takes on one device, as XLA says: arguments, results, the rest."""
    found = compiled.memory_analysis()
    if found is None:
        return 0
    parts = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return parts - found.alias_size_in_bytes


def size_of(tree: Any) -> int:
    """Bytes of all arrays of a pytree, or of their shapes; of random keys as their data."""
    return sum(_size(leaf) for leaf in jax.tree.leaves(tree))


def _size(leaf):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return leaf.size * leaf.dtype.itemsize
