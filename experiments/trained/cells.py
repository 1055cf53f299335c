"""Cells of a sweep: runs that differ in floats alone, trained together by one compiled program."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import traverse_util

from experiments.shell import cli
from experiments.shell.progress import Progress
from rank_collapse.runs.folder import RunFolder
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.recipe import Hyper, Recipe


def results_of_cells(
    options: flags.FlagValues,
    run: RunFolder,
    recipe: Recipe,
    make_data: Callable[[Any], dict[str, Any]],
    cells: Mapping[str, Hyper],
    measure: Callable[[Any, Any, Hyper, Any], Any],
    *,
    chunks: int = 20,
) -> dict[str, dict[str, Any]]:
    """Results of every cell, read where the run folder has them, else trained and saved.

    Every cell trains the same seeds: the same data and, scaled as the cell says, the same weights.

    Args:
        options: Flags, of which --seed, --num_seeds and --num_devices are read.
        run: The run folder; each cell is a part of its arrays.
        recipe, make_data: Of all cells; see `Ensemble`.
        cells: Floats of each cell.
        measure: (model, data, hyper, key) of one trained run → nested dictionary of arrays.
        chunks: Looks at the losses, about.

    Returns:
        {cell: what `measure` returns with a leading seed axis, "losses" [s, epochs] and "seconds",
        of which each cell has its share}.
    """
    missing = {name: hyper for name, hyper in cells.items() if run.part(name) is None}
    if missing:
        found = _trained(options, run, recipe, make_data, missing, measure, chunks)
        run.save_arrays({f"{cell}/{k}": v for cell, part in found.items() for k, v in part.items()})
    return {name: traverse_util.unflatten_dict(run.part(name), sep="/") for name in cells}


def _trained(options, run, recipe, make_data, cells, measure, chunks):
    begun = time.monotonic()
    count = options.num_seeds
    keys = seed_keys(options.seed, count)
    keys = jnp.concatenate([keys] * len(cells))
    hyper = jax.tree.map(
        lambda *values: jnp.repeat(jnp.stack([jnp.float32(v) for v in values]), count, axis=0),
        *cells.values(),
    )
    total = recipe.num_epochs
    ensemble = Ensemble(
        recipe, make_data, mesh=cli.mesh(options), epochs_per_chunk=max(1, -(-total // chunks))
    )
    with Progress(total, f"training {', '.join(cells)}"[:60], log=run.log) as progress:

        def on_chunk(epoch, _, losses):
            last = losses[np.isfinite(losses).all(axis=1), -1]
            progress.update(epoch, loss=float(last.mean()) if last.size else float("nan"))

        trained = ensemble.train(keys, hyper, on_chunk=on_chunk)
    measured = ensemble.map(
        lambda state, data, hyper, key, _: measure(state.model, data, hyper, key),
        trained.state, trained.data, *ensemble.lay_out((hyper, keys)), num_seeds=len(keys),
    )  # fmt: skip
    flat = traverse_util.flatten_dict(measured | {"losses": trained.losses}, sep="/")
    seconds = np.asarray((time.monotonic() - begun) / len(cells))
    return {
        name: {k: np.asarray(v)[i * count : (i + 1) * count] for k, v in flat.items()}
        | {"seconds": seconds}
        for i, name in enumerate(cells)
    }
