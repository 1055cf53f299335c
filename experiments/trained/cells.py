"""Cells of a sweep: runs that differ in floats alone, trained by one compiled program."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from experiments.shell import memory
from experiments.shell.executor import Chunk, map_cells
from experiments.shell.memory_budget import MemoryBudget
from experiments.shell.progress import Progress
from rank_collapse.runs import seeds
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.recipe import Hyper, Recipe


class Program:
    """An ensemble with what is measured of its runs, compiled once for all cells.

    Args:
        recipe, make_data, mesh: See `Ensemble`.
        measure: (model, data, hyper) of one run → nested dictionary of arrays.
        prepare: (model, data, hyper) of one run before training → its hyper, such as gains that
            depend on the initial weights.
        looks: Chunks that training is cut into.
        along: Whether every run is also measured before training and after each chunk.
        log: Called with each line of progress.
    """

    def __init__(
        self,
        recipe: Recipe,
        make_data: Callable[[Any], dict[str, Any]],
        measure: Callable[[Any, Any, Hyper], Any],
        *,
        mesh: Mesh,
        prepare: Callable[[Any, Any, Hyper], Hyper] | None = None,
        looks: int = 20,
        along: bool = False,
        log: Callable[[str], None] | None = None,
    ):
        chunk = max(1, -(-recipe.num_epochs // looks))
        self.ensemble = Ensemble(recipe, make_data, mesh=mesh, epochs_per_chunk=chunk)
        self.along, self.log = along, log
        self._measure = self._spread(measure, mesh)
        self._prepare = None if prepare is None else self._spread(prepare, mesh)

    def _spread(self, fn, mesh):
        """fn(model, data, hyper) of all runs."""
        return seeds.spread(
            lambda state, data, hyper, _: fn(state.model, data, hyper),
            mesh, at_once=self.ensemble.at_once,
        )  # fmt: skip

    def train(self, keys: Any, hyper: Hyper, on_chunk: Callable | None = None) -> dict[str, Any]:
        """{"losses": [s, epochs], and what is measured: [s, ...], [s, looks + 1, ...] along}.

        Args:
            keys: Of the runs [s].
            hyper: Arrays [s, ...].
            on_chunk: Called between chunks with the number of epochs done and the losses.
        """
        ensemble, looks = self.ensemble, []
        laid_keys, laid_hyper = ensemble.lay_out((keys, hyper))
        if self._prepare is not None:
            state, data = ensemble.begin(laid_keys, laid_hyper, None)
            laid_hyper = self._prepare(state, data, laid_hyper, None)
            hyper = seeds.to_host(laid_hyper, len(keys))

        def look(state, data):
            looks.append(seeds.to_host(self._measure(state, data, laid_hyper, None), len(keys)))

        if self.along:
            state, data = ensemble.begin(laid_keys, laid_hyper, None)
            look(state, data)

        def after(epoch, snapshot, losses):
            if self.along:
                look(ensemble.lay_out(snapshot()["state"]), data)
            if on_chunk is not None:
                on_chunk(epoch, losses)

        trained = ensemble.train(keys, hyper, on_chunk=after)
        if not self.along:
            look(trained.state, trained.data)
        found = jax.tree.map(lambda *a: np.stack(a, axis=1) if self.along else a[0], *looks)
        return traverse_util.flatten_dict(found | {"losses": trained.losses}, sep="/")

    def needed(self, chunk: Chunk) -> int:
        return bytes_of_a_run(self.ensemble, chunk.floats) * chunk.size

    def __call__(self, chunk: Chunk) -> dict[str, Any]:
        """What `train` gives, and "seconds" [r], of which each run has its share."""
        begun, count = time.monotonic(), len(chunk.seeds)
        first, *more = dict.fromkeys(chunk.cells)
        label = f"training {first}" + (f" and {len(more)} more" if more else "")
        with Progress(self.ensemble.recipe.num_epochs, label, log=self.log) as progress:

            def on_chunk(epoch, losses):
                last = losses[np.isfinite(losses).all(axis=1), -1]
                progress.update(epoch, loss=float(last.mean()) if last.size else float("nan"))

            found = self.train(chunk.keys, chunk.floats, on_chunk)
        seconds = np.full(count, (time.monotonic() - begun) / count)
        return {name: values[:count] for name, values in found.items()} | {"seconds": seconds}


def results_of_cells(
    program: Callable[[], Program],
    cells: Mapping[str, Hyper],
    keys: Any,
    *,
    run: RunFolder,
    budget: MemoryBudget,
    most: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Results of every cell, nested, read where the run folder has them, else trained and saved.

    Every cell trains the same seeds: the same data and, scaled as the cell says, the same weights.

    Args:
        program, cells, keys, run, budget, most: As of `map_cells`.

    Returns:
        {cell: what the program gives, "seconds" of all its seeds together}.
    """
    cells = {name: jax.tree.map(jnp.float32, hyper) for name, hyper in cells.items()}
    found = map_cells(program, cells, keys, run=run, budget=budget, most=most, aside=("seconds",))
    return {
        name: traverse_util.unflatten_dict(own, sep="/") | {"seconds": own["seconds"].sum()}
        for name, own in found.items()
    }


def bytes_of_a_run(ensemble: Ensemble, hyper: Hyper) -> int:
    """What one run takes: its data, its state, and a copy of that on the way to a checkpoint.

    Args:
        ensemble: What trains it.
        hyper: Floats, or arrays [s]; their names count.
    """
    size = ensemble.mesh.size
    state, data, _ = shapes_of(ensemble, hyper, size)
    each = (2 * memory.size_of(state) + memory.size_of(data)) // size
    if not seeds.on_cpu(ensemble.mesh):  # a device vmaps over its seeds, and a step needs as much
        each += step_bytes(ensemble, hyper)
    return each


def shapes_of(ensemble: Ensemble, hyper: Hyper, size: int) -> tuple[Any, Any, Hyper]:
    """Shapes of the states, the data and the traced values of so many runs."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size))
    one = jax.ShapeDtypeStruct((size,), jnp.float32)
    hyper = jax.tree.map(lambda _: one, hyper)
    return *jax.eval_shape(ensemble.begin, keys, hyper, None), hyper


def step_bytes(ensemble: Ensemble, hyper: Hyper) -> int:
    """What one run takes in a step beside its arguments, as XLA says of one run a device."""
    sharding = seeds.seed_sharding(ensemble.mesh)
    shapes = shapes_of(ensemble, hyper, ensemble.mesh.size)
    laid = jax.tree.map(lambda a: a.update(sharding=sharding), shapes)
    analysis = ensemble.chunk.lower(*laid, jnp.int32(0)).compile().memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes
