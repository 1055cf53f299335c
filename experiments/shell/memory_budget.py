"""A memory budget for seeds: how many are computed at a time, and what they take."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from experiments.shell import memory
from experiments.shell.progress import Progress
from rank_collapse.runs import processes
from rank_collapse.runs.files import RunError
from rank_collapse.runs.seeds import lay_out, padded_size, seed_sharding, to_host

GB = 1e9
BYTE = 1e-9  # of a GB: the smallest budget


def define_flag(define: Callable) -> None:
    """--memory_gb; `define` is from `cli.definer`."""
    text = "Memory for the seeds, in 10⁹ bytes; more of them are computed chunk by chunk (default: "
    define("float", "memory_gb", None, text + "most of what is free).", lower_bound=BYTE)


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

    def chunks(
        self,
        needed: Callable[[int], int],
        compute: Callable[[int, int, int], Any],
        count: int,
        *,
        most: int | None = None,
        found: Any = None,
        keep: Callable[[Any], None] | None = None,
    ) -> Any:
        """What is computed of all seeds, as many at a time as fit the budget.

        Args:
            needed, most: As in `fit`.
            compute: (first seed, number of seeds, what they are padded to) → pytree of arrays on
                the host, whose leading axis is that of the seeds.
            count: Seeds that there are.
            found: What is known of the first of them; None for nothing.
            keep: Called with what is known, after each chunk.

        Returns:
            The pytree, its leaves [count, ...].
        """
        parts = [] if found is None else [found]
        done = 0 if found is None else len(jax.tree.leaves(found)[0])
        size = self.fit(needed, count, most) if done < count else 0
        while done < count:
            parts.append(compute(done, min(size, count - done), size))
            done = min(done + size, count)
            if keep is not None:
                parts = [_joined(parts)]
                keep(parts[0])
        return _joined(parts)

    def map(
        self, call: Callable, keys: Any, *, progress: Progress | None = None, **options: Any
    ) -> Any:
        """call(keys, None) of all keys on the host, as many at a time as fit the budget.

        Args:
            call: From `runs.seeds.spread`, over the budget's mesh.
            keys: Of the seeds [s].
            progress: Gets how long compiling took; None for none.
            **options: `most`, `found` and `keep` of `chunks`.
        """
        program = Compiled(call, self.mesh)

        def needed(size):
            with progress.aside("compiling") if progress else contextlib.nullcontext():
                return program.needed(laid(0, 1, size))

        def laid(first, count, size):
            return lay_out(keys[first : first + count], self.mesh, size)

        return self.chunks(
            needed,
            lambda first, count, size: to_host(program(laid(first, count, size)), count),
            len(keys),
            **options,
        )


def seeds_done(
    found: Mapping[str, np.ndarray] | None,
    total: int,
    run: Path,
    part: str,
    shape: tuple[int, ...] | None = None,
) -> int:
    """Seeds that the saved arrays of a part hold.

    Args:
        found: The arrays; None or none where nothing was saved.
        total: Seeds of the run.
        run: Its folder.
        part: The name of the arrays.
        shape: Of one seed's, where all are alike.

    Raises:
        RunError: Not as many of each array, more than the run has, or of another shape.
    """
    shapes = {np.shape(values) for values in (found or {}).values()}
    counts = {s[0] if s else -1 for s in shapes} or {0}
    others = shape is not None and {s[1:] for s in shapes} - {shape}
    if len(counts) > 1 or not 0 <= max(counts) <= total or others:
        raise RunError(
            f"{run}/arrays.npz: {part} is not of {total} seeds"
            + (f" of shape {list(shape)}" if shape else "") + "; delete this file"
        )  # fmt: skip
    return counts.pop()


def _joined(parts):
    return jax.tree.map(lambda *a: np.concatenate(a), *parts)


class Compiled:
    """A function from `runs.seeds.spread`, compiled for a number of seeds to see what it takes.

    Args:
        call: The function of (arrays of the seeds, what all of them see).
        mesh: Its mesh.
    """

    def __init__(self, call: Any, mesh: Mesh):
        self._call, self._mesh, self._program = call, mesh, None

    def needed(self, own: Any, shared: Any = None) -> int:
        """Compiles it for arrays, or shapes, [s, ...]; bytes that it takes on all devices."""
        sharding = seed_sharding(self._mesh)
        own = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), own)
        self._program = self._call.lower(own, shared).compile()
        return memory.program_bytes(self._program) * self._mesh.size

    def __call__(self, own: Any, shared: Any = None) -> Any:
        """Results of as many seeds as it was compiled for, laid out over the mesh."""
        return self._program(own, shared)
