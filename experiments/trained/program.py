"""Runs of one recipe, trained and measured chunk by chunk: a `Program` of the executor."""

import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.shell import memory, signals
from experiments.shell.executor import Chunk, Executor
from experiments.shell.flag_values import Flags
from experiments.shell.options import content_hash
from experiments.shell.progress import Progress
from rank_collapse.runs import metrics, processes, seeds
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training import Ensemble, Hyper, Trained, dump_models, load_models

ALONE = "results"  # the part of the arrays of a run that trains one network


class Kept:
    """The files beside the arrays that flags ask for, of the seeds of one network.

    Args:
        options: Flags.
        config: What is trained, with its floats.
        run: The run folder.
        part: Of the run's arrays that is the network's.

    Attributes:
        models: Where --keep_models writes the weights: of several networks a file for each.
        lines: Where --monitor writes its lines. Both are "" where nobody asks.
    """

    def __init__(self, options: Flags, config: Any, run: RunFolder, part: str):
        self.config, self.run, self.part = config, run, part
        name = re.sub("[^A-Za-z0-9=+]+", "-", part)
        names = f"models/{name}.safetensors", f"{metrics.FOLDER}/{name}.jsonl"
        models, lines = ("models.safetensors", metrics.NAME) if part == ALONE else names
        self.models = models if options.keep_models else ""
        self.lines = lines if monitored(options) else ""

    def seeds(self, num_epochs: int) -> int:
        """Of how many of the first seeds the files hold all, of networks of so many epochs."""
        counts, (weights, lines) = [], (self.run.path / own for own in (self.models, self.lines))
        if self.models:
            there = jax.tree.leaves(load_models(weights)[1] if weights.exists() else ())
            counts.append(len(there[0]) if there else 0)
        if self.lines:
            rows = metrics.read(lines) if lines.exists() else []
            ended = {r.get("seed") for r in rows if r["step"] == num_epochs}
            counts.append(next(seed for seed in itertools.count() if seed not in ended))
        return int(processes.from_primary(np.asarray(min(counts))))

    def keep_weights(self, chunk: Chunk, weights: Any) -> None:
        """Writes the weights [r, ...] of the seeds of a chunk after those of the seeds before."""
        place = [i for i, cell in enumerate(chunk.cells) if cell == self.part]
        if not (self.models and place and self.run.primary):
            return
        first, weights = chunk.seeds[place[0]], jax.tree.map(lambda a: a[place], weights)
        if first:
            before = load_models(self.run.path / self.models)[1]
            weights = jax.tree.map(lambda a, b: np.concatenate([a[:first], b]), before, weights)
        self.run.write_file(self.models, dump_models(self.config, weights))


def monitored(options: Flags) -> bool:
    """Whether the lines of --monitor are asked for."""
    return "monitor" in options and options.monitor


