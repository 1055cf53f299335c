"""What the trained experiments share: train an ensemble, then measure it by path length.

An experiment gives a `Setup`; `run_experiment` trains all seeds (resuming an interrupted run),
evaluates the whole model, sampled sets of paths and the exact sums, and writes the run folder.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.shell import cli
from experiments.shell.progress import Progress
from experiments.trained import arguments
from experiments.trained import results as trained_results
from rank_collapse.paths.enumeration import ALL_HEADS
from rank_collapse.paths.sets import sample_path_sets
from rank_collapse.runs import processes
from rank_collapse.runs.folder import RunError, RunFolder
from rank_collapse.runs.seeds import seed_keys, to_host
from rank_collapse.training import model_file, path_accuracy
from rank_collapse.training.ensemble import Ensemble, Trained
from rank_collapse.training.tasks.examples import majority_baseline, random_baseline
from rank_collapse.training.training import Recipe

SET_SIZES = (5, 20)  # of the published figures


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
    """

    name: str
    title: str
    recipe: Recipe
    make_data: Callable[[Any], dict[str, Any]]
    metrics: Mapping[str, Callable]
    published: Mapping[str, float]
    batch_size: int | None = None
    extra: Mapping[str, Any] | None = None


def run_experiment(options: flags.FlagValues, setup: Setup) -> dict[str, Any]:
    """The whole experiment; returns its summary, which is also written and printed.

    Raises:
        ValueError: Flags that do not fit each other.
        RunError: A folder that cannot be used.
    """
    if options.path_len > options.depth:
        raise ValueError(f"path_len={options.path_len} is larger than depth={options.depth}")
    with open_run(options, setup.name, setup.extra) as run:
        models = run.path / "models.npz"
        wanted = options.keep_models and not models.exists()
        if run.summary is None or not run.has_figure("paths") or wanted:
            _measure(options, setup, run)
        trained_results.show(setup, run)
        return run.summary


def open_run(options: flags.FlagValues, name: str, extra: Any) -> RunFolder:
    """The run folder; see --do_train and --overwrite_output_dir about one that exists."""
    execution = [flag for flag in arguments.EXECUTION if flag in options]
    fields = {"extra": extra, "execution": execution}
    replace = "overwrite_output_dir" in options and options.overwrite_output_dir
    try:
        run = cli.open_run(options, name, **fields)
    except RunError:
        if not replace:
            raise
        return cli.open_run(options, name, overwrite=True, **fields)
    if run.summary is not None and (options.do_train or replace):
        run.close()
        run = cli.open_run(options, name, overwrite=True, **fields)
    return run


def make_ensemble(options: flags.FlagValues, setup: Setup) -> Ensemble:
    """The compiled functions of a run."""
    return Ensemble(
        setup.recipe,
        setup.make_data,
        mesh=cli.mesh(options),
        epochs_per_chunk=arguments.epochs_per_chunk(options),
        at_once=options.seeds_at_once or None,
    )


def train(
    options: flags.FlagValues,
    setup: Setup,
    ensemble: Ensemble,
    run: RunFolder,
    resumable: bool = True,
) -> Trained:
    """Trains all seeds; where it is resumable, from the last checkpoint, if there is one."""
    keys = seed_keys(options.seed, options.num_seeds)
    total = setup.recipe.num_epochs
    known = set()

    def resume(like):
        found = run.restore_checkpoint(like)
        if found is not None:
            progress.say(f"resumed after epoch {found[0]}")
            progress.first = found[0]
        return found

    with Progress(total, f"training {setup.name}", log=run.log) as progress:
        saved = begun = time.monotonic()

        def on_chunk(epoch, snapshot, losses):
            nonlocal saved
            for seed in np.flatnonzero(~np.isfinite(losses).all(axis=1)):
                if seed not in known:
                    known.add(int(seed))
                    progress.say(f"seed {seed} diverged by epoch {epoch}; it is kept apart")
            with np.errstate(invalid="ignore"):
                good = losses[np.isfinite(losses).all(axis=1), -1]
            now, wait = time.monotonic(), options.checkpoint_seconds
            due = now - saved > wait or (epoch == total and now - begun > wait)
            if resumable and processes.from_primary(np.asarray(due)):
                run.save_checkpoint(epoch, snapshot())
                saved = time.monotonic()
            progress.update(epoch, loss=float(good.mean()) if good.size else float("nan"))

        hyper = arguments.hyper(options)
        restore = resume if resumable else None
        trained = ensemble.train(keys, hyper, resume=restore, on_chunk=on_chunk)
    if not trained.kept.size:
        raise ValueError(
            f"every seed diverged at learning_rate={options.learning_rate}; see {run.path}/log.txt"
        )
    return trained


