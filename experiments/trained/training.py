"""One network's seeds inside a run folder: trained, measured, saved, and read the next time."""

import contextlib
import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from flax import traverse_util

from experiments.shell import cli, signals
from experiments.shell.flag_values import Flags
from experiments.shell.memory_budget import MemoryBudget
from experiments.shell.progress import Progress
from experiments.trained import arguments, chunks, together
from rank_collapse.runs import metrics, processes
from rank_collapse.runs.files import RunError, damaged
from rank_collapse.runs.folder import RunFolder
from rank_collapse.runs.seeds import to_host
from rank_collapse.training import model_file, path_accuracy
from rank_collapse.training.ensemble import Ensemble, Trained
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
    resumable: bool = True,
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
        resumable: Whether checkpoints are of this network alone.
        constants: Arrays without a seed axis that are saved beside what is measured.

    Returns:
        What `measure` returns with a leading seed axis, the constants, "losses" [s, epochs],
        "curves" {metric: [s, epochs]} where the setup has any, "diverged_at" [s] (the first epoch
        whose loss is not finite, −1 for none) and
        "seconds": {"train", "all"}.
    """
    aside = {"seconds", *(constants or {})}
    count = arguments.run_count(options)
    monitored = arguments.monitored(options)
    missing = [models] if options.keep_models and not (run.path / models).exists() else []
    if monitored and not watched_to_the_end(run.path / lines, options, setup.recipe.num_epochs):
        missing.append(lines)

    def elsewhere(options, run):
        return results_of(
            options, setup, run, measure,
            part=part, models=models, lines=lines, resumable=resumable, constants=constants,
        )  # fmt: skip

    def compute():
        if options.unit is not None and not (options.keep_models or monitored):
            found = together.results_of_cell(options, setup.recipe, elsewhere, aside)
        else:
            found = compute_here(programs_of(options))
        refuse_if_all_diverged(found["losses"], options, run)
        return found

    def compute_here(options):
        ensemble = ensemble_of(options, setup, part)
        if options.window != slice(None):
            return train_and_measure(options, ensemble)
        with MemoryBudget(options, ensemble.mesh, run.log) as budget:
            size = chunks.runs_at_a_time(ensemble, arguments.hyper(options), count, budget)
            if size < count or chunks.begun(run, part):
                return chunks.results_in_chunks(
                    options, run, size, elsewhere,
                    part=part, models=models, lines=lines, aside=aside,
                )  # fmt: skip
            return train_and_measure(options, ensemble)

    def train_and_measure(options, ensemble):
        begun = time.monotonic()
        found = train(options, ensemble, setup, run, resumable, lines)
        refuse_if_all_diverged(found.losses, options, run)
        if models in missing:
            weights = to_host(found.state.model, count)
            run.write_file(models, model_file.dump_models(setup.recipe.config, weights))
        seconds = {"train": time.monotonic() - begun}
        mapped = options.program(
            f"measure {part}",
            lambda: ensemble.mapped(lambda state, data, key, _: measure(state.model, data, key)),
        )
        measured = mapped(
            found.state, found.data, ensemble.lay_out(arguments.run_keys(options)),
            num_seeds=count,
        )  # fmt: skip
        seconds["all"] = time.monotonic() - begun
        diverged_at = [found.diverged.get(s, -1) for s in range(count)]
        results = {"losses": found.losses, "diverged_at": diverged_at, "seconds": seconds}
        results |= {"curves": found.curves} if found.curves else {}
        return traverse_util.flatten_dict(measured | results | dict(constants or {}), sep="/")

    if missing and run.part(part) is not None:
        print(f"a finished run has not kept all: training again for {' and '.join(missing)}")
        compute()
        run.drop_checkpoints()
    results = run.cached(part, compute)
    epochs = (count, setup.recipe.num_epochs)
    for name, values in results.items():
        whole = values.shape[:1] == epochs[:1] if name != "losses" else values.shape == epochs
        if not whole and name.split("/")[0] not in aside:
            raise damaged(
                run.path / "arrays.npz",
                f"{part}/{name} of shape {values.shape} is not of {epochs[0]} seeds and "
                f"{epochs[1]} epochs",
            )
    return traverse_util.unflatten_dict(results, sep="/")


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
            resumable=False,
        )  # fmt: skip
    return found


def watched_to_the_end(path: Path, options: Flags, num_epochs: int) -> bool:
    """Whether a file has the lines of the last epoch of all seeds that are asked for."""
    if not path.exists():
        return False
    there = {row.get("seed") for row in metrics.read(path) if row["step"] == num_epochs}
    return there >= set(range(options.num_seeds)[options.window])


def kept(results: Mapping[str, Any]) -> np.ndarray:
    """Positions of the seeds that did not diverge."""
    return np.flatnonzero(results["diverged_at"] < 0)


def diverged(results: Mapping[str, Any]) -> dict[int, int]:
    """{seed: first epoch whose loss is not finite} of the others."""
    return {s: int(epoch) for s, epoch in enumerate(results["diverged_at"]) if epoch >= 0}


def programs_of(options: Flags) -> Flags:
    """The flags with programs that chunks of seeds share, as cells of a sweep do."""
    if options.programs is not None:
        return options
    own = options.copied()
    own.belong_to(cells=options.cells, window=options.window, programs={})
    return own


def ensemble_of(options: Flags, setup: Setup, part: str) -> Ensemble:
    """What trains the part of a run."""
    return options.program(
        f"train {part}",
        lambda: Ensemble(
            setup.recipe,
            setup.make_data,
            mesh=cli.mesh(options),
            epochs_per_chunk=arguments.epochs_per_chunk(options),
            at_once=options.seeds_at_once or None,
            held_out={name: setup.metrics[name] for name in setup.curves},
            watch=layer_scalars if arguments.monitored(options) else None,
        ),
    )


def train(
    options: Flags,
    ensemble: Ensemble,
    setup: Setup,
    run: RunFolder,
    resumable: bool = True,
    lines: str = metrics.NAME,
) -> Trained:
    """Trains all runs; where it is resumable, from the last checkpoint, if there is one."""
    total = setup.recipe.num_epochs
    known = set()

    def resume(like):
        found = run.restore_checkpoint(like)
        if found is not None:
            progress.say(f"resumed after epoch {found[0]}")
            progress.skip(found[0])
        return found

    waits = signals.deferred() if resumable else contextlib.nullcontext()
    with Progress(total, f"training {setup.name}", log=run.log) as progress, waits:
        saved = begun = time.monotonic()

        def on_chunk(epoch, snapshot, losses):
            nonlocal saved
            finite = np.isfinite(losses).all(axis=1)
            for seed in np.flatnonzero(~finite):
                if seed not in known:
                    known.add(int(seed))
                    progress.say(
                        f"{together.name_of(options, seed)} diverged by epoch {epoch}; it is kept "
                        "apart"
                    )
            now, wait = time.monotonic(), options.checkpoint_seconds
            due = now - saved > wait or (epoch == total and now - begun > wait) or signals.asked()
            if resumable and processes.from_primary(np.asarray(due)):
                run.save_checkpoint(epoch, snapshot())
                saved = time.monotonic()
            loss = float(losses[finite, -1].mean()) if finite.any() else float("nan")
            progress.update(epoch, loss=loss)

        def on_watched(epoch, values):
            first = options.window.start or 0
            for i in range(arguments.run_count(options)):
                own = {name: value[i] for name, value in values.items()}
                run.append_metrics(epoch, own, seed=first + i, file=lines)

        found = ensemble.train(
            arguments.run_keys(options),
            arguments.hyper(options),
            resume=resume if resumable else None,
            on_chunk=on_chunk,
            on_watched=on_watched if arguments.monitored(options) else None,
        )
    return found


def refuse_if_all_diverged(losses: np.ndarray, options: Flags, run: RunFolder) -> None:
    """Raises ValueError where no seed of a run has finite losses [s, epochs] to the end."""
    whole = not options.cells and options.window == slice(None)
    if whole and not np.isfinite(losses).all(axis=1).any():
        raise ValueError(
            f"every seed diverged at learning_rate={options.learning_rate}; see {run.path}/log.txt"
        )