@dataclass
class Training:
    """Trains and measures chunks of runs that differ in seeds and floats alone.

    Attributes:
        ensemble: What trains them.
        run: The folder; it keeps the states of a chunk that is not done.
        measured: `Ensemble.of_models` of what is measured of one run, a nested dictionary of
            arrays; by default it is what the ensemble watches, [s, looks, ...].
        name: Of what is trained, for progress; the cells by default.
        prepared: `Ensemble.of_models` of a run's hyper before training, such as gains that depend
            on the initial weights.
        steps: Of an epoch, where the time of a step is asked for.
        kept: {cell: the files beside its arrays}; empty where nobody asks for any.
        checkpoint_seconds: Between two saved states at least.
    """

    ensemble: Ensemble
    run: RunFolder
    measured: Callable | None = None
    name: str = ""
    prepared: Callable | None = None
    steps: int | None = None
    kept: Mapping[str, Kept] = field(default_factory=dict)
    checkpoint_seconds: float = 20.0

    def needed(self, chunk: Chunk) -> int:
        return bytes_of_a_run(self.ensemble, chunk.floats) * chunk.size

    def __call__(self, chunk: Chunk) -> dict[str, Any]:
        """What is measured, "losses" [s, epochs], "diverged_at" [s], and "seconds" {"train", "all"}
        [s], of which each has its share; where metrics are watched "curves" {metric: [s, epochs]}
        and "whole", their last; where there are `steps` "step_seconds" [s] of one, without
        compiling."""
        begun, count, ensemble = time.monotonic(), len(chunk.seeds), self.ensemble
        keys, hyper = jax.tree.map(lambda a: a[:count], (chunk.keys, chunk.floats))
        self.run.log(f"{name_of(chunk, 0)} to {name_of(chunk, count - 1)}")
        laid = ensemble.lay_out((hyper, keys))
        if self.prepared is not None:
            begin = ensemble.begin(laid[1], laid[0], None)
            hyper = self.prepared(*begin, *laid, num_seeds=count)
            laid = ensemble.lay_out((hyper, keys))
        trained = self.train(chunk, keys, hyper)
        if self.kept:
            weights = seeds.to_host(trained.state.model, count)
            for files in self.kept.values():
                files.keep_weights(chunk, weights)
        seconds, found = {"train": time.monotonic() - begun}, trained.watched
        if self.measured is not None:
            found = self.measured(trained.state, trained.data, *laid, num_seeds=count)
            for name, curve in (trained.watched or {}).get("curves", {}).items():
                found |= {f"curves/{name}": curve[:, 1:], f"whole/{name}": curve[:, -1]}
        if self.steps is not None:  # the first chunk compiles
            steps = ensemble.epochs_per_chunk * self.steps * count
            each = min(trained.chunk_seconds[1:], default=np.nan) / steps
            found |= {"step_seconds": np.full(count, each)}
        seconds["all"] = time.monotonic() - begun
        return found | {
            "losses": trained.losses,
            "diverged_at": trained.diverged_at,
            "seconds": {name: np.full(count, value / count) for name, value in seconds.items()},
        }

    def train(self, chunk: Chunk, keys: Any, hyper: Hyper) -> Trained:
        """Trains the runs of a chunk, from the last checkpoint, if there is one."""
        run, total, known = self.run, self.ensemble.recipe.num_epochs, set()
        runs = json.dumps([chunk.cells, [int(seed) for seed in chunk.seeds]])
        states = content_hash(runs.encode())[:12]
        run.drop_checkpoints(but_of=states)  # of chunks that are done
        lines = {cell: files.lines for cell, files in self.kept.items() if files.lines}

        def resume(like):
            found = run.restore_checkpoint(like, of=states)
            for cell, file in lines.items():
                own = [s for c, s in zip(chunk.cells, chunk.seeds, strict=True) if c == cell]
                run.drop_metrics(map(int, own), -1 if found is None else found[0], file=file)
            if found is not None:
                progress.say(f"resumed after epoch {found[0]}")
                progress.skip(found[0])
            return found

        def on_chunk(epoch, snapshot, losses):
            nonlocal saved
            finite = np.isfinite(losses).all(axis=1)
            for position in set(np.flatnonzero(~finite).tolist()) - known:
                known.add(position)
                name = name_of(chunk, position)
                progress.say(f"{name} diverged by epoch {epoch}; it is kept apart")
            now, wait = time.monotonic(), self.checkpoint_seconds
            due = now - saved > wait or (epoch == total and now - begun > wait)
            if processes.from_primary(np.asarray(due or signals.asked())):
                run.save_checkpoint(epoch, snapshot(), of=states)
                saved = time.monotonic()
            loss = float(losses[finite, -1].mean()) if finite.any() else float("nan")
            progress.update(epoch, loss=loss)

        def on_watched(epoch, values, losses):
            for position, (cell, seed) in enumerate(zip(chunk.cells, chunk.seeds, strict=True)):
                own = {"loss": losses[position, -1]} if epoch else {}
                own |= {name: value[position] for name, value in values["layers"].items()}
                run.append_metrics(epoch, own, seed=seed, file=lines[cell])

        first, *more = dict.fromkeys(chunk.cells)
        label = self.name or first + (f" and {len(more)} more" if more else "")
        saved = begun = time.monotonic()
        watched = on_watched if lines else None
        with Progress(total, f"training {label}", log=run.log) as progress:
            return self.ensemble.train(
                keys, hyper, resume=resume, on_chunk=on_chunk, on_watched=watched
            )


def results_of_cells(
    executor: Executor,
    cells: Mapping[str, tuple[Any, Hyper | Callable[[Flags], Hyper]]],
    program: Callable[[Any], Training],
    **about: Any,
) -> dict[str, dict[str, Any]]:
    """What the runs of several cells give, read where the folder has it, else trained and saved.

    Every cell trains the same seeds: the same data and, scaled as the cell says, the same weights.

    Args:
        executor, **about: As of `Executor.map`.
        cells: {name: (what is compiled in, the floats, or flags → floats)}; those of one program go
            together.
        program: What is compiled in → what trains it.

    Returns:
        {cell: `nested`}.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for name, (static, hyper) in cells.items():
        groups.setdefault(static, {})[name] = hyper

    def floats_of(group, options):
        floats = {name: own(options) if callable(own) else own for name, own in group.items()}
        return jax.tree.map(np.float32, floats)

    found = {}
    for static, group in groups.items():
        found |= executor.map(partial(program, static), partial(floats_of, group), **about)
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
