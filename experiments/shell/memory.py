"""Memory: what a run may take, what its seeds need, and whether it ran out."""

import contextlib
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from experiments.shell.devices import share
from experiments.shell.progress import Progress
from rank_collapse.extras import MissingPackage
from rank_collapse.runs import processes
from rank_collapse.runs.files import RunError
from rank_collapse.runs.seeds import padded_size

GB = 1e9
SHARE = 0.8  # of what is free, where no budget is given
# Of the user or the machine: said in one line. Others are ours, and show where they are.
MISTAKES = (
    ValueError,
    RunError,
    MissingPackage,
    OSError,
    MemoryError,
    flags.Error,
    jax.errors.JaxRuntimeError,
)


def budget(gigabytes: float | None, devices: list[Any]) -> int:
    """Bytes that the arrays of a run may take on these devices, of this process.

    Processes of a sweep that share a host share what is asked for, or free.

    Args:
        gigabytes: What is asked for (10⁹ bytes); None for most of what is free.
        devices: Of the run, in this process.
    """
    if gigabytes is not None:
        return int(gigabytes * GB) // share()
    stats = [device.memory_stats() or {} for device in devices]
    if stats and all("bytes_limit" in s for s in stats):
        return int(SHARE * sum(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats))
    return int(SHARE * free()) // share()


def free() -> int:
    """Bytes of the machine's memory, or of this container's, that nobody uses."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    found.append(_bytes_of("/proc/meminfo", "MemAvailable") or found[0])
    folder = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            found.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    return max(min(found), 0)


def peak(devices: list[Any] | None = None) -> int:
    """Largest size so far, in bytes: of the arrays on accelerators, else of this process."""
    stats = [device.memory_stats() or {} for device in devices or []]
    if stats and all("peak_bytes_in_use" in s for s in stats):
        return sum(s["peak_bytes_in_use"] for s in stats)
    # Where there is one: getrusage's starts at the size of the process this one came from.
    size = _bytes_of("/proc/self/status", "VmHWM")
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size or (largest if sys.platform == "darwin" else 1024 * largest)


def _bytes_of(path, name):
    """Bytes of a line "name:  42 kB"; 0 where there is none."""
    found = ""
    with contextlib.suppress(OSError):
        found = Path(path).read_text("ascii", "replace")
    return 1024 * int((re.findall(rf"^{name}:\s*([0-9]+) kB", found, re.MULTILINE) or [0])[0])


def program_bytes(compiled: Any) -> int:
    """What a compiled program takes on one device, as XLA says: arguments, results, the rest."""
    found = compiled.memory_analysis()
    if found is None:
        return 0
    parts = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return parts - found.alias_size_in_bytes


def size_of(tree: Any) -> int:
    """Bytes of all arrays of a pytree, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class MemoryBudget:
    """The memory that --memory_gb leaves for seeds. A context manager.

    At its end it says in one line what the seeds that took most were expected to take, and how much
    was in use at the most.

    Args:
        options: The flags; --memory_gb is read.
        mesh: Of the devices that share the seeds.
        log: Called with each line, such as `RunFolder.log`.
    """

    def __init__(self, options: flags.FlagValues, mesh: Mesh, log: Callable[[str], None]):
        self.mesh, self.log, self._largest = mesh, log, (-1, "")
        self._devices = list(mesh.local_devices)
        free = int(budget(None, self._devices) / SHARE)
        limits = np.asarray([budget(options.memory_gb, self._devices), free])
        self._limit, self._free = map(int, processes.from_primary(limits))  # the same in all
        self._before = peak(self._devices)

    def __enter__(self) -> "MemoryBudget":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        expected, text = self._largest
        if kind is None and expected >= 0:
            Progress(0, "memory", log=self.log).say(
                f"{text} beside {self._before / GB:.3g} GB, a budget of {self._limit / GB:.3g} GB; "
                f"at most {peak(self._devices) / GB:.3g} GB in use"
            )

    def fit(self, needed: Callable[[int], int], count: int, most: int | None = None) -> int:
        """How many seeds are computed at a time: a multiple of the devices, one each at the least.

        Args:
            needed: Number of seeds → bytes that they take, on all devices together; called with
                what is returned last.
            count: The number of seeds.
            most: Computed at a time, whatever fits the budget; all by default.

        Raises:
            ValueError: One seed on each device takes more than there is.
        """
        size = padded_size(min(most or count, count), self.mesh)
        while True:
            expected = needed(size) // jax.process_count()
            if expected <= self._limit or size == self.mesh.size:
                break
            fits = padded_size(max(size * self._limit // expected, 1), self.mesh)
            size = max(min(fits, size - self.mesh.size), self.mesh.size)
        if expected > max(self._limit, self._free):
            raise ValueError(
                f"{size} seeds at a time, the fewest, take {expected / GB:.3g} GB of memory, and "
                f"{self._free / GB:.3g} GB are free"
            )
        text = f"{expected / GB:.3g} GB expected for {min(size, count)} of {count} seeds at a time"
        if expected > self._limit:
            said = Progress(0, "warning", log=self.log)
            said.say(f"{text}, the fewest, are more than the budget of {self._limit / GB:.3g} GB")
        self.log(f"memory: {text}")
        self._largest = max(self._largest, (expected, text))
        return size


def out_of_memory(error: Exception) -> bool:
    """Of a `JaxRuntimeError`: whether its message is that of a device without memory left."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def reason_of(error: Exception) -> str:
    """What one of `MISTAKES` says, in one line; of memory without the table of allocations.

    Raises:
        jax.errors.JaxRuntimeError: The error, where it has another reason than memory.
    """
    text = " ".join((str(error) or type(error).__name__).split())
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return text
    if not out_of_memory(error):
        raise error
    return f"out of memory: {text}"[:300]
