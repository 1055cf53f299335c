"""Runs of one recipe, trained and measured chunk by chunk: a `Program` of the executor."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.shell import memory, signals
from experiments.shell.executor import Chunk, Executor
from experiments.shell.options import content_hash
from experiments.shell.progress import Progress
from experiments.trained.kept import ALONE, Kept
from rank_collapse.runs import processes, seeds
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training.ensemble import Ensemble, Trained
from rank_collapse.training.recipe import Hyper


@dataclass
class Training:
    """Trains and measures chunks of runs that differ in seeds and floats alone.

    Attributes:
        ensemble: What trains them.
        measured: `of_models` of what is measured of one run, a nested dictionary of arrays.
        run: The folder; it keeps the states of a chunk that is not done.
        name: Of what is trained, for progress; the cells by default.
        prepared: `of_models` of a run's hyper before training, such as gains that depend on the
            initial weights.
        along: Whether every run is also measured before training and after each chunk of epochs:
            arrays [s, looks, ...] in place of [s, ...].
        kept: The files of the run beside its arrays.
        checkpoint_seconds: Between two saved states at least.
    """

    ensemble: Ensemble
    measured: Callable
    run: RunFolder
    name: str = ""
    prepared: Callable | None = None
    along: bool = False
    kept: Kept | None = None
    checkpoint_seconds: float = 20.0

    def needed(self, chunk: Chunk) -> int:
        return bytes_of_a_run(self.ensemble, chunk.floats) * chunk.size

    def __call__(self, chunk: Chunk) -> dict[str, Any]:
        """What is measured, "losses" [s, epochs], "curves" {metric: [s, epochs]} where there are
        any, "diverged_at" [s], and "seconds" {"train", "all"} [s], of which each has its share."""
        begun, count = time.monotonic(), len(chunk.seeds)
        keys, hyper = jax.tree.map(lambda a: a[:count], (chunk.keys, chunk.floats))
        self.run.log(f"{name_of(chunk, 0)} to {name_of(chunk, count - 1)}")
        laid = self.ensemble.lay_out((hyper, keys))
        if self.prepared is not None:
            state, data = self.ensemble.begin(laid[1], laid[0], None)
            hyper = self.prepared(state, data, *laid, num_seeds=count)
            laid = self.ensemble.lay_out((hyper, keys))
        looks = None
        if self.along:
            state, data = self.ensemble.begin(laid[1], laid[0], None)
            looks = Looks(self, data, laid, count)
            looks.add(0, state)
        trained = self.train(chunk, keys, hyper, looks)
        if self.kept is not None and self.kept.options.keep_models:
            weights = seeds.to_host(trained.state.model, count)
            self.kept.keep_weights(chunk.seeds[0], weights)
        seconds = {"train": time.monotonic() - begun}
        if looks is None:
            found = self.measured(trained.state, trained.data, *laid, num_seeds=count)
        else:
            found = looks.found
        seconds["all"] = time.monotonic() - begun
        results = {
            "losses": trained.losses,
            "diverged_at": np.array([trained.diverged.get(s, -1) for s in range(count)]),
            "seconds": {name: np.full(count, value / count) for name, value in seconds.items()},
        }
        return found | results | ({"curves": trained.curves} if trained.curves else {})

    def train(self, chunk: Chunk, keys: Any, hyper: Hyper, looks: "Looks | None") -> Trained:
        """Trains the runs of a chunk, from the last checkpoint, if there is one."""
        run, total, known = self.run, self.ensemble.recipe.num_epochs, set()
        runs = json.dumps([chunk.cells, [int(seed) for seed in chunk.seeds]])
        states = content_hash(runs.encode())[:12]
        run.drop_checkpoints(but_of=states)  # of chunks that are done

        def whole(snapshot):
            return snapshot if looks is None else snapshot | {"looks": looks.found}

        def resume(like):
            found = run.restore_checkpoint(whole(like), of=states)
            if watched:
                after = -1 if found is None else found[0]
                run.drop_metrics(map(int, chunk.seeds), after, file=self.kept.lines)
            if found is not None:
                progress.say(f"resumed after epoch {found[0]}")
                progress.skip(found[0])
                if looks is not None:
                    looks.found = found[1].pop("looks")
            return found

        watched = self.kept is not None and self.kept.monitored
        first, *more = dict.fromkeys(chunk.cells)
        label = self.name or first + (f" and {len(more)} more" if more else "")
        with Progress(total, f"training {label}", log=run.log) as progress:
            saved = begun = time.monotonic()

            def on_chunk(epoch, snapshot, losses):
                nonlocal saved
                finite = np.isfinite(losses).all(axis=1)
                for position in set(np.flatnonzero(~finite).tolist()) - known:
                    known.add(position)
                    name = name_of(chunk, position)
                    progress.say(f"{name} diverged by epoch {epoch}; it is kept apart")
                if looks is not None:
                    place = -(-epoch // self.ensemble.epochs_per_chunk)
                    looks.add(place, self.ensemble.lay_out(snapshot()["state"]))
                now, wait = time.monotonic(), self.checkpoint_seconds
                due = now - saved > wait or (epoch == total and now - begun > wait)
                if processes.from_primary(np.asarray(due or signals.asked())):
                    run.save_checkpoint(epoch, whole(snapshot()), of=states)
                    saved = time.monotonic()
                loss = float(losses[finite, -1].mean()) if finite.any() else float("nan")
                progress.update(epoch, loss=loss)

            def on_watched(epoch, values):
                for position, seed in enumerate(chunk.seeds):
                    own = {name: value[position] for name, value in values.items()}
                    run.append_metrics(epoch, own, seed=seed, file=self.kept.lines)

            return self.ensemble.train(
                keys,
                hyper,
                resume=resume,
                on_chunk=on_chunk,
                on_watched=on_watched if watched else None,
            )


class Looks:
    """What is measured of the runs of a chunk while they train, `found`: leaves [s, looks, ...]."""

    def __init__(self, training: Training, data: Any, laid: tuple[Any, Any], count: int):
        self.training, self.data, self.laid, self.count = training, data, laid, count
        self.found: Any = None

    def add(self, place: int, state: Any) -> None:
        """Measures the states of the runs, laid out over the devices."""
        new = self.training.measured(state, self.data, *self.laid, num_seeds=self.count)
        if self.found is None:
            ensemble = self.training.ensemble
            looks = 1 - (-ensemble.recipe.num_epochs // ensemble.epochs_per_chunk)
            self.found = jax.tree.map(
                lambda a: np.zeros((len(a), looks, *a.shape[1:]), a.dtype), new
            )
        for found, own in zip(jax.tree.leaves(self.found), jax.tree.leaves(new), strict=True):
            found[:, place] = own


def of_models(ensemble: Ensemble, fn: Callable[[Any, Any, Hyper, Any], Any]) -> Callable:
    """fn(model, data, hyper, key) of one run, compiled for all runs of an ensemble."""
    return ensemble.mapped(lambda state, data, hyper, key, _: fn(state.model, data, hyper, key))


def results_of_cells(
    executor: Executor,
    cells: Mapping[str, tuple[Any, Hyper]],
    program: Callable[[Any], Training],
    **about: Any,
) -> dict[str, dict[str, Any]]:
    """What the runs of several cells give, read where the folder has it, else trained and saved.

    Every cell trains the same seeds: the same data and, scaled as the cell says, the same weights.

    Args:
        executor, **about: As of `Executor.map`.
        cells: {name: (what is compiled in, the floats)}; those of one program go together.
        program: What is compiled in → what trains it.

    Returns:
        {cell: `nested`}.
    """
    groups: dict[Any, dict[str, Hyper]] = {}
    for name, (static, hyper) in cells.items():
        groups.setdefault(static, {})[name] = jax.tree.map(jnp.float32, hyper)
    found = {}
    for static, group in groups.items():
        found |= executor.map(partial(program, static), group, advance=False, **about)
    return {name: nested(found[name]) for name in cells}


def nested(found: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What `Training` gives of all seeds, of its saved arrays; "seconds" of them together."""
    from flax import traverse_util  # here: it takes half a second, which `--help` need not

    results = traverse_util.unflatten_dict(found, sep="/")
    return results | {"seconds": {name: a.sum() for name, a in results["seconds"].items()}}


