"""Cells of a sweep: runs that differ in floats alone, trained by one compiled program."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import traverse_util
from jax.sharding import Mesh

from experiments.shell.memory_budget import MemoryBudget
from experiments.shell.progress import Progress
from experiments.trained.chunks import runs_at_a_time
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
    ):
        chunk = max(1, -(-recipe.num_epochs // looks))
        self.ensemble = Ensemble(recipe, make_data, mesh=mesh, epochs_per_chunk=chunk)
        self.along = along
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


def results_of_cells(
    options: flags.FlagValues,
    run: RunFolder,
    program: Program,
    cells: Mapping[str, Hyper],
    *,
    budget: MemoryBudget,
    num_seeds: int | None = None,
    together: int = 1,
) -> dict[str, dict[str, Any]]:
    """Results of every cell, read where the run folder has them, else trained and saved.

    Every cell trains the same seeds: the same data and, scaled as the cell says, the same weights.

    Args:
        options: Flags, of which --seed is read, and --num_seeds by default.
        run: The run folder; each cell is a part of its arrays.
        program: What trains them.
        cells: Floats of each cell.
        budget: For the runs, which are trained chunk by chunk where they do not fit into it.
        num_seeds: Seeds of each cell.
        together: Cells trained in one call and saved after it; where fewer are left, one of them
            is trained several times, so that nothing is compiled anew.

    Returns:
        {cell: what the program gives, and "seconds", of which each cell has its share}.
    """
    count = num_seeds or options.num_seeds
    own_keys = seeds.seed_keys(options.seed, count)
    missing = [name for name in cells if run.part(name) is None]
    for first in range(0, len(missing), together):
        group = missing[first : first + together]
        padded = group + group[-1:] * (together - len(group))
        begun = time.monotonic()
        hyper = jax.tree.map(
            lambda *values: jnp.repeat(jnp.stack([jnp.float32(v) for v in values]), count, axis=0),
            *(cells[name] for name in padded),
        )
        label = group[0] if len(group) == 1 else f"{group[0]} and {len(group) - 1} more"
        keys = jnp.concatenate([own_keys] * together)
        found = train_in_chunks(program, keys, hyper, budget, label)
        seconds = np.asarray((time.monotonic() - begun) / len(group))
        saved = {f"{name}/seconds": seconds for name in group}
        for i, name in enumerate(group):
            part = slice(i * count, (i + 1) * count)
            saved |= {f"{name}/{k}": np.asarray(v)[part] for k, v in found.items()}
        run.save_arrays(saved)
    return {name: traverse_util.unflatten_dict(run.part(name), sep="/") for name in cells}


def train_in_chunks(
    program: Program, keys: Any, hyper: Hyper, budget: MemoryBudget, label: str
) -> dict[str, np.ndarray]:
    """`Program.train` of all runs, as many at a time as there is room for.

    Args:
        program: What trains them.
        keys: Of the runs [s].
        hyper: Arrays [s, ...].
        budget: For them.
        label: What is trained.
    """
    runs, epochs = len(keys), program.ensemble.recipe.num_epochs
    size = runs_at_a_time(program.ensemble, hyper, runs, budget)
    parts = []
    with Progress(epochs * -(-runs // size), f"training {label}", log=budget.log) as progress:
        for first in range(0, runs, size):
            before = epochs * len(parts)

            def on_chunk(epoch, losses, before=before):
                last = losses[np.isfinite(losses).all(axis=1), -1]
                mean = float(last.mean()) if last.size else float("nan")
                progress.update(before + epoch, loss=mean)

            count = min(size, runs - first)
            own = jax.tree.map(lambda a, i=first: a[i : i + size], (keys, hyper))
            # Padded, so that nothing is compiled anew for the last runs.
            trained = program.train(*seeds.pad_seeds(own, min(size, runs)), on_chunk)
            parts.append({name: values[:count] for name, values in trained.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
