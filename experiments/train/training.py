"""Networks of one recipe, all seeds at once, inside a run folder: trained, measured, saved.

`results_of` is for experiments that train the network of a `TrainedTask`; `results_of_cells` for
those that have recipes of their own.
"""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from experiments.lab.executor import Chunk, Executor
from experiments.lab.flags import Flags, content_hash
from experiments.lab.folder import RunFolder
from experiments.lab.progress import Progress, stop_requested
from experiments.train import arguments, path_accuracy
from experiments.train.watched import layer_scalars
from rank_collapse.runs import metrics, seeds
from rank_collapse.runs.files import damaged
from rank_collapse.runs.states import flatten, unflatten
from rank_collapse.training import Ensemble, Hyper, Recipe, Trained, dump_models
from rank_collapse.training.models import init_model
from rank_collapse.training.recipe import check_hyper, run_config
from rank_collapse.training.tasks.examples import Examples

ALONE = "results"  # the part of the arrays of a run that trains one network


@dataclass(frozen=True)
class TrainedTask:
    """One trained experiment.

    Attributes:
        options: The flags it is of.
        name: Of the folder under results/.
        title: Of the figure.
        recipe: What is trained.
        make_data: key → {"train", "eval"} Examples of one seed; also "texts", the training data
            as it is evaluated, where "train" is packed.
        metrics: Functions of (logits, examples) by name, "accuracy" among them.
        published: {"whole": accuracy, "baseline": accuracy} as the published code plots them.
        batch_size: Examples evaluated at a time; None for all.
        extra: What else determines the results, for config.json.
        curves: Whether the metrics are measured on the evaluation data after each epoch.
        floats: Fields of `Hyper` that are not taken from the flags.
        program: Name of what is compiled: setups of one name differ in their floats alone; "" for
            one of its own.
    """

    options: Flags
    name: str
    title: str
    recipe: Recipe
    make_data: Callable[[Any], dict[str, Any]]
    metrics: Mapping[str, Callable] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    batch_size: int | None = None
    extra: Mapping[str, Any] | None = None
    curves: bool = False
    floats: Mapping[str, Any] = field(default_factory=dict)
    program: str = ""


@dataclass
class Training:
    """Trains and measures chunks of runs that differ in seeds and floats alone: a program of the
    executor.

    Attributes:
        ensemble: What trains them.
        run: The folder; it keeps the states of a chunk that is not done.
        measured: `Ensemble.of_models` of what is measured of one run, a nested dictionary of
            arrays; by default it is what the ensemble watches, [s, looks, ...].
        name: Of what is trained, for progress; the cells by default.
        prepared: `Ensemble.of_models` of a run's hyper before training, such as gains that depend
            on the initial weights.
        steps: Of an epoch, where the time of a step is asked for.
        keep: Whether the weights are kept too.
        monitored: Whether there are lines of what is watched, while it trains.
        checkpoint_seconds: Between two saved states at least.
    """

    ensemble: Ensemble
    run: RunFolder
    measured: Callable | None = None
    name: str = ""
    prepared: Callable | None = None
    steps: int | None = None
    keep: bool = False
    monitored: bool = False
    checkpoint_seconds: float = 20.0

    def __call__(self, chunk: Chunk) -> dict[str, Any]:
        """What is measured, "losses" [s, epochs], "diverged_at" [s], and "seconds" {"train", "all"}
        [s], of which each has its share; where metrics are watched "curves" {metric: [s, epochs]}
        and "whole", their last; where there are `steps` "step_seconds" [s] of one, without
        compiling; where weights are kept "model"."""
        begun, count, ensemble = time.monotonic(), len(chunk.seeds), self.ensemble
        keys, hyper = jax.tree.map(lambda a: a[:count], (chunk.keys, chunk.floats))
        self.run.log(f"{name_of(chunk, 0)} to {name_of(chunk, count - 1)}")
        laid = ensemble.lay_out((hyper, keys))
        if self.prepared is not None:
            begin = ensemble.begin(laid[1], laid[0], None)
            hyper = self.prepared(*begin, *laid, num_seeds=count)
            laid = ensemble.lay_out((hyper, keys))
        trained = self.train(chunk, keys, hyper)
        seconds, found = {"train": time.monotonic() - begun}, trained.watched
        if self.measured is not None:
            found = self.measured(trained.state, trained.data, *laid, num_seeds=count)
            for name, curve in (trained.watched or {}).get("curves", {}).items():
                found |= {f"curves/{name}": curve[:, 1:], f"whole/{name}": curve[:, -1]}
        if self.keep:
            found |= {"model": flatten(seeds.to_host(trained.state.model, count))}
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

        def resume(like):
            found = run.restore_checkpoint(like, states)
            for cell, file in lines.items():
                own = [s for c, s in zip(chunk.cells, chunk.seeds, strict=True) if c == cell]
                metrics.drop(run.path / file, own, -1 if found is None else found[0])
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
            if time.monotonic() - saved > self.checkpoint_seconds or stop_requested():
                run.save_checkpoint(epoch, snapshot(), states)
                saved = time.monotonic()
            loss = float(losses[finite, -1].mean()) if finite.any() else float("nan")
            progress.reach(epoch, loss=loss)

        def on_watched(epoch, values, losses):
            for position, (cell, seed) in enumerate(zip(chunk.cells, chunk.seeds, strict=True)):
                own = {"loss": losses[position, -1]} if epoch else {}
                own |= {name: value[position] for name, value in values["layers"].items()}
                metrics.append(run.path / lines[cell], epoch, own, seed=seed)

        lines = {c: file_of(c, metrics.NAME) for c in chunk.cells if self.monitored}
        first, *more = dict.fromkeys(chunk.cells)
        label = self.name or first + (f" and {len(more)} more" if more else "")
        saved, watched = time.monotonic(), on_watched if lines else None
        with Progress(total, f"training {label}", log=run.log) as progress:
            return self.ensemble.train(
                keys, hyper, resume=resume, on_chunk=on_chunk, on_watched=watched
            )


