"""One network's seeds inside a run folder: trained, measured, saved, and read the next time."""

import functools
import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from absl import flags
from flax import traverse_util

from experiments.shell import cli, signals
from experiments.shell.executor import Chunk, map_cells
from experiments.shell.flag_values import Flags
from experiments.shell.memory_budget import MemoryBudget
from experiments.shell.progress import Progress
from experiments.trained import arguments
from experiments.trained.cells import bytes_of_a_run
from rank_collapse.runs import metrics, processes
from rank_collapse.runs.files import RunError, damaged
from rank_collapse.runs.folder import RunFolder
from rank_collapse.runs.seeds import seed_keys, to_host
from rank_collapse.training import model_file, path_accuracy
from rank_collapse.training.ensemble import Ensemble, Trained
from rank_collapse.training.recipe import check_hyper
from rank_collapse.training.tasks.examples import Examples
from rank_collapse.training.training import Recipe
from rank_collapse.training.watched import layer_scalars


@dataclass(frozen=True)
class Setup:
    """One trained experiment.

    Attributes:
        name: Of the folder under results/.
        title: Of the figure.
        recipe: What is trained.
        make_data: key → {"train", "eval"} Examples of one seed; also "texts", the training data
            as it is evaluated, where "train" is packed.
        metrics: Functions of (logits, examples) by name; the first is the headline.
        published: {"whole": accuracy, "baseline": accuracy} as the published code plots them.
        batch_size: Examples evaluated at a time; None for all.
        extra: What else determines the results, for config.json.
        curves: Metrics that are also measured on the evaluation data after each epoch.
        sampled, semantics: Name and semantics of sampled sets of paths, where there are any.
        task: Where a binary has several.
    """

    name: str
    title: str
    recipe: Recipe
    make_data: Callable[[Any], dict[str, Any]]
    metrics: Mapping[str, Callable]
    published: Mapping[str, float]
    batch_size: int | None = None
    extra: Mapping[str, Any] | None = None
    curves: tuple[str, ...] = ()
    sampled: str = "sampled"
    semantics: str = "recomputed"
    task: str = ""


def train_and_eval(
    make: Callable[[Any, int], Examples], options: flags.FlagValues, key: Any
) -> dict[str, Examples]:
    """Training and evaluation data of one seed.

    Args:
        make: (key, number) → examples.
        options: The flags; with --train_as_eval the first training examples are evaluated.
        key: Of the seed.
    """
    key_train, key_eval = jax.random.split(key)
    train = make(key_train, options.n_train_data)
    if options.train_as_eval:
        return {"train": train, "eval": train.first(options.n_eval_data)}
    return {"train": train, "eval": make(key_eval, options.n_eval_data)}


def open_run(
    options: flags.FlagValues, name: str, *, extra: Any = None, execution: Sequence[str] = ()
) -> RunFolder:
    """The run folder; see --do_train and --overwrite_output_dir about one that exists."""
    known = [flag for flag in arguments.EXECUTION if flag in options]
    fields = {"extra": extra, "execution": [*known, *execution]}
    replace = "overwrite_output_dir" in options and options.overwrite_output_dir
    try:
        run = cli.open_run(options, name, **fields)
    except RunError:
        if not replace:
            raise
        return cli.open_run(options, name, overwrite=True, **fields)
    if run.complete and (options.do_train or replace):
        run.close()
        run = cli.open_run(options, name, overwrite=True, **fields)
    return run


