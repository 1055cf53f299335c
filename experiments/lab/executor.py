"""The executor: computes every seed of every cell, in chunks from which a run resumes.

    with Executor(options, run, "scales", total=2 * options.num_seeds) as executor:
        # measure(key, floats) of one seed → {"scale=1": {name: [s, ...]}, ...}
        results = executor.measure(measure, {"scale=1": 1.0, "scale=2": 2.0})

A cell is a setting whose numbers are arguments of compiled programs; cells come from an
experiment's lists or from the axes of the flags. The seeds of all cells are one list, shared by the
devices and computed chunk by chunk (--seed_chunk). Each finished chunk is saved, so a run resumes
on any number of devices. A seed draws the same numbers in any chunk; docs/sweeps.md says which
results are then equal.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from experiments.lab import devices
from experiments.lab.folder import RunFolder
from experiments.lab.grid import Options
from experiments.lab.progress import Progress
from rank_collapse.runs import memory, seeds
from rank_collapse.runs.files import damaged_file_error, describe_difference
from rank_collapse.runs.states import name_parts

SEEDS = "seeds"  # the part of a run's arrays that has one cell
Floats = PyTree[ArrayLike] | None  # of a cell
Cells = Mapping[str, Floats] | Callable[[Options], Mapping[str, Floats]]


class Chunk(NamedTuple):
    """Seeds of cells that are computed together.

    Attributes:
        cells: The cell of each [r].
        seeds: The number of each [r].
        keys: Keys of the seeds [size]; the last one is repeated so that all chunks have one size
            and the last chunk does not compile again.
        floats: Floats of the cells, leaves [size, ...].
    """

    cells: Sequence[str]
    seeds: Sequence[int]
    keys: jax.Array
    floats: PyTree[np.ndarray]

    @property
    def unpadded(self) -> tuple[jax.Array, PyTree[np.ndarray]]:
        """Returns (keys, floats) of the seeds alone, [r, ...]."""
        rows = slice(len(self.seeds))
        return seeds.select_keys(self.keys, rows), jax.tree.map(lambda a: a[rows], self.floats)


class Executor(contextlib.ExitStack):
    """Computes the cells of a run with its devices, seeds and progress. A context manager.

    Args:
        options: The flags, of one point of their axes; --num_devices, --seed_chunk, and --seed and
            --num_seeds where the binary has them.
        run: Folder that holds the results of earlier chunks.
        label: Label of the progress; "" for programs that show their own.
        total: Number of seeds in all cells of a point; by default those of one cell.

    Attributes:
        run: The run folder, without the prefix of a point.
        mesh: Mesh of the devices.
        progress: Counts seeds; disabled without a label.
    """

    def __init__(self, options: Options, run: RunFolder, label: str = "", total: int | None = None):
        super().__init__()
        self.run, self._options, self.mesh = run.at(""), options, devices.device_mesh(options)
        if label:
            total = len(options.group) * (options.num_seeds if total is None else total)
            if options.flags.experiment.replace("_", " ") != label:
                label = f"{options.flags.experiment}, {label}"
        is_shown = label and run.writable  # a run that is only read has nothing to compute
        bar = Progress(total if is_shown else 0, label, log=run.log)
        self.progress = self.enter_context(bar)
        self.callback(self.run.flush_arrays)  # where a chunk fails, the earlier ones are kept

    def measure(
        self,
        fn: Callable[[PyTree[Array], Floats], PyTree[Array]],
        cells: Cells,
        *,
        keys: jax.Array | None = None,
        most: int | None = None,
        **options: Any,
    ) -> dict[str, dict[str, np.ndarray]]:
        """Computes all seeds of all cells; reads the ones that the run has, saves the others.

        Args:
            fn: (key, floats) of one seed → pytree of arrays.
            cells, keys, most: As of `chunks`.
            **options: Further arguments of `Mapped`.

        Returns:
            As `read`.
        """
        program = Mapped(fn, self.mesh, self.progress, **options)
        for chunk in self.chunks(cells, program, keys=keys, most=most):
            self.save(chunk, program(chunk))
        return self.read(cells, keys)

    def chunks(
        self,
        cells: Cells,
        program: "Mapped | None" = None,
        *,
        keys: jax.Array | None = None,
        most: int | None = None,
    ) -> Iterator[Chunk]:
        """Yields the seeds that the run lacks in chunks, each to be saved before the next.

        Points that differ in traced flags alone are computed with the first of them.

        Args:
            cells: {part of the run's arrays: floats}, pytrees of one structure and shapes, or None;
                or flags → that. Points with invalid flags are skipped.
            program: What computes the chunks, if it says how many seeds fit into memory and which
                arrays it makes. An unfinished run whose cells lack one is refused: another commit
                may have begun it, with fewer measures.
            keys: Random keys of the seeds [s], the same for every cell; by default those of the
                flags.
            most: Largest number of seeds at a time; by default --seed_chunk, or as many as fit into
                memory.

        Raises:
            RunError: The run holds another number of seeds, or lacks arrays.
            ValueError: Invalid flags of this point.
        """
        options = self._options
        count = self._count_seeds(keys)
        requested = self._cell_floats(cells, [options])
        missing = self._list_missing(requested, count)
        is_checked = program and self.run.resumed and self.run.writable and self.run.summary is None
        if keys is None and (missing or is_checked):  # a finished run compiles nothing
            keys = seeds.fold_seeds(options.seed, options.first_seed + np.arange(count))
        if not missing:
            if is_checked:
                self._check_measures(program, requested, keys)
            self.progress.skip(len(options.group) * len(requested) * count)
            return
        self.run.check_writable(missing[0][0])
        floats = self._cell_floats(cells, options.group)
        missing = self._list_missing(floats, count)
        self.progress.skip(len(floats) * count - len(missing))
        limit = most or ("seed_chunk" in options and options.seed_chunk) or len(missing)
        size = seeds.padded_size(min(limit, len(missing)), self.mesh)
        if program:
            head = make_chunk(floats, keys, missing[: self.mesh.size], self.mesh.size)
            size = program.fit_memory(head, size)
        for start in range(0, len(missing), size):
            yield make_chunk(floats, keys, missing[start : start + size], size)

    def save(self, chunk: Chunk, results: PyTree[np.ndarray]) -> None:
        """Adds the seeds of a chunk to the arrays of their cells.

        Args:
            chunk: One of `chunks`.
            results: Arrays on the host, leaves [r, ...], whose names are joined by "/" where they
                are nested.
        """
        longer, start, arrays = {}, 0, name_leaves(results)
        for cell, count in collections.Counter(chunk.cells).items():  # the seeds of a cell adjoin
            new = {name: values[start : start + count] for name, values in arrays.items()}
            saved = self.run.part(cell) or {name: values[:0] for name, values in new.items()}
            saved_shapes = {name: values.shape[1:] for name, values in saved.items()}
            new_shapes = {name: values.shape[1:] for name, values in new.items()}
            if damage := describe_difference(saved_shapes, new_shapes):
                raise damaged_file_error(self.run.path / "arrays.npz", f"of {cell} {damage}")
            longer |= {f"{cell}/{n}": np.concatenate([saved[n], new[n]]) for n in new}
            start += count
        self.run.keep_arrays(longer)  # at once: all arrays of a cell have as many seeds
        self.progress.advance(len(chunk.seeds))

    def read(self, cells: Cells, keys: jax.Array | None = None) -> dict[str, dict[str, np.ndarray]]:
        """Returns what the run has of this point, {cell: {name: [s, ...]}}.

        Args:
            cells, keys: As of `chunks`.
        """
        self.run.flush_arrays()
        count, prefix = self._count_seeds(keys), self._options.prefix
        return {
            cell.removeprefix(prefix): {n: a[:count] for n, a in self.run.part(cell).items()}
            for cell in self._cell_floats(cells, [self._options])
        }

    def _count_seeds(self, keys):
        return self._options.num_seeds if keys is None else len(keys)

    def _cell_floats(self, cells, points):
        """Returns {part of the run's arrays: floats} of the cells of some points."""
        floats = {}
        for point in points:
            try:
                point_cells = cells(point) if callable(cells) else cells
            except ValueError:
                if point is self._options:
                    raise
                continue  # the point says so when it is its turn
            floats |= {point.prefix + cell: values for cell, values in point_cells.items()}
        return floats

    def _list_missing(self, cells, count):
        """Lists the (cell, seed) pairs that the run does not have.

        Raises:
            RunError: The arrays of a cell have different numbers of seeds, or more seeds than the
                run, which does not grow.
        """
        missing = []
        for cell in cells:
            arrays = self.run.part(cell) or {}
            shapes = [np.shape(array) for array in arrays.values()] or [(0,)]
            saved = shapes[0][0] if shapes[0] else -1  # a number has no seeds
            is_beyond = saved > count and not self._options.flags.grows
            if any(shape[:1] != (saved,) for shape in shapes) or is_beyond:
                raise damaged_file_error(
                    self.run.path / "arrays.npz", f"{cell} does not have {count} seeds"
                )
            missing += [(cell, seed) for seed in range(saved, count)]
        return missing

    def _check_measures(self, program, floats, keys):
        """Refuses finished cells that do not have all measures of the program."""
        for cell in floats:
            pairs = [(cell, 0)]
            expected = program.name_arrays(make_chunk(floats, keys, pairs, self.mesh.size))
            if lost := expected - (self.run.part(cell) or {}).keys():
                raise damaged_file_error(
                    self.run.path / "arrays.npz", f"it lacks {cell}/{min(lost)}"
                )


def make_chunk(
    floats: Mapping[str, Floats], keys: jax.Array, pairs: Sequence[tuple[str, int]], size: int
) -> Chunk:
    """Makes the chunk of (cell, seed) pairs, padded to a size.

    Args:
        floats: {cell: floats}.
        keys: Random keys of all seeds.
        pairs: At most `size` pairs.
        size: Size of the chunk.
    """
    num_missing = size - len(pairs)
    padded = [*pairs, *[pairs[-1]] * num_missing]
    floats_of_pairs = [floats[cell] for cell, _ in padded]
    values = jax.tree.map(lambda *leaves: np.stack(leaves), *floats_of_pairs)
    numbers = np.array([seed for _, seed in padded])
    chunk_keys = seeds.select_keys(keys, numbers)  # indexing compiles six programs for each size
    cells, chunk_seeds = zip(*pairs, strict=True)
    return Chunk(cells, chunk_seeds, chunk_keys, values)


class Mapped:
    """A function of one seed, compiled for the seeds of a chunk, laid out over the devices.

    Args:
        fn: (key, floats) of one seed → pytree of arrays.
        mesh: Mesh of the devices.
        progress: Progress that shows the time of compiling.
        draw: (key, floats) of one seed → the argument that `fn` takes instead of the key. It is a
            separate program, because random numbers are slow to optimise and drawn once.
        at_once: Seeds a device vmaps over; None for `seeds.group_size`.
        level: See `runs.seeds.run_seeds`.
    """

    def __init__(
        self,
        fn: Callable[[PyTree[Array], Floats], PyTree[Array]],
        mesh: Mesh,
        progress: Progress,
        *,
        draw: Callable[[jax.Array, Floats], PyTree[Array]] | None = None,
        at_once: int | None = None,
        level: int = 1,
    ):
        count = seeds.group_size(mesh) if at_once is None else at_once
        self._mesh, self._progress, self._compiled, self._size = mesh, progress, None, 0
        self._call = spread_function(fn, mesh, count, level)
        self._draw = None if draw is None else spread_function(draw, mesh, count, level=0)

    def __call__(self, chunk: Chunk) -> PyTree[np.ndarray]:
        arguments = self.laid_out(chunk)
        if self._compiled is None or len(chunk.keys) != self._size:
            self._compiled, self._size = self._compile(arguments, len(chunk.keys)), len(chunk.keys)
        return seeds.to_host(self._compiled(arguments, None), len(chunk.seeds))

    def laid_out(self, chunk: Chunk) -> tuple[PyTree[Array], PyTree[Array]]:
        """Returns (keys, or the arrays drawn from them; floats) of a chunk on the devices."""
        keys, floats = seeds.shard_seeds((chunk.keys, chunk.floats), self._mesh)
        if self._draw is None:
            return keys, floats
        drawn = self._draw((keys, floats), None)
        return drawn, floats

    def fit_memory(self, chunk: Chunk, size: int) -> int:
        """Compiles for as many seeds of a chunk as fit into memory; returns their number.

        Args:
            chunk: At least one seed for each device.
            size: The most seeds.
        """
        sharded = seeds.shard_seeds((chunk.keys, chunk.floats), self._mesh)
        arguments = self._drawn_shapes(*sharded)
        self._compiled, self._size = memory.compile_largest(
            lambda size: self._compile(arguments, size), size, self._mesh.size, self._mesh
        )
        return self._size

    def name_arrays(self, chunk: Chunk) -> set[str]:
        """Returns the names of the arrays that it computes, without computing them.

        Args:
            chunk: At least one seed for each device.
        """
        arguments = self._drawn_shapes(chunk.keys, chunk.floats)
        return set(name_parts(jax.eval_shape(self._call, arguments, None)))

    def _drawn_shapes(self, keys, floats):
        """Returns keys, or the shapes of the arrays drawn from them, and floats."""
        if self._draw is None:
            return keys, floats
        return jax.eval_shape(self._draw, (keys, floats), None), floats

    def _compile(self, like, size):
        """Compiles for a number of seeds, with the shapes of some arrays."""
        sharding = seeds.seed_sharding(self._mesh)

        def resize(a):
            return jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype, sharding=sharding)

        with self._progress.time_activity("compiling"):
            return self._call.lower(jax.tree.map(resize, like), None).compile()


@functools.lru_cache(maxsize=4)  # programs that draw alike share theirs
def spread_function(
    fn: Callable[..., PyTree[Array]],
    mesh: Mesh,
    at_once: int | None,
    level: int = 1,
) -> Callable[[tuple[PyTree[Array], ...], None], PyTree[Array]]:
    """Makes one call for all seeds of a function of the arrays of a seed, see `seeds.run_seeds`.

    Args:
        fn: Function of the parts of one seed.
        mesh, at_once, level: See `seeds.run_seeds`.

    Returns:
        Function of (a tuple of parts with a leading seed axis, None).
    """

    def call(seed, _):
        """Calls the function with the parts of one seed."""
        return fn(*seed)

    return seeds.run_seeds(call, mesh, at_once=at_once, level=level)


def name_leaves(tree: PyTree[np.ndarray]) -> dict[str, np.ndarray]:
    """Flattens a nested dictionary to {path: array}, with "/" between the names of the levels."""
    return {name: np.asarray(leaf) for name, leaf in name_parts(tree).items()}


def nest_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, PyTree[np.ndarray]]:
    """Nests arrays {"a/b": values} at each "/" of their names: {"a": {"b": values}}."""
    nested: dict[str, PyTree[np.ndarray]] = {}
    for path, values in arrays.items():
        *levels, name = path.split("/")
        level = nested
        for key in levels:
            level = level.setdefault(key, {})
        level[name] = values
    return nested
