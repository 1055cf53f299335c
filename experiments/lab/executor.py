"""The executor: what is computed of every seed of every cell, in chunks from which a run resumes.

    with Executor(options, run, "scales", total=2 * options.num_seeds) as executor:
        # measure(key, floats) of one seed → {"scale=1": {name: [s, ...]}, ...}
        found = executor.measure(measure, {"scale=1": 1.0, "scale=2": 2.0})

A cell is a setting whose numbers compiled programs take as arguments, of an experiment's lists or
of the axes of the flags. Its seeds and those of the other cells are one list, shared by the devices
and computed chunk by chunk (--seed_chunk). Chunks are saved when they are done, so that a run
resumes on any number of devices. A seed draws the same numbers in any chunk; docs/sweeps.md says
how far its results are the same.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.lab import devices
from experiments.lab.flags import Flags
from experiments.lab.folder import RunFolder
from experiments.lab.progress import Progress, raise_if_stopped
from rank_collapse.runs import seeds
from rank_collapse.runs.files import damaged

SEEDS = "seeds"  # the part of a run's arrays that has one cell
Cells = Mapping[str, Any] | Callable[[Flags], Mapping[str, Any]]


class Chunk(NamedTuple):
    """Seeds of cells that are computed together.

    Attributes:
        cells: The cell of each [r].
        seeds: The number of each [r].
        keys: Of the seeds, the last one repeated so that all chunks are of one size and nothing is
            compiled again for the last.
        floats: Of the cells, leaves of that size.
    """

    cells: Sequence[str]
    seeds: Sequence[int]
    keys: Any
    floats: Any


class Executor(contextlib.ExitStack):
    """What computes the cells of a run: its devices, seeds and progress. A context manager.

    Args:
        options: The flags, of one point of their axes; --num_devices, --seed_chunk, and --seed and
            --num_seeds where they are.
        run: Holds what was computed before.
        label: Of the progress; "" for programs that show their own.
        total: Seeds of all cells of a run; those of one by default.

    Attributes:
        mesh: Of the devices.
        progress: None without a label.
    """

    def __init__(self, options: Flags, run: RunFolder, label: str = "", total: int | None = None):
        super().__init__()
        self.run, self._options, self.mesh = run.at(""), options, devices.device_mesh(options)
        self.progress = None
        if label:
            total = len(options.group) * (options.num_seeds if total is None else total)
            self.progress = self.enter_context(Progress(total, label, log=run.log))

    def measure(
        self,
        fn: Callable[[Any, Any], Any],
        cells: Cells,
        *,
        keys: Any = None,
        most: int | None = None,
        **how: Any,
    ) -> dict[str, dict[str, np.ndarray]]:
        """`map` of a function of one seed; `how` are further arguments of `Mapped`."""
        program = functools.partial(Mapped, fn, self.mesh, progress=self.progress, **how)
        return self.map(program, cells, keys=keys, most=most)

    def map(
        self,
        program: Callable[[], Callable[[Chunk], Any]],
        cells: Cells,
        *,
        keys: Any = None,
        most: int | None = None,
    ) -> dict[str, dict[str, np.ndarray]]:
        """What is computed of all seeds of all cells, read where the run has it, else saved in it.

        Args:
            program: Makes what computes a chunk, where any is left: arrays on the host, leaves
                [r, ...], whose names are joined by "/" where it is nested. Its bytes_of(chunk,
                size), where it has that, is what so many seeds take on a device.
            cells: {part of the run's arrays: floats}, pytrees of one structure and shapes, or None;
                or flags → that. Points with invalid flags are skipped.
            keys: Of the seeds [s], the same of every cell; by default those of the flags.
            most: Seeds at a time; by default --seed_chunk, or as many as fit into memory.

        Returns:
            {cell: {name: [s, ...]}}.

        Raises:
            RunError: The run holds another number of seeds.
            ValueError: Invalid flags of this point.
        """
        options = self._options
        numbers = np.arange(options.num_seeds if keys is None else len(keys))
        if keys is None:
            keys = seeds.keys_of(options.seed, options.first_seed + numbers)
        floats = self._floats(cells, [options])
        saved = self._saved(floats, len(numbers))
        if any(count_seeds(arrays) < len(numbers) for arrays in saved.values()):
            floats = self._floats(cells, options.group)
            saved = self._saved(floats, len(numbers))
            left = [
                (cell, seed)
                for cell, arrays in saved.items()
                for seed in range(count_seeds(arrays), len(numbers))
            ]
            self._skip(len(floats) * len(numbers) - len(left))
            asked = most or ("seed_chunk" in options and options.seed_chunk) or len(left)
            size = seeds.padded_size(min(asked, len(left)), self.mesh)
            chunk_of = functools.partial(make_chunk, floats, keys)
            self._compute(program(), left, chunk_of, size, saved)
        else:
            self._skip(len(options.group) * len(floats) * len(numbers))
        start = options.prefix
        return {c.removeprefix(start): a for c, a in saved.items() if c.startswith(start)}

    def _floats(self, cells, points):
        """{part of the run's arrays: floats} of the cells of some points."""
        floats = {}
        for point in points:
            try:
                of_point = cells(point) if callable(cells) else cells
            except ValueError:
                if point is self._options:
                    raise
                continue  # the point says so when it is its turn
            floats |= {point.prefix + cell: values for cell, values in of_point.items()}
        return floats

    def _saved(self, cells, count):
        """{cell: its arrays in the run}, none where no seed was saved."""
        saved = {}
        for cell in cells:
            arrays = self.run.part(cell) or {}
            done = count_saved_seeds(arrays, count, self.run.path, cell)
            saved[cell] = dict(arrays) if done else {}
        return saved

    def _skip(self, steps):
        if self.progress is not None:
            self.progress.skip(steps)

    def _compute(self, program, left, chunk_of, size, saved):
        """Computes what is left, chunk by chunk, adds it to what is saved and saves it."""
        if hasattr(program, "bytes_of"):
            head = chunk_of(left[: self.mesh.size], self.mesh.size)
            size = devices.fit_memory(size, program.bytes_of(head, size), self.mesh)
        try:
            for first in range(0, len(left), size):
                chunk = chunk_of(left[first : first + size], size)
                self.run.keep_arrays(add_seeds(saved, chunk, name_leaves(program(chunk))))
                count = len(chunk.seeds)
                raise_if_stopped() if self.progress is None else self.progress.advance(count)
        finally:
            self.run.flush_arrays()


def make_chunk(
    floats: Mapping[str, Any], keys: Any, pairs: Sequence[tuple[str, int]], size: int
) -> Chunk:
    """Makes the chunk of (cell, seed) pairs, filled up to a size."""
    padded = [*pairs, *pairs[-1:] * (size - len(pairs))]
    values = jax.tree.map(lambda *a: np.stack(a), *(floats[cell] for cell, _ in padded))
    numbers = np.array([seed for _, seed in padded])
    return Chunk(*zip(*pairs, strict=True), keys[numbers], values)


def add_seeds(
    saved: dict[str, dict[str, np.ndarray]], chunk: Chunk, results: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Adds the seeds of a chunk to the arrays of their cells; returns those arrays by full name."""
    changed = {}
    for cell, rows in itertools.groupby(range(len(chunk.cells)), chunk.cells.__getitem__):
        rows = list(rows)
        for name, values in results.items():
            before = [saved[cell][name]] if name in saved[cell] else []
            saved[cell][name] = np.concatenate([*before, values[rows]])
            changed[f"{cell}/{name}"] = saved[cell][name]
    return changed


def count_seeds(arrays: Mapping[str, np.ndarray]) -> int:
    """How many seeds the arrays of a cell have."""
    return len(next(iter(arrays.values()))) if arrays else 0


class Mapped:
    """A function of one seed, compiled for the seeds of a chunk, laid out over the devices.

    Args:
        fn: (key, floats) of one seed → pytree of arrays.
        mesh: Of the devices.
        draw: (key, floats) of one seed → what `fn` takes in the place of the key: a program of its
            own, since random numbers are slow to optimise and drawn once.
        at_once: Seeds a device vmaps over; None for `seeds.seeds_at_once`.
        level: As of `runs.seeds.spread`.
        progress: Gets how long compiling took; None for none.
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], Any],
        mesh: Mesh,
        *,
        draw: Callable[[Any, Any], Any] | None = None,
        at_once: int | None = None,
        level: int = 1,
        progress: Progress | None = None,
    ):
        count = seeds.seeds_at_once(mesh) if at_once is None else at_once
        self._mesh, self._progress, self._compiled, self._size = mesh, progress, None, 0
        self._call = _spread(fn, mesh, count, level)
        self._draw = None if draw is None else _spread(draw, mesh, count, 0)

    def __call__(self, chunk: Chunk) -> Any:
        laid = self.laid_out(chunk)
        if self._compiled is None or len(chunk.keys) != self._size:
            self._compile(laid, len(chunk.keys))
        return seeds.to_host(self._compiled(laid, None), len(chunk.seeds))

    def _compile(self, like, size):
        """For so many seeds like those of arrays, or of their shapes."""
        sharding, self._size = seeds.seed_sharding(self._mesh), size

        def sized(a):
            return jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype, sharding=sharding)

        with self._progress.paused("compiling") if self._progress else contextlib.nullcontext():
            self._compiled = self._call.lower(jax.tree.map(sized, like), None).compile()

    def bytes_of(self, chunk: Chunk, size: int) -> int:
        """What so many seeds like those of a chunk take on a device, as XLA says."""
        laid = seeds.lay_out((chunk.keys, chunk.floats), self._mesh)
        drawn = laid[0] if self._draw is None else jax.eval_shape(self._draw, laid, None)
        self._compile((drawn, laid[1]), size)
        usage = self._compiled.memory_analysis()
        if usage is None:
            return 0
        arrays = usage.argument_size_in_bytes + usage.output_size_in_bytes
        return arrays + usage.temp_size_in_bytes - usage.alias_size_in_bytes

    def laid_out(self, chunk: Chunk) -> tuple[Any, Any]:
        """(keys, or what is drawn from them; floats) of a chunk on the devices."""
        laid = seeds.lay_out((chunk.keys, chunk.floats), self._mesh)
        return laid if self._draw is None else (self._draw(laid, None), laid[1])


@functools.lru_cache(maxsize=4)  # programs that draw alike share theirs
def _spread(fn, mesh, at_once, level):
    return seeds.spread(lambda seed, _: fn(*seed), mesh, at_once=at_once, level=level)


def name_leaves(tree: Any, separator: str = "/") -> dict[str, np.ndarray]:
    """{path: array} of a nested dictionary; of a flat one itself."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=separator)
    return {name(path): np.asarray(leaf) for path, leaf in leaves}


def count_saved_seeds(saved: Mapping[str, np.ndarray], total: int, run: Path, part: str) -> int:
    """Seeds that the saved arrays of a part hold.

    Args:
        saved: The arrays; none where nothing was saved.
        total: Seeds of the run.
        run: Its folder.
        part: The name of the arrays.

    Raises:
        RunError: Not as many of each array, or more than the run has.
    """
    counts = {len(values) if np.ndim(values) else -1 for values in saved.values()} or {0}
    if len(counts) > 1 or not 0 <= max(counts) <= total:
        raise damaged(run / "arrays.npz", f"{part} is not of {total} seeds")
    return counts.pop()
