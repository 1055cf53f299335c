"""Results computed from accuracies by path length: table, statements, published values, finding."""

import functools
from collections.abc import Iterator

import numpy as np
import pandas as pd
import xarray as xr

from experiments.lab import Finding, labelled
from experiments.path_accuracy.evaluation import BASELINES, PUBLISHED_SIZE, sampled_lengths
from experiments.train.trained_tasks import TrainedTask
from experiments.verdicts import (
    Comparison,
    Row,
    TableRow,
    format_interval,
    mean_with_interval,
    slope,
)
from rank_collapse.printed import format_count

CLAIM = (
    "The trained network has 6 layers and skips. Its short paths alone nearly reach the "
    "accuracy of the full model. The longer paths are, the less accurate they are (section 4.2)."
)
# Whose attention, norms and gates: the full model's ("frozen"), or the truncated network's own.
SEMANTICS = dict.fromkeys(("offset", "exact", "up_to", "from", "shapley"), "frozen")
SEMANTICS |= {"truncated": "self-consistent", "sampled": "recomputed"}
PLACES = ("num_paths", "path_length", "repeat")  # axes of an evaluation but seeds and metrics


def accuracies(results: xr.Dataset) -> xr.Dataset:
    """Computes accuracies of the seeds that did not diverge, and the path lengths that they need.

    a_k is the accuracy without paths longer than k (recomputed), a_{−1} the accuracy of the best
    baseline. A standard error is that of an accuracy over the evaluated tokens, √(a(1 − a)/tokens).

    Args:
        results: Results of `measure`.

    Returns:
        The measurements, and over seeds: the best "baseline" and its "baseline_error"; "learned",
            whether the full model exceeds the baseline by two standard errors; "fell_below",
            whether some a_k is below the baseline by two; "carried" = Σ_k k (a_k − a_{k−1})/(a_L −
            a_{−1}), the mean length that accuracy needs, NaN where nothing was learned, and where
            the accuracy fell below the baseline, because a mean has no negative weights; "enough",
            the least k whose a_k is within one standard error of the full model, NaN where nothing
            was learned.
    """
    shares = results.sel(metric="accuracy", seed=results.fine, drop=True).astype(float)
    baseline = np.maximum(*(shares[name] for name in BASELINES))
    error, baseline_error = (
        np.sqrt(share * (1 - share) / shares.tokens) for share in (shares.whole, baseline)
    )
    learned = shares.whole > baseline + 2 * error
    fell_below = shares.truncated.min("path_length") < baseline - 2 * baseline_error
    raised = np.maximum(shares.truncated, baseline)
    full = raised.isel(path_length=-1)
    gains = labelled.apply_along(
        lambda a: (a[..., -1:] - a[..., :-1]).sum(-1), raised, "path_length"
    )
    is_near = shares.truncated >= shares.whole - error
    return shares.assign(
        baseline=baseline,
        baseline_error=baseline_error,
        learned=learned,
        fell_below=fell_below,
        carried=gains / (full - baseline).where(learned),
        enough=is_near.argmax("path_length").where(learned),
    )


def largest_sets(shares: xr.Dataset) -> xr.DataArray:
    """Returns the accuracy of the largest sampled sets by path length, mean over repeats."""
    sets = shares.sampled.mean("repeat")
    return sets.sel(num_paths=sets.num_paths.max())


def make_rows(results: xr.Dataset, task: TrainedTask) -> Iterator[TableRow]:
    """Makes a row for each seed, evaluation, path length and repeat; a column for each metric.

    Args:
        results: Results of `measure`.
        task: The training task.
    """
    frames = [
        results[evaluation]
        .to_dataset(dim="metric")
        .to_dataframe()
        .dropna(how="all")
        .reset_index()
        .assign(evaluation=evaluation)
        for evaluation in results.data_vars
        if "metric" in results[evaluation].dims
    ]
    long = pd.concat(frames).assign(diverged=lambda t: 1 - results.fine.values[t.seed])
    long["semantics"] = long.evaluation.map(SEMANTICS)
    places = [axis for axis in PLACES if axis in long]
    long[places] = long[places].astype("Int64")
    order = ["seed", "diverged", "evaluation", "semantics", *places, *task.metrics]
    return labelled.frame_rows(long.sort_values("seed", kind="stable")[order])