def results_of(
    options: Flags,
    setup: Setup,
    run: RunFolder,
    measure: Callable[[Any, Any, Any], Any],
    *,
    part: str = "results",
    models: str = "models.safetensors",
    lines: str = metrics.NAME,
    constants: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Everything that is shown of one network: from the saved arrays, else trained and measured.

    Args:
        options: Flags.
        setup: What is trained.
        run: The run folder.
        measure: (model, data, key) of one seed → nested dictionary of arrays.
        part: Of the run's arrays, with "/" between the levels of the dictionary.
        models: Where --keep_models writes the weights. They are not kept otherwise, so that a run
            asked for them later trains again.
        lines: Where --monitor writes its lines; of a run asked for them later as of the weights.
        constants: Arrays without a seed axis that are saved beside what is measured.

    Returns:
        What `measure` returns with a leading seed axis, the constants, "losses" [s, epochs],
        "curves" {metric: [s, epochs]} where the setup has any, "diverged_at" [s] (the first epoch
        whose loss is not finite, −1 for none) and
        "seconds": {"train", "all"}.

    Raises:
        ValueError: Every seed diverged, or hyperparameters that mean nothing.
        RunError: The run holds another number of seeds or epochs.
    """
    count, found = options.num_seeds, run.part(part)
    done = found is not None and len(found["losses"]) == count
    missing = Kept(options, setup, run, models, lines).missing() if done else []
    aside = {"seconds", *(constants or {})}

    def trained(cells, run, again=False):
        kept = Kept(options, setup, run, models, lines, again=again)
        check = partial(refuse_if_all_diverged, options, run) if len(cells) == 1 else _accept
        with MemoryBudget(options, cli.mesh(options), run.log) as budget:
            return map_cells(
                lambda: Training(options, setup, measure, part, list(cells), kept),
                {name: arguments.hyper(own) for name, own in cells.items()},
                seed_keys(options.seed, count), run=run, budget=budget, aside=aside, check=check,
                again=again, most_known=None if done else kept.seeds(),
            )  # fmt: skip

    if missing:
        print(f"a finished run has not kept all: training again for {' and '.join(missing)}")
        trained({part: options}, run, again=True)
        run.drop_checkpoints()
    elif options.unit is None or options.keep_models or arguments.monitored(options):
        trained({part: options}, run)
    elif not done:
        check_hyper(arguments.hyper(options), setup.recipe)
        cells = [cell.options for cell in options.unit.cells]
        cells = [cell for cell in cells if _means_something(cell, setup.recipe)]
        config = [cli.config_of(cell, cell.experiment, cell.aside) for cell in cells]
        with RunFolder(options.unit.folder, {"cells": config}) as whole:
            of_cell = {f"{part}/cell {i}": cell for i, cell in enumerate(cells, 1)}
            own = trained(of_cell, whole)[f"{part}/cell {cells.index(options) + 1}"]
        refuse_if_all_diverged(options, run, part, own)
        run.save_arrays({f"{part}/{name}": values for name, values in own.items()})
    if constants and not run.part(part).keys() >= constants.keys():
        run.save_arrays({f"{part}/{name}": values for name, values in constants.items()})
    found = run.part(part)
    if found["losses"].shape[1] != setup.recipe.num_epochs:
        raise damaged(
            run.path / "arrays.npz",
            f"{part}/losses of shape {found['losses'].shape} is not of {setup.recipe.num_epochs} "
            "epochs",
        )
    results = traverse_util.unflatten_dict(found, sep="/")
    return results | {"seconds": {name: a.sum() for name, a in results["seconds"].items()}}


def _accept(cell, found):
    """Cells of an ensemble are checked one by one."""


def _means_something(options, recipe):
    try:
        check_hyper(arguments.hyper(options), recipe)
    except ValueError:
        return False
    return True


def refuse_if_all_diverged(
    options: Flags, run: RunFolder, part: str, found: Mapping[str, np.ndarray]
) -> None:
    """Raises ValueError where all seeds are there and none has finite losses to the end."""
    losses = found["losses"]
    if len(losses) == options.num_seeds and not np.isfinite(losses).all(axis=1).any():
        raise ValueError(
            f"every seed diverged at learning_rate={options.learning_rate}; see {run.path}/log.txt"
        )


@dataclass
class Kept:
    """The files of a run beside its arrays: weights, and lines of --monitor.

    Attributes:
        options, setup, run, models, lines: As of `results_of`.
        again: Whether all seeds are trained again for these files alone.
    """

    options: Flags
    setup: Setup
    run: RunFolder
    models: str
    lines: str
    again: bool = False
    _weights: Any = None

    @property
    def monitored(self) -> bool:
        """Whether the lines are asked for."""
        return arguments.monitored(self.options)

    def missing(self) -> list[str]:
        """Those that are asked for and not there, of a run whose arrays are."""
        weights = self.options.keep_models and not (self.run.path / self.models).exists()
        lines = self.monitored and self._watched() < self.options.num_seeds
        return [self.models] * weights + [self.lines] * lines

    def seeds(self) -> int:
        """How many of the first seeds have all that is asked for."""
        found = self._watched() if self.monitored else self.options.num_seeds
        path = self.run.path / self.models
        if self.options.keep_models:
            found = min(found, _count(model_file.load_models(path)[1]) if path.exists() else 0)
        return int(processes.from_primary(np.asarray(found)))

    def _watched(self):
        """How many of the first seeds have the line of the last epoch."""
        if not (self.run.path / self.lines).exists():
            return 0
        rows = metrics.read(self.run.path / self.lines)
        there = {r.get("seed") for r in rows if r["step"] == self.setup.recipe.num_epochs}
        return next(seed for seed in itertools.count() if seed not in there)

    def keep_weights(self, first: int, weights: Any) -> None:
        """Writes the weights of seeds `first` and on, behind those of the seeds before.

        Where all are trained again the file is written when it is whole.
        """
        if not self.run.primary:
            return
        if first and self._weights is None:
            before = model_file.load_models(self.run.path / self.models)[1]
            self._weights = jax.tree.map(lambda a: np.asarray(a[:first]), before)
        if first:
            weights = jax.tree.map(lambda *a: np.concatenate(a), self._weights, weights)
        self._weights = weights
        if not self.again or _count(weights) == self.options.num_seeds:
            data = model_file.dump_models(self.setup.recipe.config, weights)
            self.run.write_file(self.models, data)


def _count(weights):
    """Seeds of weights [s, ...]."""
    return len(jax.tree.leaves(weights)[0])


class Training:
    """What trains and measures chunks of runs of one network, for `map_cells`.

    Args:
        options, setup, measure, part: As of `results_of`.
        cells: Names of the cells.
        kept: The files beside the arrays.
    """

    def __init__(
        self,
        options: Flags,
        setup: Setup,
        measure: Callable[[Any, Any, Any], Any],
        part: str,
        cells: Sequence[str],
        kept: Kept,
    ):
        self.options, self.setup, self.cells, self.kept = options, setup, cells, kept
        self.run = kept.run
        self.slug = re.sub("[^A-Za-z0-9=+]+", "-", part)
        self.ensemble = options.program(f"train {part}", self._ensemble)
        self._measure = options.program(
            f"measure {part}",
            lambda: self.ensemble.mapped(
                lambda state, data, key, _: measure(state.model, data, key)
            ),
        )

    def _ensemble(self):
        options, setup = self.options, self.setup
        return Ensemble(
            setup.recipe,
            setup.make_data,
            mesh=cli.mesh(options),
            epochs_per_chunk=arguments.epochs_per_chunk(options),
            at_once=options.seeds_at_once or None,
            held_out={name: setup.metrics[name] for name in setup.curves},
            watch=layer_scalars if self.kept.monitored else None,
        )

    def needed(self, chunk: Chunk) -> int:
        return bytes_of_a_run(self.ensemble, chunk.floats) * chunk.size

    def __call__(self, chunk: Chunk) -> dict[str, Any]:
        begun, count = time.monotonic(), len(chunk.seeds)
        if count < len(self.cells) * self.options.num_seeds:
            self.run.log(f"{self.name_of(chunk, 0)} to {self.name_of(chunk, count - 1)}")
        found = self.train(chunk)
        if self.options.keep_models:
            self.kept.keep_weights(chunk.seeds[0], to_host(found.state.model, count))
        train_seconds = time.monotonic() - begun
        keys = self.ensemble.lay_out(chunk.keys[:count])
        measured = self._measure(found.state, found.data, keys, num_seeds=count)
        seconds = {"train": train_seconds, "all": time.monotonic() - begun}
        results = {
            "losses": found.losses,
            "diverged_at": np.array([found.diverged.get(s, -1) for s in range(count)]),
            "seconds": {name: np.full(count, value / count) for name, value in seconds.items()},
        }
        return measured | results | ({"curves": found.curves} if found.curves else {})

    def name_of(self, chunk: Chunk, position: int) -> str:
        """What one run of a chunk is called: its seed, and of several cells its cell."""
        name = f"seed {chunk.seeds[position]}"
        if len(self.cells) == 1:
            return name
        return f"{name} of cell {self.cells.index(chunk.cells[position]) + 1}"

    def train(self, chunk: Chunk) -> Trained:
        """Trains the runs of a chunk, from the last checkpoint, if there is one."""
        options, run, total = self.options, self.run, self.setup.recipe.num_epochs
        count, known = len(chunk.seeds), set()
        whole = count == len(self.cells) * options.num_seeds and self.slug == "results"
        first = self.cells.index(chunk.cells[0]) * options.num_seeds + chunk.seeds[0]
        states = "" if whole else f"{self.slug}-{first}-{first + count}"
        run.drop_checkpoints(but_of=states)  # of chunks that are done

        def resume(like):
            found = run.restore_checkpoint(like, of=states)
            if found is not None:
                progress.say(f"resumed after epoch {found[0]}")
                progress.skip(found[0])
            return found

        label = f"training {self.setup.name}"
        with Progress(total, label, log=run.log) as progress, signals.deferred():
            saved = begun = time.monotonic()

            def on_chunk(epoch, snapshot, losses):
                nonlocal saved
                finite = np.isfinite(losses).all(axis=1)
                for position in set(np.flatnonzero(~finite).tolist()) - known:
                    known.add(position)
                    name = self.name_of(chunk, position)
                    progress.say(f"{name} diverged by epoch {epoch}; it is kept apart")
                now, wait = time.monotonic(), options.checkpoint_seconds
                due = now - saved > wait or (epoch == total and now - begun > wait)
                if processes.from_primary(np.asarray(due or signals.asked())):
                    run.save_checkpoint(epoch, snapshot(), of=states)
                    saved = time.monotonic()
                loss = float(losses[finite, -1].mean()) if finite.any() else float("nan")
                progress.update(epoch, loss=loss)

            def on_watched(epoch, values):
                for position, seed in enumerate(chunk.seeds):
                    own = {name: value[position] for name, value in values.items()}
                    run.append_metrics(epoch, own, seed=seed, file=self.kept.lines)

            keys, floats = jax.tree.map(lambda a: a[:count], (chunk.keys, chunk.floats))
            return self.ensemble.train(
                keys, floats, resume=resume, on_chunk=on_chunk,
                on_watched=on_watched if self.kept.monitored else None,
            )  # fmt: skip


def whole_model(setup: Setup, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """One seed's metrics alone, as a measure of `results_by_case`: {"whole": {metric: []}}."""
    config, metrics = setup.recipe.config, setup.metrics
    return {"whole": path_accuracy.whole_model(model, data["eval"], config, metrics)}


def results_by_case(
    options: flags.FlagValues,
    cases: Mapping[str, Setup],
    run: RunFolder,
    measure: Callable[[Setup, Any, Any, Any], Any],
) -> dict[str, dict[str, Any]]:
    """`results_of` each of several networks, by case, with files of its own in models/, metrics/.

    Args:
        options, cases, run: Flags, what is trained by case, the run folder.
        measure: (setup, model, data, key) of one seed → nested dictionary of arrays.
    """
    found = {}
    for name, setup in cases.items():
        file = re.sub("[^A-Za-z0-9=+]+", "-", name)
        found[name] = results_of(
            options, setup, run, functools.partial(measure, setup),
            part=name, models=f"models/{file}.safetensors", lines=f"{metrics.FOLDER}/{file}.jsonl",
        )  # fmt: skip
    return found


def kept(results: Mapping[str, Any]) -> np.ndarray:
    """Positions of the seeds that did not diverge."""
    return np.flatnonzero(results["diverged_at"] < 0)


def diverged(results: Mapping[str, Any]) -> dict[int, int]:
    """{seed: first epoch whose loss is not finite} of the others."""
    return {s: int(epoch) for s, epoch in enumerate(results["diverged_at"]) if epoch >= 0}
