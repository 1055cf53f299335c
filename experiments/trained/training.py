"""One network's seeds inside a run folder: trained, measured, saved, and read the next time."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.shell.executor import Executor
from experiments.shell.flag_values import Flags
from experiments.trained import arguments
from experiments.trained.program import Kept, Training, monitored, results_of_cells
from rank_collapse.runs.files import damaged
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training import Ensemble, Recipe, path_accuracy
from rank_collapse.training.recipe import check_hyper, config_of
from rank_collapse.training.tasks.examples import Examples
from rank_collapse.training.watched import layer_scalars


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
    setups: Mapping[str, Setup],
    run: RunFolder,
    measure: Callable[[Setup, Any, Any, Any], Any],
) -> dict[str, dict[str, Any]]:
    """Everything that is shown of networks: from the saved arrays, else trained and measured.

    Weights (--keep_models) and lines (--monitor) are there only if they were asked for: a run that
    is asked later trains again those seeds whose files it lacks.

    Args:
        options: Flags.
        setups: {part of the run's arrays: what is trained}; `ALONE` is the part of a single one.
        run: The run folder.
        measure: (setup, model, data, key) of one seed → nested dictionary of arrays, whose levels
            have "/" between them in the names of the run's arrays.

    Returns:
        {part: what `measure` returns with a leading seed axis, "losses" [s, epochs], "diverged_at"
        [s] (the first epoch whose loss is not finite, −1 for none) and "seconds": {"train", "all"};
        where the setup has curves "curves" {metric: [s, epochs]} and "whole", their last}.

    Raises:
        ValueError: Every seed of a network diverged, or hyperparameters that mean nothing.
        RunError: The run holds another number of seeds or epochs.
    """

    def hyper_of(setup, own):
        hyper = arguments.hyper(own, setup.floats)
        check_hyper(hyper, setup.recipe)
        return hyper

    programs = {setup.program or part: setup for part, setup in setups.items()}
    cells = {
        part: (setup.program or part, functools.partial(hyper_of, setup))
        for part, setup in setups.items()
    }
    asked, files, known = options.keep_models or monitored(options), {}, {}
    for part, setup in setups.items() if asked else ():
        config = config_of(setup.recipe, arguments.hyper(options, setup.floats))
        files[part] = Kept(options, config, run, part)
        known[part] = files[part].seeds(setup.recipe.num_epochs)
    with Executor(options, run, alone=asked) as executor:
        found = results_of_cells(
            executor,
            cells,
            lambda name: training_of(options, programs[name], measure, executor, files),
            most_known=known,
        )
    for part, own in found.items():
        epochs, shape = setups[part].recipe.num_epochs, own["losses"].shape
        if shape[1] != epochs:
            why = f"{part}/losses of shape {shape} is not of {epochs} epochs"
            raise damaged(run.path / "arrays.npz", why)
        if not len(kept(own)):
            at = f"learning_rate={options.learning_rate}"
            raise ValueError(f"every seed diverged at {at}; see {run.path}/log.txt")
    return found


def training_of(
    options: Flags,
    setup: Setup,
    measure: Callable,
    executor: Executor,
    files: Mapping[str, Kept],
) -> Training:
    """What trains the networks of one program, with any floats.

    Args:
        options, measure: As of `results_of`.
        setup: One of them.
        executor: Its folder keeps the states.
        files: Beside the arrays.
    """
    recipe = setup.recipe

    def measured_of(model, data, hyper, key):
        own = dataclasses.replace(recipe, config=config_of(recipe, hyper))
        return measure(dataclasses.replace(setup, recipe=own), model, data, key)

    def watch(model, data, hyper, _):
        config, found = config_of(recipe, hyper), {}
        if setup.curves:
            found["curves"] = path_accuracy.whole_model(model, data["eval"], config, setup.metrics)
        if monitored(options):
            found["layers"] = layer_scalars(model, data, config)
        return found

    watched = setup.curves or monitored(options)  # of every epoch
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
        kept=files,
        checkpoint_seconds=options.checkpoint_seconds,
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
