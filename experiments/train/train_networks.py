"""Trains networks, all seeds at once, inside a run folder, measures them, and keeps their weights.

    arrays = train_networks(options, {"a": task}, folder, measure)
    arrays["a"]["losses"]  # [s, epochs]

A training that was stopped goes on from its last saved state.
"""

import contextlib
import dataclasses
import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from experiments.lab import (
    Chunk,
    Executor,
    Options,
    Point,
    Progress,
    RunFolder,
    content_hash,
    stop_requested,
)
from experiments.train import arguments
from experiments.train.trained_tasks import (
    ALONE,
    Data,
    TrainedModel,
    TrainedTask,
    fine_seeds,
    whole_metrics,
)
from experiments.train.watched import layer_scalars
from rank_collapse.runs import metrics, seeds
from rank_collapse.runs.states import flatten_state, unflatten_state
from rank_collapse.training import Ensemble, Hyper, Trained, dump_models, init_model
from rank_collapse.training.recipe import run_config

Measure = Callable[[TrainedTask, TrainedModel, Data, jax.Array], PyTree[Array]]
CHECKPOINT_SECONDS = 20.0  # between two saved states at least


def train_networks(
    options: Options,
    tasks: Mapping[str, TrainedTask],
    folder: RunFolder,
    measure: Measure,
) -> dict[str, dict[str, np.ndarray]]:
    """Trains and measures networks, or reads finished ones from the run.

    Every network is trained with the same seeds: the same data and, scaled as its task says, the
    same weights. Networks of one program are trained together.

    Args:
        options: The flags.
        tasks: {part of the run's arrays: its training task}; `ALONE` is the part of a single task.
        folder: The run folder.
        measure: (task, model, data, key) of one seed → nested dictionary of arrays; the run's
            arrays have the names of the levels, joined by "/".

    Returns:
        {part: {name: [s, ...]}} of what `measure` returns, "losses" [s, epochs] and "diverged_at"
        [s]; of a task with curves "curves/<metric>" [s, epochs] and "whole/<metric>", their last;
        with --keep_models the weights, "model/<name>".

    Raises:
        ValueError: Every seed of a network diverged, or hyperparameters are invalid.
    """
    # Further seeds have weights where the first ones do.
    keeps = options.keep_models or any(folder.part(f"{part}/model") for part in tasks)
    is_monitored = "monitor" in options and options.monitor
    programs: dict[str, dict[str, TrainedTask]] = {}
    for part, task in tasks.items():
        check_files(options, part, folder)
        programs.setdefault(task.program or part, {})[part] = task
    arrays = {}
    with Executor(options, folder) as executor:
        for group in programs.values():

            def make_cells(point, group=group):
                return {part: task.make_hyper(point) for part, task in group.items()}

            task = next(iter(group.values()))
            watch = make_watch(task, is_monitored)
            ensemble = Ensemble(
                task.recipe,
                task.make_data,
                mesh=executor.mesh,
                epochs_per_chunk=1 if watch else max(1, -(-options.n_epochs // 20)),
                watch=watch,
            )
            measure_seeds = ensemble.map_models(functools.partial(measure_run, task, measure))
            name = "" if task.program else task.name
            for chunk in executor.chunks(make_cells):
                with keep_states(ensemble, chunk, executor.run, name, is_monitored) as calls:
                    trained = ensemble.train(*chunk.unpadded, **calls)
                results = measure_chunk(measure_seeds, chunk, trained, executor, name)
                if keeps:
                    model = seeds.to_host(trained.state.model, len(chunk.seeds))
                    results |= {"model": flatten_state(model)}
                executor.save(chunk, results)
            arrays |= executor.read(make_cells)
    for part in tasks:
        if not len(fine_seeds(arrays[part])):
            at = f"learning_rate={options.learning_rate}"
            raise ValueError(f"every seed diverged at {at}; see {folder.path}/log.txt")
    return {part: arrays[part] for part in tasks}


def make_watch(task: TrainedTask, is_monitored: bool) -> Callable | None:
    """Makes what is measured of each seed before training and after every epoch; None for nothing.

    Args:
        task: What is trained.
        is_monitored: Whether `layer_scalars` are measured.
    """
    if not (task.curves or is_monitored):
        return None

    def watch(model, data, hyper, _):
        """Measures one run after an epoch: metrics on held-out examples, and scalars of each
        layer."""
        config, scalars = run_config(task.recipe, hyper), {}
        if task.curves:
            scalars["curves"] = whole_metrics(model, data["eval"], config, task.metrics)
        if is_monitored:
            scalars["layers"] = layer_scalars(model, data, config)
        return scalars

    return watch


@contextlib.contextmanager
def keep_states(
    ensemble: Ensemble,
    chunk: Chunk,
    folder: RunFolder,
    name: str = "",
    is_monitored: bool = False,
) -> Iterator[dict[str, Any]]:
    """Shows the progress of the training of a chunk, and keeps its states in the run folder.

    The runs go on from their last saved state, if there is one.

    Args:
        ensemble: The ensemble that trains them.
        chunk: Runs that differ in seeds and floats alone.
        folder: The run folder; it keeps the states of a chunk that is not done.
        name: Name of what is trained, for progress; the cells by default.
        is_monitored: Whether the folder gets lines of the "layers" that are watched.

    Yields:
        The functions that `ensemble.train` calls while it trains the chunk, by the names of its
        arguments.
    """
    num_epochs, runs = ensemble.recipe.num_epochs, list(zip(chunk.cells, chunk.seeds, strict=True))
    text = json.dumps([chunk.cells, [int(seed) for seed in chunk.seeds]])
    states = content_hash(text.encode())[:12]
    folder.log(f"{describe_run(*runs[0])} to {describe_run(*runs[-1])}")
    folder.drop_checkpoints(but_of=states)  # of chunks that are done
    files = {c: network_file(c, metrics.NAME) for c in chunk.cells if is_monitored}
    diverged, saved = set(), time.monotonic()

    def resume(like):
        """Restores the last checkpoint, and drops the scalars of later epochs from the logs."""
        checkpoint = folder.restore_checkpoint(like, states)
        epoch = -1 if checkpoint is None else checkpoint[0]
        for cell, file in files.items():
            metrics.drop(folder.path / file, [s for c, s in runs if c == cell], epoch)
        if checkpoint is not None:
            progress.say(f"resumed after epoch {epoch}")
            progress.skip(epoch)
        return checkpoint

    def on_chunk(epoch, snapshot, losses):
        """Reports the loss and the runs that diverged; saves a checkpoint when one is due.

        Args:
            epoch: Epochs that are done.
            snapshot: Function that returns the states to save.
            losses: Float [runs, epochs done].
        """
        nonlocal saved
        is_finite = np.isfinite(losses).all(axis=1)
        for position in set(np.flatnonzero(~is_finite).tolist()) - diverged:
            diverged.add(position)
            run = describe_run(*runs[position])
            progress.say(f"{run} diverged by epoch {epoch}; it is kept apart")
        if time.monotonic() - saved > CHECKPOINT_SECONDS or stop_requested():
            folder.save_checkpoint(epoch, snapshot(), states)
            saved = time.monotonic()
        loss = float(losses[is_finite, -1].mean()) if is_finite.any() else float("nan")
        progress.reach(epoch, loss=loss)

    def on_watched(epoch, values, losses):
        """Appends the losses and scalars of an epoch to the file of each network."""
        for position, (cell, seed) in enumerate(runs):
            row = {"loss": losses[position, -1]} if epoch else {}
            row |= {name: value[position] for name, value in values["layers"].items()}
            metrics.append(folder.path / files[cell], epoch, row, seed=seed)

    label = f"training {name or describe_cells(chunk)}"
    with Progress(num_epochs, label, log=folder.log) as progress:
        yield {
            "resume": resume,
            "on_chunk": on_chunk,
            "on_watched": on_watched if is_monitored else None,
            "activity": progress.time_activity,
        }


def measure_chunk(
    measure_seeds: Callable, chunk: Chunk, trained: Trained, executor: Executor, name: str = ""
) -> dict[str, PyTree[np.ndarray]]:
    """Measures trained runs, and adds what training left of them.

    Args:
        measure_seeds: Function that `Ensemble.map_models` makes of the measure of one seed.
        chunk: The runs.
        trained: States of the trained runs.
        executor: Executor with the devices of the ensemble.
        name: See `keep_states`.
    """
    keys, hyper = seeds.shard_seeds(chunk.unpadded, executor.mesh)
    label, count = f"measuring {name or describe_cells(chunk)}", len(chunk.seeds)
    with Progress(count, label, log=executor.run.log) as progress:
        results = measure_seeds(
            trained.state,
            trained.data,
            hyper,
            keys,
            num_seeds=count,
            activity=progress.time_activity,
            on_seeds=progress.reach,
        )
    for name, curve in (trained.watched or {}).get("curves", {}).items():
        results |= {f"curves/{name}": curve[:, 1:], f"whole/{name}": curve[:, -1]}
    return results | {"losses": trained.losses, "diverged_at": trained.diverged_at}


def measure_run(
    task: TrainedTask,
    measure: Measure,
    model: TrainedModel,
    data: Data,
    hyper: Hyper,
    key: jax.Array,
) -> PyTree[Array]:
    """Measures one seed of a task, with the swept numbers of its run put into the network.

    Args:
        task: The task.
        measure: Function of (task, model, data, key).
        model: The trained model.
        data: Examples of the seed.
        hyper: Swept numbers of the run, such as gains and temperatures.
        key: Random key of the measurement.
    """
    recipe = dataclasses.replace(task.recipe, config=run_config(task.recipe, hyper))
    return measure(dataclasses.replace(task, recipe=recipe), model, data, key)


def describe_run(cell: str, seed: int) -> str:
    """Names one run: its seed, and its cell where it is not the only one."""
    cell = cell.removeprefix(f"{ALONE}/")
    return f"seed {seed}" + ("" if cell == ALONE else f" of {cell}")


def describe_cells(chunk: Chunk) -> str:
    """Names the first of the cells (networks with their settings) that a chunk of runs trains, and
    how many more there are."""
    first, *further = dict.fromkeys(chunk.cells)
    return first + (f" and {len(further)} more" if further else "")


def network_file(cell: str, name: str) -> str:
    """Names a file of one network: "models.safetensors" of the only one, else
    "models/<its part and point>.safetensors"."""
    stem, ending = name.split(".")
    network = re.sub(r"[^A-Za-z0-9=.+]+", "-", cell.removesuffix(ALONE)).strip("-")
    return f"{stem}/{network}.{ending}" if network else name


def check_files(options: Options, part: str, folder: RunFolder) -> None:
    """Refuses to keep weights or lines that networks trained earlier did not write.

    Args:
        options: The flags.
        part: Part of the arrays of the run.
        folder: The run folder; results that it already holds are not computed again.

    Raises:
        ValueError: Weights or lines are requested that an earlier run did not write.
    """
    is_monitored = "monitor" in options and options.monitor
    lines = folder.path / network_file(options.prefix + part, metrics.NAME)
    for flag, is_wanted, is_present in (
        ("keep_models", options.keep_models, folder.part(f"{part}/model")),
        ("monitor", is_monitored, lines.exists()),
    ):
        if is_wanted and folder.part(part) and not is_present:
            raise ValueError(
                f"{folder.path} was trained without --{flag}: --overwrite trains again"
            )


def save_models(point: Point, tasks: Mapping[str, TrainedTask]) -> None:
    """Saves trained weights as files of a run, if the run kept them.

    Args:
        point: Measured point of the run.
        tasks: The trained tasks, as in `train_networks`.
    """
    for part, task in tasks.items():
        name = network_file(task.options.prefix + part, "models.safetensors")
        weights = point.folder.part(f"{part}/model")
        if weights and point.lacks_file(name):
            point.save_file(name, dump_weights(task, weights))


def dump_weights(task: TrainedTask, weights: Mapping[str, np.ndarray]) -> bytes:
    """Writes weights {name: [s, ...]} as `rank_collapse.training.load_models` reads them."""
    keys = jax.random.split(jax.random.key(0), len(next(iter(weights.values()))))
    like = jax.eval_shape(jax.vmap(lambda key: init_model(key, task.recipe)), keys)
    config = run_config(task.recipe, arguments.make_hyper(task.options, task.floats))
    return dump_models(config, unflatten_state(weights, like, "the run"))
