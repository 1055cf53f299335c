"""A memory budget for seeds: how many are computed at a time, and what they take."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from experiments.shell import memory
from experiments.shell.progress import Progress
from rank_collapse.runs import processes
from rank_collapse.runs.seeds import padded_size

GB = 1e9


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
        self.mesh, self.log = mesh, log
        self._devices = list(mesh.local_devices)
        limit = memory.budget(options.memory_gb, self._devices)
        self._limit = int(processes.from_primary(np.asarray(limit)))  # the same in all
        self._before = memory.peak(self._devices)
        self._largest = (-1, "")

    def __enter__(self) -> "MemoryBudget":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        expected, text = self._largest
        if kind is None and expected >= 0:
            Progress(0, "memory", log=self.log).say(
                f"{text} beside {self._before / GB:.3g} GB, a budget of {self._limit / GB:.3g} GB; "
                f"at most {memory.peak(self._devices) / GB:.3g} GB in use"
            )

    def fit(self, needed: Callable[[int], int], count: int, most: int | None = None) -> int:
        """How many seeds are computed at a time: a multiple of the devices, one each at the least.

        Args:
            needed: Number of seeds → bytes that they take, on all devices together; called with
                what is returned last.
            count: Seeds that there are.
            most: Computed at a time, whatever fits the budget; all by default.
        """
        size = padded_size(min(most or count, count), self.mesh)
        while True:
            expected = needed(size) // jax.process_count()
            if expected <= self._limit or size == self.mesh.size:
                break
            fits = padded_size(max(size * self._limit // expected, 1), self.mesh)
            size = max(min(fits, size - self.mesh.size), self.mesh.size)
        text = f"{expected / GB:.3g} GB expected for {min(size, count)} of {count} seeds at a time"
        self.log(f"memory: {text}")
        self._largest = max(self._largest, (expected, text))
        return size