def results_of_cells(
    executor: Executor,
    cells: Mapping[str, tuple[Any, Hyper | Callable[[Flags], Hyper]]],
    program: Callable[[Any], Training],
    **about: Any,
) -> dict[str, dict[str, np.ndarray]]:
    """What the runs of several cells give, {cell: {name: [s, ...]}}, read where the folder has it,
    else trained and saved.

    Every cell trains the same seeds: the same data and, scaled as the cell says, the same weights.

    Args:
        executor, **about: As of `Executor.map`.
        cells: {name: (what is compiled in, the floats, or flags → floats)}; those of one program go
            together.
        program: What is compiled in → what trains it.
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
    return {name: found[name] for name in cells}


def nested(found: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What `Training` gives of all seeds, of its saved arrays; "seconds" of them together."""
    from flax import traverse_util  # here: it takes half a second, which `--help` need not

    results = traverse_util.unflatten_dict(found, sep="/")
    return results | {"seconds": {name: a.sum() for name, a in results["seconds"].items()}}


def name_of(chunk: Chunk, position: int) -> str:
    """What one run of a chunk is called: its seed, and its cell where it is not alone."""
    cell = chunk.cells[position].removeprefix(f"{ALONE}/")
    return f"seed {chunk.seeds[position]}" + ("" if cell == ALONE else f" of {cell}")


def train_and_eval(
    make: Callable[[Any, int], Examples], options: Flags, key: Any
) -> dict[str, Examples]:
    """Training and evaluation data of one seed.

    Args:
        make: (key, number) → examples.
        options: The flags; with --train_as_eval the first training examples are evaluated.
        key: Of the seed.
    """
    key_train, key_eval = jax.random.split(key)
    train, count = make(key_train, options.n_train_data), options.n_eval_data
    return {
        "train": train,
        "eval": train.first(count) if options.train_as_eval else make(key_eval, count),
    }


def arrays_of(
    options: Flags,
    setups: Mapping[str, TrainedTask],
    run: RunFolder,
    measure: Callable[[TrainedTask, Any, Any, Any], Any],
) -> dict[str, dict[str, np.ndarray]]:
    """Everything that is shown of networks, {part: {name: [s, ...]}}: from the saved arrays, else
    trained and measured.

    Args:
        options: Flags.
        setups: {part of the run's arrays: what is trained}; `ALONE` is the part of a single one.
        run: The run folder.
        measure: (setup, model, data, key) of one seed → nested dictionary of arrays, whose levels
            have "/" between them in the names of the run's arrays.

    Returns:
        What `measure` returns with a leading seed axis, and what `Training` says.

    Raises:
        ValueError: Every seed of a network diverged, or hyperparameters that mean nothing.
        RunError: The run holds another number of seeds or epochs.
    """

    def hyper_of(setup, own):
        hyper = arguments.hyper(own, setup.floats)
        check_hyper(hyper, setup.recipe)
        return hyper

    programs = {setup.program or part: setup for part, setup in setups.items()}
    cells = {p: (setup.program or p, partial(hyper_of, setup)) for p, setup in setups.items()}
    for part in setups:
        check_files(options, part, run)
    with Executor(options, run) as executor:
        found = results_of_cells(
            executor,
            cells,
            lambda name: training_of(options, programs[name], measure, executor),
        )
    for part, arrays in found.items():
        epochs, shape = setups[part].recipe.num_epochs, arrays["losses"].shape
        if shape[1] != epochs:
            why = f"{part}/losses of shape {shape} is not of {epochs} epochs"
            raise damaged(run.path / "arrays.npz", why)
        if not len(kept(arrays)):
            at = f"learning_rate={options.learning_rate}"
            raise ValueError(f"every seed diverged at {at}; see {run.path}/log.txt")
    return found