def _measure(options, setup, run):
    """Trains, evaluates and writes everything."""
    begun = time.monotonic()
    ensemble = make_ensemble(options, setup)
    trained = train(options, setup, ensemble, run)
    train_seconds = time.monotonic() - begun
    keys = seed_keys(options.seed, options.num_seeds)
    results = evaluate(options, setup, ensemble, trained, keys)
    arrays = {"losses": trained.losses} | trained_results.flatten(results)
    run.save_arrays(arrays)
    rows = trained_results.rows(results, trained, options)
    run.write_rows(rows)
    run.save_figure(trained_results.path_figure(setup, results, trained), "paths")
    run.save_figure(trained_results.loss_figure(setup, trained), "loss")
    for name, figure in trained_results.layer_figures(setup, results, trained).items():
        run.save_figure(figure, name)
    if options.keep_models:
        models = to_host(trained.state.model, options.num_seeds)
        run.write_file("models.npz", model_file.dump_models(setup.recipe.config, models))
    seconds = {"train": train_seconds, "all": time.monotonic() - begun}
    run.finish(trained_results.summarise(setup, results, trained, seconds))


def evaluate(
    options: flags.FlagValues, setup: Setup, ensemble: Ensemble, trained: Trained, keys: Any
) -> dict[str, Any]:
    """Every measurement of every seed, host arrays with a leading seed axis.

    Returns:
        {"whole": {metric: [s]}, "baselines": {name: [s]}, "sets": {size: {metric: [s, k, r]}},
        "exact", "up_to", "all_but": {metric: [s, L + 1]}, "lengths": [k], and where asked for
        "ranks": {name: [s, L(+1)]} and "alpha": [s, L]}.
    """
    recipe, config, metrics = setup.recipe, setup.recipe.config, setup.metrics
    size = setup.batch_size
    lengths = np.arange(options.path_len, config.depth + 1)
    sizes = tuple(sorted({options.n_paths, *SET_SIZES}))
    recomputed = {
        "semantics": options.semantics, "no_sub_path": options.no_sub_path, "batch_size": size
    }  # fmt: skip

    def paths_of(key, index, count):
        if options.all_heads:
            return jnp.full((1, 1, 1, config.depth), ALL_HEADS)
        key = jax.random.fold_in(key, index)
        return sample_path_sets(
            key, lengths, options.n_repeat, count, config.depth, config.num_heads
        )

    def measure(state, data, key, _):
        key_paths, key_guess = jax.random.split(jax.random.fold_in(key, 1))
        model, held_out = state.model, data["eval"]
        out = {
            "whole": path_accuracy.whole_model(model, held_out, config, metrics, size),
            "baselines": {
                "majority": majority_baseline(data["train"], held_out, recipe.num_outputs),
                "random": random_baseline(key_guess, held_out, recipe.num_outputs),
            },
        }
        for count in (1,) if options.all_heads else sizes:
            paths = paths_of(key_paths, count, count)
            out[f"sets of {count}"] = path_accuracy.path_sets(
                model, held_out, config, metrics, paths, **recomputed
            )
        out |= path_accuracy.exact_sums(model, held_out, config, metrics, size)
        if options.do_rank:
            out["ranks"] = path_accuracy.layer_ranks(model, held_out, config)
        if options.compute_alpha:
            out["alpha"] = path_accuracy.layer_alpha(model, held_out, config)
        if "train" in data and not options.train_as_eval:
            out["whole_train"] = path_accuracy.whole_model(
                model, data.get("texts", data["train"]), config, metrics, size or 500
            )
        return out

    out = ensemble.map(
        measure, trained.state, trained.data, ensemble.lay_out(keys), num_seeds=keys.shape[0]
    )
    out["sets"] = {
        int(name.removeprefix("sets of ")): out.pop(name)
        for name in list(out)
        if name.startswith("sets of ")
    }
    lengths = np.array([config.depth]) if options.all_heads else lengths
    return out | {"lengths": lengths, "all_lengths": np.arange(config.depth + 1)}


__all__ = ["RunError", "Setup", "evaluate", "make_ensemble", "open_run", "run_experiment", "train"]