def name_of(chunk: Chunk, position: int) -> str:
    """What one run of a chunk is called: its seed, and its cell where it is not alone."""
    cell = chunk.cells[position].removeprefix(f"{ALONE}/")
    return f"seed {chunk.seeds[position]}" + ("" if cell == ALONE else f" of {cell}")


def bytes_of_a_run(ensemble: Ensemble, hyper: Hyper) -> int:
    """What one run takes: its data, its state, and a copy of that on the way to a checkpoint.

    Args:
        ensemble: What trains it.
        hyper: Floats, or arrays [s, ...]; their names and shapes count.
    """
    mesh = ensemble.mesh
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), mesh.size))
    hyper = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((mesh.size, *np.shape(a)[1:]), jnp.float32), hyper
    )
    state, data = jax.eval_shape(ensemble.begin, keys, hyper, None)
    each = (2 * memory.size_of(state) + memory.size_of(data)) // mesh.size
    if not seeds.on_cpu(mesh):  # a device vmaps over its seeds, and a step needs as much
        sharding = seeds.seed_sharding(mesh)
        laid = jax.tree.map(lambda a: a.update(sharding=sharding), (state, data, hyper))
        analysis = ensemble.chunk.lower(*laid, jnp.int32(0)).compile().memory_analysis()
        each += 0 if analysis is None else analysis.temp_size_in_bytes
    return each
