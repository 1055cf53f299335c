"""Ensembles larger than memory: trained and measured chunk by chunk of seeds."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from experiments.shell import cli, memory, several
from experiments.shell.flag_values import Flags
from experiments.shell.memory_budget import MemoryBudget
from experiments.shell.progress import Progress
from experiments.trained import arguments
from rank_collapse.runs import processes
from rank_collapse.runs.folder import RunFolder
from rank_collapse.runs.seeds import on_cpu, padded_size, seed_sharding
from rank_collapse.training import model_file
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.recipe import Hyper


def runs_at_a_time(ensemble: Ensemble, hyper: Hyper, count: int, budget: MemoryBudget) -> int:
    """How many runs of an ensemble are trained at a time: as many as there is room for.

    A run needs its data, its state, and a copy of the state on the way to a checkpoint.

    Args:
        ensemble: What trains them.
        hyper: Floats, or arrays [s]; their names count.
        count: Runs that there are.
        budget: Of the ensemble's mesh.
    """
    size = padded_size(count, ensemble.mesh)
    state, data, _ = shapes_of(ensemble, hyper, size)
    each = (2 * memory.size_of(state) + memory.size_of(data)) // size
    if not on_cpu(ensemble.mesh):  # there a device vmaps over its seeds, and a step needs as much
        each += step_bytes(ensemble, hyper)
    return budget.fit(lambda runs: each * runs, count)


def shapes_of(ensemble: Ensemble, hyper: Hyper, size: int) -> tuple[Any, Any, Hyper]:
    """Shapes of the states, the data and the traced values of so many runs."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size))
    one = jax.ShapeDtypeStruct((size,), jnp.float32)
    hyper = jax.tree.map(lambda _: one, hyper)
    return *jax.eval_shape(ensemble.begin, keys, hyper, None), hyper


def step_bytes(ensemble: Ensemble, hyper: Hyper) -> int:
    """What one run takes in a step beside its arguments, as XLA says of one run a device."""
    sharding = seed_sharding(ensemble.mesh)
    shapes = shapes_of(ensemble, hyper, ensemble.mesh.size)
    laid = jax.tree.map(lambda a: a.update(sharding=sharding), shapes)
    analysis = ensemble.chunk.lower(*laid, jnp.int32(0)).compile().memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


def results_in_chunks(
    options: Flags,
    run: RunFolder,
    size: int,
    compute: Callable[[Flags, RunFolder], Any],
    *,
    part: str,
    models: str,
    lines: str,
    aside: set[str],
) -> dict[str, np.ndarray]:
    """The arrays of all seeds, each chunk in a run folder of its own until all are there.

    Chunks that an interrupted run has finished are kept, whatever their size was.

    Args:
        options: Of all seeds.
        run: Their run folder.
        size: Seeds at a time.
        compute: (flags of a chunk, its run folder) → nested dictionary of arrays.
        part: Of the run's arrays.
        models: Where --keep_models writes the weights.
        lines: Where --monitor writes its lines.
        aside: Names of arrays without a seed axis; "seconds" are summed.
    """
    stem, count = stem_of(run, part), arguments.run_count(options)
    found, weights, paths, first = [], [], [], 0
    while first < count:
        path = stem.with_name(f"{stem.name}-{first}-{min(first + size, count)}")
        path = stem.parent / processes.text_from_primary(chunk_at(path).name if run.primary else "")
        end = int(path.name.rpartition("-")[2])
        own = options.copied()
        own.belong_to(cells=options.cells, programs=options.programs, window=slice(first, end))
        config = cli.config_of(own, own.experiment, own.aside) | {"seeds": [first, end]}
        with several.open_folder(path, {"config": config}) as chunk:
            chunk.log(f"seeds {first} to {end - 1} of {count}")
            found.append(traverse_util.flatten_dict(compute(own, chunk), sep="/"))
            chunk.drop_checkpoints()
            if options.keep_models and run.primary:
                weights.append(model_file.load_models(chunk.path / models))
        paths.append(path)
        first = end
    if arguments.monitored(options) and run.primary:
        _join_lines(run, paths, lines)
    if weights:
        joined = jax.tree.map(lambda *a: np.concatenate(a), *(w for _, w in weights))
        run.write_file(models, model_file.dump_models(weights[0][0], joined))
    return {name: _joined(name, [one[name] for one in found], aside) for name in found[0]}


def stem_of(run: RunFolder, part: str) -> Path:
    """What the folders of chunks begin with; they go when the run is complete."""
    return run.path / "checkpoints" / re.sub("[^A-Za-z0-9=+]+", "-", part)


def begun(run: RunFolder, part: str) -> bool:
    """Whether an interrupted run has left chunks."""
    stem = stem_of(run, part)
    left = run.primary and any(stem.parent.glob(f"{stem.name}-*-*"))
    return bool(processes.from_primary(np.asarray(left)))


def chunk_at(wanted: Path) -> Path:
    """The finished chunk that an earlier run has left at a chunk's first seed, or the chunk itself.

    Unfinished ones of another size are deleted.
    """
    for path in sorted(wanted.parent.glob(f"{wanted.name.rpartition('-')[0]}-*")):
        if (path / "arrays.npz").exists():
            return path
        if path != wanted:
            shutil.rmtree(path, ignore_errors=True)
    return wanted


def _join_lines(run, paths, name):
    """One file of what --monitor wrote of each chunk; of one that was all trained before, nothing.

    Such a chunk was interrupted after its last epoch and before it was measured.
    """
    there = [path / name for path in paths if (path / name).exists()]
    for path in paths:
        if path / name not in there:
            text = f"{path.name} was trained before --monitor was given: nothing of it in {name}"
            Progress(0, "monitor", log=run.log).say(text)
    run.write_file(name, b"".join(path.read_bytes() for path in there))


def _joined(name, parts, aside):
    first = name.split("/")[0]
    if first == "seconds":
        return np.sum(parts, axis=0)
    return parts[0] if first in aside else np.concatenate(parts)
