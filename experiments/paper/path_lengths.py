"""The experiment on sorting, convex hull and memorization: accuracy by path length.

`evaluate` says what is measured of one trained network, `claims` what follows from that.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import xarray as xr

from experiments.lab import labelled
from experiments.lab.flags import Flags
from experiments.lab.labelled import compare_means, statement_rows
from experiments.paper.path_accuracies import BASELINES, accuracies, sampled_as
from experiments.train import path_accuracy
from experiments.train.training import TrainedTask
from experiments.verdicts import Comparison
from experiments.verdicts.claims import Row
from experiments.verdicts.statistics import format_interval, mean_with_interval, slope
from rank_collapse.paths.enumeration import ALL_HEADS
from rank_collapse.paths.sets import sample_path_sets
from rank_collapse.training.tasks.examples import majority_baseline, random_baseline, token_mask

PUBLISHED_SIZE = 20  # paths in the larger of the published sets
SET_SIZES = (5, PUBLISHED_SIZE)  # of the published figures
# Exact sums by length, see `path_accuracy.length_sums`.
LENGTHS = ("exact", "up_to", "from", "all_but", "shapley", "alone")
# Whose attention, norms and gates: the whole model's ("frozen"), or the truncated network's own.
SEMANTICS = dict.fromkeys(("offset", *LENGTHS), "frozen") | {"truncated": "self-consistent"}
PLACES = ("num_paths", "path_length", "repeat")  # axes of an evaluation but seeds and metrics


def check_lengths(options: Flags) -> None:
    """Refuses a shortest path that is longer than the network is deep.

    Raises:
        ValueError: Such a length.
    """
    if options.path_len > options.depth:
        raise ValueError(f"path_len={options.path_len} is larger than depth={options.depth}")


def identity(setup: TrainedTask) -> Mapping[str, Any] | None:
    """Identifies the data, for config.json."""
    return setup.extra


def as_dataset(options: Flags, setup: TrainedTask, arrays: Mapping[str, np.ndarray]) -> xr.Dataset:
    """Names the axes of what `evaluate` finds: "seed", "metric" and those of `PLACES`.

    "fine" says which seeds did not diverge.
    """
    axes = {"losses": ("epoch",), "covariance": ("path_length",), "alpha": ("sublayer",)}
    axes |= {"ranks": ("measure", "layer"), "seconds": ("part",)}
    places = ("num_paths", "metric", "path_length", "repeat")
    shown = {name: a for name, a in arrays.items() if not name.startswith("model/")}
    sets = {name: shown.pop(name) for name in [*shown] if name.startswith("sets/")}
    every = labelled.make_dataset(shown, ("metric", "path_length"), **axes)
    every = every.assign_coords(path_length=np.arange(setup.recipe.config.depth + 1))
    sampled = labelled.make_dataset(sets, places).assign_coords(path_length=path_lengths(options))
    sampled = sampled.rename(sets=sampled_as(setup)).sortby("num_paths")
    return xr.merge([every, sampled], join="outer").assign(fine=every.diverged_at < 0)


def evaluate(options: Flags, setup: TrainedTask, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """What the flags ask for of one seed.

    Returns:
        {evaluation: {metric: [] or [k]}}, those of `length_sums`, "whole", the baselines, and where
        asked for "whole_train"; "sets": {size: {metric: [k, r]}}; "tokens": [] evaluated, and where
        asked for "ranks": {name: [L + 1]} and "alpha": [L]; k path lengths, r repeats.
    """
    config, metrics, size = setup.recipe.config, setup.metrics, setup.batch_size
    key_paths, key_guess = jax.random.split(jax.random.fold_in(key, 1))
    held_out, outputs = data["eval"], setup.recipe.num_outputs
    guesses = (
        majority_baseline(data["train"], held_out, outputs),
        random_baseline(key_guess, held_out, outputs),
    )
    found = {
        "whole": path_accuracy.whole_model(model, held_out, config, metrics, size),
        **{n: {"accuracy": v} for n, v in zip(BASELINES, guesses, strict=True)},
        "sets": _path_sets(options, setup, model, held_out, key_paths),
    }
    found |= path_accuracy.length_sums(model, held_out, config, metrics, size)
    found["tokens"] = token_mask(held_out).sum()
    if options.do_rank:
        ranks = path_accuracy.layer_ranks(model, held_out, config)
        inputs = jnp.full(1, jnp.nan)  # attention's begin with layer 1
        found["ranks"] = ranks | {"attention_rank": jnp.append(inputs, ranks["attention_rank"])}
    if options.compute_alpha:
        found["alpha"] = path_accuracy.layer_alpha(model, held_out, config)
    if not options.train_as_eval:
        found["whole_train"] = path_accuracy.whole_model(
            model, data.get("texts", data["train"]), config, metrics, size or 500
        )
    return found


def path_lengths(options: Flags) -> np.ndarray:
    """The lengths of the evaluated paths [k]."""
    first = options.depth if options.all_heads else options.path_len
    return np.arange(first, options.depth + 1)


def _path_sets(options, setup, model, held_out, key):
    """{size of the sets: {metric: [k, r]}}; sets of all sizes are one array, filled up."""
    config, lengths = setup.recipe.config, path_lengths(options)
    sizes = (1,) if options.all_heads else sorted({options.n_paths, *SET_SIZES})
    shape = (len(sizes), len(lengths), 1 if options.all_heads else options.n_repeat, sizes[-1])
    keep = jnp.broadcast_to(np.arange(sizes[-1]) < np.reshape(sizes, (-1, 1, 1, 1)), shape)

    def draw(size):
        own = jax.random.fold_in(key, size)
        return sample_path_sets(own, lengths, *shape[2:], config.depth, config.num_heads)

    if options.all_heads:
        paths = jnp.full((*shape, config.depth), ALL_HEADS)
    else:
        paths = jax.vmap(draw)(jnp.asarray(sizes))
    found = path_accuracy.path_sets(
        model,
        held_out,
        config,
        setup.metrics,
        jnp.where(keep[..., None], paths, paths[..., :1, :]).reshape(-1, *paths.shape[2:]),
        semantics=options.semantics,
        no_sub_path=options.no_sub_path,
        keep=keep.reshape(-1, *shape[2:]),
        batch_size=setup.batch_size,
    )
    found = {metric: values.reshape(shape[:3]) for metric, values in found.items()}
    return {str(size): {m: v[i] for m, v in found.items()} for i, size in enumerate(sizes)}


def table(found: xr.Dataset, setup: TrainedTask) -> Iterator[dict[str, Any]]:
    """One row per seed, evaluation, path length and repeat; a column for each metric."""
    name = sampled_as(setup)
    frames = [
        found[evaluation]
        .to_dataset(dim="metric")
        .to_dataframe()
        .dropna(how="all")
        .reset_index()
        .assign(evaluation=evaluation)
        for evaluation in found.data_vars
        if "metric" in found[evaluation].dims
    ]
    long = pd.concat(frames).assign(diverged=lambda t: 1 - found.fine.values[t.seed])
    semantics = SEMANTICS | {name: setup.options.semantics}
    long["semantics"] = long.evaluation.map(semantics)
    places = [axis for axis in PLACES if axis in long]
    long[places] = long[places].astype("Int64")
    order = ["seed", "diverged", "evaluation", "semantics", *places, *setup.metrics]
    return labelled.frame_rows(long.sort_values("seed", kind="stable")[order])


def claims(task: str, found: xr.Dataset, setup: TrainedTask) -> Iterator[Row]:
    """Whether short paths carry the network, do the task alone, and lengths fall.

    What is below the best baseline says nothing about paths: a network whose truncations or sampled
    sets are there has no number. `biases` and `all of it` are findings.
    """
    own, depth = accuracies(found), setup.recipe.config.depth
    below = below_text(own.fell_below)
    yield from statement_rows("short suffice", own.carried - depth / 2, task, note=below)
    name, lengths = sampled_as(setup), path_lengths(setup.options)
    if name == "sampled" and 1 in lengths:
        sets = own[name].sel(num_paths=PUBLISHED_SIZE, path_length=slice(1, None), drop=True)
        sets = sets.mean("repeat")
        first = sets.sel(path_length=1, drop=True)
        yield from statement_rows("one short", first - (own.whole + own.baseline) / 2, task)
        lost = sets.max("path_length") <= own.baseline + 2 * own.baseline_error
        falls = labelled.apply_along(
            functools.partial(slope, sets.path_length), sets, "path_length"
        )
        yield from statement_rows("falls", falls.where(~lost), task, note=below_text(lost))
    learned = own.sel(seed=own.learned)
    yield from statement_rows(
        "biases", (learned.offset - learned.baseline) / (learned.whole - learned.baseline), task
    )
    yield from statement_rows("all of it", own.enough, f"{task}, of {depth} layers")


def below_text(below: xr.DataArray) -> str:
    """How many networks are below the best baseline."""
    count = int(below.sum())
    return f"below the baseline in {count} of {below.size} networks" if count else ""


def compare(found: xr.Dataset, setup: TrainedTask) -> Iterator[Comparison]:
    """Whole model and baseline beside the published plotting code's, and what no path gives."""
    own = accuracies(found)
    whole, offset = (
        format_interval(mean_with_interval(own[n], share=True)) for n in ("whole", "offset")
    )
    yield Comparison(
        "token accuracy of the whole model",
        whole,
        setup.published["whole"],
        "published: a constant in the plotting code, of the paper's data and epochs",
    )
    best = max(float(own[name].mean()) for name in BASELINES)
    yield Comparison("best baseline, measured on the data", best, setup.published["baseline"])
    yield from compare_means("without longer paths, self-consistent", own.truncated)
    note = "biases divided by the whole model's σ carry this much of the answer: whether short "
    note += "paths suffice is what the lines without longer paths test"
    yield Comparison("frozen biases alone, without a path", offset, note=note)
    by_length = own[sampled_as(setup)].mean(["seed", "repeat"])
    yield from compare_means("best length", by_length.idxmax("path_length").expand_dims("seed"))