def judge_claims(results: xr.Dataset, task: TrainedTask, setting: str) -> Iterator[Row]:
    """Tests whether short paths suffice, whether paths of one length do the task alone, and whether
    accuracy falls with length.

    An accuracy below the best baseline counts as the baseline, so truncated networks that guess
    have no accuracy, and sampled sets that guess at all lengths do not fall. `biases` and `all of
    it` are findings.

    Args:
        results: Results of `measure`.
        task: The training task.
        setting: The setting of the rows.
    """
    shares, depth = accuracies(results), task.recipe.config.depth
    note = describe_below(shares.fell_below)
    yield from labelled.statement_rows(
        "short suffice", shares.carried - depth / 2, setting, note=note
    )
    if 1 in sampled_lengths(task.options):
        sets = shares.sampled.sel(num_paths=PUBLISHED_SIZE, path_length=slice(1, None), drop=True)
        sets = sets.mean("repeat")
        first = sets.sel(path_length=1, drop=True)
        yield from labelled.statement_rows(
            "one short", first - (shares.whole + shares.baseline) / 2, setting
        )
        is_below = sets.max("path_length") <= shares.baseline + 2 * shares.baseline_error
        falls = labelled.apply_along(
            functools.partial(slope, sets.path_length),
            np.maximum(sets, shares.baseline),
            "path_length",
        )
        yield from labelled.statement_rows(
            "falls", xr.where(is_below, 0.0, falls), setting, note=describe_below(is_below)
        )
    learned = shares.sel(seed=shares.learned)
    gained = learned.whole - learned.baseline
    yield from labelled.statement_rows(
        "biases", (learned.offset - learned.baseline) / gained, setting
    )
    setting += f", of {format_count(depth, 'layer')}"
    yield from labelled.statement_rows("all of it", shares.enough, setting)


def describe_below(is_below: xr.DataArray) -> str:
    """Reports how many networks are below the best baseline; "" for none."""
    count = int(is_below.sum())
    return f"below the baseline in {count} of {is_below.size} networks" if count else ""


def compare_results(results: xr.Dataset, task: TrainedTask) -> Iterator[Comparison]:
    """Compares full model and baseline with the published plotting code; and the output of the
    biases alone.

    Args:
        results: Results of `measure`.
        task: The training task.
    """
    shares = accuracies(results)
    whole_accuracy, offset = (
        format_interval(mean_with_interval(shares[n], share=True)) for n in ("whole", "offset")
    )
    yield Comparison(
        "token accuracy of the full model",
        whole_accuracy,
        task.published["whole"],
        "the published value is a constant in the plotting code, for the paper's data and epochs",
    )
    best = max(float(shares[name].mean()) for name in BASELINES)
    yield Comparison("best baseline, measured on the data", best, task.published["baseline"])
    yield from labelled.compare_means("accuracy without longer paths", shares.truncated)
    note = "the biases divided by the full model's σ give this accuracy; the rows without longer "
    note += "paths test whether short paths suffice"
    yield Comparison("frozen biases alone, without a path", offset, note=note)
    by_length = shares.sampled.mean(["seed", "repeat"])
    yield from labelled.compare_means(
        "path length of the highest accuracy", by_length.idxmax("path_length").expand_dims("seed")
    )


def make_finding(results: xr.Dataset, task: TrainedTask, success: str) -> Finding | None:
    """Reports how many layers a path needs to pass, and the accuracy of sampled paths alone.

    Args:
        results: Results of `measure`.
        task: The training task.
        success: Meaning of the accuracy, such as "of the letters are sorted".
    """
    shares, depth = accuracies(results).mean("seed"), task.recipe.config.depth
    is_near = shares.truncated >= shares.baseline + 0.9 * (shares.whole - shares.baseline)
    k = int(is_near.argmax("path_length"))
    sets = largest_sets(shares)
    one, full = (float(sets.sel(path_length=n)) for n in (1, depth))
    if np.isnan(one):
        return None
    return Finding(
        "short_paths",
        f"{shares.truncated[k]:.2f} {success} without paths through more than {k} of {depth} "
        f"layers ({shares.whole:.2f} with all paths, {shares.baseline:.2f} by a guess); "
        f"{int(sets.num_paths)} sampled paths of length 1 give {one:.2f}, of length {depth} "
        f"{full:.2f}.",
    )
