"""The executor: what is computed of every seed of every cell, in chunks from which a run resumes.

    with Executor(options, run, "scales", total=2 * options.num_seeds) as executor:
        # measure(key, floats) of one seed → {"scale=1": {name: [s, ...]}, ...}
        found = executor.measure(measure, {"scale=1": 1.0, "scale=2": 2.0})

A cell is a setting whose numbers compiled programs take as arguments. Its seeds and those of the
other cells are one list, which is computed as many at a time as fit the memory, shared by the
devices. Each chunk is saved when it is done, so that a run resumes on any number of
devices and processes; what a seed gives depends on neither, nor on the others of its chunk.
"""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from experiments.shell import memory, signals
from experiments.shell.devices import mesh
from experiments.shell.memory import MemoryBudget
from experiments.shell.progress import Progress
from rank_collapse.runs import seeds
from rank_collapse.runs.files import damaged
from rank_collapse.runs.folder import RunFolder

SEEDS = "seeds"  # the part of a run's arrays that has one cell


class Executor(contextlib.ExitStack):
    """What computes the cells of a run: its devices, memory, seeds and progress. A context manager.

    Args:
        options: The flags; --num_devices, --memory_gb, and --seed and --num_seeds where they are.
        run: Holds what was computed before.
        label: Of the progress; "" for programs that show their own.
        total: Seeds of all cells; those of one by default.

    Attributes:
        run: The run folder.
        mesh: Of the devices.
        keys: Of the seeds; None without --num_seeds.
        progress: None without a label.
    """

    def __init__(
        self, options: flags.FlagValues, run: RunFolder, label: str = "", total: int | None = None
    ):
        super().__init__()
        self.run, self.mesh, self.keys, self.progress = run, mesh(options), None, None
        if "num_seeds" in options:
            self.keys = seeds.seed_keys(options.seed, options.num_seeds)
        if label:
            total = len(self.keys) if total is None else total
            self.progress = self.enter_context(Progress(total, label, log=run.log))
        self.budget = self.enter_context(MemoryBudget(options, self.mesh, run.log))

    def map(
        self,
        program: Callable[[], "Program"],
        cells: Mapping[str, Any],
        *,
        keys: Any = None,
        run: RunFolder | None = None,
        most: int | None = None,
        check: Callable[[str, Mapping[str, np.ndarray]], None] = lambda cell, found: None,
        advance: bool = True,
        most_known: int | None = None,
        again: bool = False,
    ) -> dict[str, dict[str, np.ndarray]]:
        """What is computed of all seeds of all cells, read where the run has it, else saved in it.

        Args:
            program: Makes what computes the chunks, where any are left.
            cells: {part of the run's arrays: floats}, pytrees of one structure and shapes, or None.
            keys: Of the seeds [s], the same of every cell; the executor's by default.
            run: Holds what was computed before; the executor's by default.
            most: Seeds at a time, whatever fits the budget; all of all cells by default.
            check: (cell, what is known of it) after each chunk, before that is saved; may raise.
            advance: Whether the progress is advanced by the seeds that are done.
            most_known: Seeds of each cell that are read at the most; all by default.
            again: Whether all is computed, and nothing saved.

        Returns:
            {cell: {name: [s, ...]}}.

        Raises:
            RunError: The run holds another number of seeds.
        """
        keys = self.keys if keys is None else keys
        run = self.run if run is None else run
        progress = self.progress if advance else None
        count = len(keys)
        known, left = {}, []
        for cell in cells:
            known[cell] = {} if again else run.part(cell) or {}
            done = seeds_done(known[cell], count, run.path, cell)
            if most_known is not None and most_known < done:
                done = most_known
                known[cell] = {name: values[:done] for name, values in known[cell].items()}
            left += [(cell, seed) for seed in range(done, count)]
        if progress is not None:
            progress.skip(count * len(cells) - len(left))
        if not left:
            return known
        made = program()

        def chunk_of(first, size):
            own = left[first : first + size]
            padded = own + own[-1:] * (size - len(own))
            floats = jax.tree.map(lambda *a: np.stack(a), *(cells[name] for name, _ in padded))
            padded_keys = keys[np.array([seed for _, seed in padded])]
            return Chunk(*zip(*own, strict=True), padded_keys, floats, size)

        size = self.budget.fit(lambda size: made.needed(chunk_of(0, size)), len(left), most)
        for first in range(0, len(left), size):
            chunk = chunk_of(first, size)
            new = named(made(chunk))
            for cell, place in chunk.by_cell().items():
                own = {name: values[place] for name, values in new.items()}
                found = known[cell]
                known[cell] = {
                    n: np.concatenate([found[n], a]) if found else a for n, a in own.items()
                }
                check(cell, known[cell])
            if not again:
                arrays = {c: known[c] for c in chunk.by_cell()}
                run.save_arrays(
                    {f"{c}/{n}": a for c, found in arrays.items() for n, a in found.items()}
                )
            signals.check() if progress is None else progress.advance(len(chunk.seeds))
        return known

    def measure(
        self,
        fn: Callable[[Any, Any], Any],
        cells: Mapping[str, Any],
        *,
        keys: Any = None,
        most: int | None = None,
        **how: Any,
    ) -> dict[str, dict[str, np.ndarray]]:
        """`map` of a function of one seed; `how` are further arguments of `Mapped`."""
        how.setdefault("at_once", seeds.seeds_at_once(self.mesh))
        program = partial(Mapped, fn, self.mesh, progress=self.progress, **how)
        return self.map(program, cells, keys=keys, most=most)


