"""One network's seeds inside a run folder: trained, measured, saved, and read the next time."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments.shell.executor import Executor
from experiments.shell.flag_values import Flags
from experiments.trained import arguments
from experiments.trained.program import ALONE, Kept, Training, nested
from rank_collapse.runs.files import damaged
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training import Ensemble, Recipe, path_accuracy
from rank_collapse.training.recipe import check_hyper, config_of
from rank_collapse.training.tasks.examples import Examples
from rank_collapse.training.watched import layer_scalars


class Shared(NamedTuple):
    """What trains and measures setups that differ in floats alone.

    Attributes:
        program: Its name.
        recipe: What is compiled.
        floats: Fields of `Hyper` that a setup does not take from the flags.
    """

    program: str
    recipe: Recipe
    floats: Mapping[str, Any]


@dataclass(frozen=True)
class Setup:
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
        shared: What is compiled for other setups too; None for the recipe alone.
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
    shared: Shared | None = None


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
    train, count = make(key_train, options.n_train_data), options.n_eval_data
    return {
        "train": train,
        "eval": train.first(count) if options.train_as_eval else make(key_eval, count),
    }


def results_of(
    options: Flags,
    setup: Setup,
    run: RunFolder,
    measure: Callable[[Setup, Any, Any, Any], Any],
    part: str = ALONE,
    programs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that is shown of one network: from the saved arrays, else trained and measured.

    Weights (--keep_models) and lines (--monitor) are there only if they were asked for: a run that
    is asked later trains again those seeds whose files it lacks.

    Args:
        options: Flags.
        setup: What is trained.
        run: The run folder.
        measure: (setup, model, data, key) of one seed → nested dictionary of arrays.
        part: Of the run's arrays, with "/" between the levels of the dictionary.
        programs: Those of the run's setups that share theirs, by name; a new one is added.

    Returns:
        What `measure` returns with a leading seed axis, "losses" [s, epochs], "diverged_at" [s]
        (the first epoch whose loss is not finite, −1 for none) and "seconds": {"train", "all"};
        where the setup has curves "curves" {metric: [s, epochs]} and "whole", their last.

    Raises:
        ValueError: Every seed diverged, or hyperparameters that mean nothing.
        RunError: The run holds another number of seeds or epochs.
    """
    files = Kept(options, setup.recipe, run, part)
    shared = setup.shared or Shared(part, setup.recipe, {})
    programs = {} if programs is None else programs

    def cells(own):
        hyper = arguments.hyper(own, shared.floats)
        check_hyper(hyper, shared.recipe)
        return {part: hyper}

    with Executor(options, run, alone=options.keep_models or files.monitored) as executor:
        made = options, setup, measure, shared, executor, files, programs
        program = functools.partial(training_of, *made)
        found = executor.map(program, cells, most_known=files.seeds())[part]
    epochs = setup.recipe.num_epochs
    if (shape := found["losses"].shape)[1] != epochs:
        why = f"{part}/losses of shape {shape} is not of {epochs} epochs"
        raise damaged(run.path / "arrays.npz", why)
    if not len(kept(found)):
        at = f"learning_rate={options.learning_rate}"
        raise ValueError(f"every seed diverged at {at}; see {run.path}/log.txt")
    return nested(found)


def training_of(
    options: Flags,
    setup: Setup,
    measure: Callable,
    shared: Shared,
    executor: Executor,
    files: Kept,
    programs: dict[str, Any],
) -> Training:
    """What trains one network, with any floats.

    Args:
        options, setup, measure, programs: As of `results_of`.
        shared: What is compiled.
        executor: Its folder keeps the states.
        files: Beside the arrays.
    """

    def measured_of(model, data, hyper, key):
        recipe = dataclasses.replace(shared.recipe, config=config_of(shared.recipe, hyper))
        return measure(dataclasses.replace(setup, recipe=recipe), model, data, key)

    def watch(model, data, hyper, _):
        config, found = config_of(shared.recipe, hyper), {}
        if setup.curves:
            found["curves"] = path_accuracy.whole_model(model, data["eval"], config, setup.metrics)
        if files.monitored:
            found["layers"] = layer_scalars(model, data, config)
        return found

    watched = setup.curves or files.monitored  # of every epoch
    epochs = 1 if watched else arguments.epochs_per_chunk(options)
    if shared.program not in programs:
        ensemble = Ensemble(
            shared.recipe,
            setup.make_data,
            mesh=executor.mesh,
            epochs_per_chunk=epochs,
            at_once=options.seeds_at_once or None,
            watch=watch if watched else None,
        )
        programs[shared.program] = ensemble, ensemble.of_models(measured_of)
    ensemble, measured = programs[shared.program]
    wait = options.checkpoint_seconds
    return Training(
        ensemble, executor.run, measured, setup.name, kept=files, checkpoint_seconds=wait
    )


def whole_model(setup: Setup, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """One seed's metrics alone, as a measure of `results_of`: {"whole": {metric: []}}."""
    config, metrics = setup.recipe.config, setup.metrics
    return {"whole": path_accuracy.whole_model(model, data["eval"], config, metrics)}


def kept(results: Mapping[str, Any]) -> np.ndarray:
    """Positions of the seeds that did not diverge."""
    return np.flatnonzero(results["diverged_at"] < 0)


def diverged(results: Mapping[str, Any]) -> np.ndarray:
    """Which seeds diverged [s], 0 or 1."""
    return (results["diverged_at"] >= 0).astype(int)