def check_files(options: Flags, part: str, run: RunFolder) -> None:
    """Refuses to keep what networks that are trained already did not leave."""
    monitored = "monitor" in options and options.monitor
    lines = run.path / file_of(options.prefix + part, metrics.NAME)
    for flag, wanted, there in (
        ("keep_models", options.keep_models, run.part(f"{part}/model")),
        ("monitor", monitored, lines.exists()),
    ):
        if wanted and run.part(part) and not there:
            raise ValueError(f"{run.path} was trained without --{flag}: --overwrite trains again")


def results_of(*given: Any) -> dict[str, dict[str, Any]]:
    """`arrays_of`, each part `nested`."""
    return {part: nested(arrays) for part, arrays in arrays_of(*given).items()}


def training_of(
    options: Flags, setup: TrainedTask, measure: Callable, executor: Executor
) -> Training:
    """What trains the networks of one program, with any floats.

    Args:
        options, measure: As of `arrays_of`.
        setup: One of them.
        executor: Its folder keeps the states.
    """
    recipe, monitored = setup.recipe, "monitor" in options and options.monitor

    def measured_of(model, data, hyper, key):
        own = dataclasses.replace(recipe, config=run_config(recipe, hyper))
        return measure(dataclasses.replace(setup, recipe=own), model, data, key)

    def watch(model, data, hyper, _):
        config, found = run_config(recipe, hyper), {}
        if setup.curves:
            found["curves"] = path_accuracy.whole_model(model, data["eval"], config, setup.metrics)
        if monitored:
            found["layers"] = layer_scalars(model, data, config)
        return found

    watched = setup.curves or monitored  # of every epoch
    ensemble = Ensemble(
        recipe,
        setup.make_data,
        mesh=executor.mesh,
        epochs_per_chunk=1 if watched else arguments.epochs_per_chunk(options),
        at_once=options.seeds_at_once or None,
        watch=watch if watched else None,
    )
    return Training(
        ensemble,
        executor.run,
        ensemble.of_models(measured_of),
        "" if setup.program else setup.name,
        keep=options.keep_models,
        monitored=monitored,
        checkpoint_seconds=options.checkpoint_seconds,
    )


def file_of(cell: str, name: str) -> str:
    """What one network has beside its arrays: "models.safetensors" of the only one, else
    "models/<its part and point>.safetensors"."""
    stem, ending = name.split(".")
    own = re.sub(r"[^A-Za-z0-9=.+]+", "-", cell.removesuffix(ALONE)).strip("-")
    return f"{stem}/{own}.{ending}" if own else name


def model_files(
    results: Any, setups: TrainedTask | Mapping[str, TrainedTask], run: RunFolder
) -> dict[str, Callable[[], bytes]]:
    """Makes the files of trained weights, where they were kept; as `files` of a run.

    Args:
        results: Unused.
        setups: What was trained, as of `arrays_of`.
        run: The folder.
    """
    setups = {ALONE: setups} if isinstance(setups, TrainedTask) else setups
    files = {}
    for part, setup in setups.items():
        if weights := run.part(f"{part}/model"):
            name = file_of(setup.options.prefix + part, "models.safetensors")
            files[name] = partial(weights_file, setup, weights)
    return files


def weights_file(setup: TrainedTask, weights: Mapping[str, np.ndarray]) -> bytes:
    """A file of weights {name: [s, ...]}, as `rank_collapse.training.load_models` reads it."""
    keys = jax.random.split(jax.random.key(0), len(next(iter(weights.values()))))
    like = jax.eval_shape(jax.vmap(lambda key: init_model(key, setup.recipe)), keys)
    config = run_config(setup.recipe, arguments.hyper(setup.options, setup.floats))
    return dump_models(config, unflatten(weights, like, "the run"))


def whole_model(setup: TrainedTask, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """One seed's metrics alone, as a measure of `arrays_of`: {"whole": {metric: []}}."""
    config, metrics = setup.recipe.config, setup.metrics
    return {"whole": path_accuracy.whole_model(model, data["eval"], config, metrics)}


def kept(results: Mapping[str, Any]) -> np.ndarray:
    """Positions of the seeds that did not diverge."""
    return np.flatnonzero(results["diverged_at"] < 0)


def diverged(results: Mapping[str, Any]) -> np.ndarray:
    """Which seeds diverged [s], 0 or 1."""
    return (results["diverged_at"] >= 0).astype(int)