def of_one_seed(
    measure: Callable[[flags.FlagValues, Any, Any], Any], label: str
) -> Callable[[flags.FlagValues, Any, RunFolder], dict[str, np.ndarray]]:
    """`Experiment.measure` of an experiment that has measure(options, setup, key) of one seed.

    Where a device takes its seeds one by one they are saved as they come.
    """

    def measure_all(options, setup, run):
        with Executor(options, run, label) as executor:
            at_once = seeds.seeds_at_once(executor.mesh)
            most = at_once and at_once * executor.mesh.size
            one = partial(measure, options, setup)
            return executor.measure(lambda key, _: one(key), {SEEDS: None}, most=most)[SEEDS]

    return measure_all


class Chunk(NamedTuple):
    """Seeds of cells that are computed together.

    Attributes:
        cells: The cell of each [r].
        seeds: The number of each [r].
        keys: Of the seeds [size], the last one repeated.
        floats: Of the cells, leaves [size, ...].
        size: The same in all chunks, so that nothing is compiled again for the last.
    """

    cells: Sequence[str]
    seeds: Sequence[int]
    keys: Any
    floats: Any
    size: int

    def by_cell(self) -> dict[str, slice]:
        """Where the seeds of each cell are."""
        groups = itertools.groupby(range(len(self.cells)), key=self.cells.__getitem__)
        places = {cell: list(own) for cell, own in groups}
        return {cell: slice(own[0], own[-1] + 1) for cell, own in places.items()}


class Program(Protocol):
    """What computes chunks."""

    def needed(self, chunk: Chunk) -> int:
        """Bytes that a chunk of this size takes on all devices; called before `__call__`."""

    def __call__(self, chunk: Chunk) -> Any:
        """Arrays on the host, leaves [r, ...]; their names are joined by "/" where it is nested."""


class Mapped:
    """A function of one seed as a `Program`: compiled for the seeds of a chunk, laid out over the
    devices.

    Args:
        fn: (key, floats) of one seed → pytree of arrays.
        mesh: Of the devices.
        draw: What draws what `fn` takes in the place of the keys, of all seeds: see `drawing`.
        at_once, level: As of `runs.seeds.spread`.
        progress: Gets how long compiling took; None for none.
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], Any],
        mesh: Mesh,
        *,
        draw: Callable[[Any, None], Any] | None = None,
        at_once: int | None = None,
        level: int = 1,
        progress: Progress | None = None,
    ):
        self._mesh, self._progress, self._size, self._draw = mesh, progress, 0, draw
        self._call = seeds.spread(lambda own, _: fn(*own), mesh, at_once=at_once, level=level)

    def needed(self, chunk: Chunk) -> int:
        if self._size != chunk.size:  # else another run of a sweep has compiled it
            with self._progress.aside("compiling") if self._progress else contextlib.nullcontext():
                self._compiled = self._call.lower(self._shapes(chunk), None).compile()
            self._size = chunk.size
        return memory.program_bytes(self._compiled) * self._mesh.size

    def __call__(self, chunk: Chunk) -> Any:
        return seeds.to_host(self._compiled(self.laid_out(chunk), None), len(chunk.seeds))

    def laid_out(self, chunk: Chunk) -> tuple[Any, Any]:
        """(keys, or what is drawn from them; floats) of a chunk on the devices."""
        own = seeds.lay_out((chunk.keys, chunk.floats), self._mesh)
        return own if self._draw is None else (self._draw(own, None), own[1])

    def _shapes(self, chunk):
        own = seeds.lay_out((chunk.keys, chunk.floats), self._mesh)
        if self._draw is None:
            return own
        sharding = seeds.seed_sharding(self._mesh)
        drawn = jax.eval_shape(self._draw, own, None)
        return jax.tree.map(lambda a: a.update(sharding=sharding), drawn), own[1]


def drawing(
    fn: Callable[[Any, Any], Any], mesh: Mesh, at_once: int | None = None
) -> Callable[[Any, None], Any]:
    """(key, floats) of one seed → what is drawn, as a program of its own that several `Mapped` may
    share: random numbers are slow to optimise and drawn once."""
    return seeds.spread(lambda own, _: fn(*own), mesh, at_once=at_once, level=0)


def named(tree: Any, separator: str = "/") -> dict[str, np.ndarray]:
    """{path: array} of a nested dictionary; of a flat one itself."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = partial(jax.tree_util.keystr, simple=True, separator=separator)
    return {name(path): np.asarray(leaf) for path, leaf in leaves}


def seeds_done(found: Mapping[str, np.ndarray], total: int, run: Path, part: str) -> int:
    """Seeds that the saved arrays of a part hold.

    Args:
        found: The arrays; none where nothing was saved.
        total: Seeds of the run.
        run: Its folder.
        part: The name of the arrays.

    Raises:
        RunError: Not as many of each array, or more than the run has.
    """
    counts = {len(values) if np.ndim(values) else -1 for values in found.values()} or {0}
    if len(counts) > 1 or not 0 <= max(counts) <= total:
        raise damaged(run / "arrays.npz", f"{part} is not of {total} seeds")
    return counts.pop()
