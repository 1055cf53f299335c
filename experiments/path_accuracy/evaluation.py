"""The measurements of run_sort, run_convex_hull and run_memorization in their trained networks.

Axis letters: b examples, n tokens, c classes, k path lengths, r repeats, p paths, l layers.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PyTree

from experiments.lab import Options, RunFolder, labelled
from experiments.train.train_networks import train_networks
from experiments.train.trained_tasks import (
    ALONE,
    Metrics,
    TrainedTask,
    compute_metrics,
    whole_metrics,
)
from rank_collapse.network.config import TransformerConfig
from rank_collapse.paths.contributions import path_contributions
from rank_collapse.paths.direct import logit_attribution
from rank_collapse.paths.sets import classify_states, path_set_logits, sample_path_sets
from rank_collapse.paths.sharing import coalition_values, covariance_shares, shapley_values
from rank_collapse.paths.truncation import truncated
from rank_collapse.training.models import Model
from rank_collapse.training.tasks.examples import (
    Examples,
    in_batches,
    majority_baseline,
    random_baseline,
    token_mask,
)

BASELINES = ("majority baseline", "random baseline")
PUBLISHED_SIZE = 20  # paths in the larger of the published sets
SET_SIZES = (5, PUBLISHED_SIZE)  # of the published figures


def measure_paths(options: Options, task: TrainedTask, folder: RunFolder) -> xr.Dataset:
    """Trains a network for each seed, and evaluates it whole and by path length.

    Args:
        options: The flags.
        task: The task that the networks learn.
        folder: The run folder; results that it already holds are not computed again.
    """
    arrays = train_networks(options, {ALONE: task}, folder, evaluate_paths)[ALONE]
    return name_axes(task, arrays)


def evaluate_paths(
    task: TrainedTask, model: Model, data: dict[str, Examples], key: jax.Array
) -> dict[str, PyTree[Array]]:
    """Evaluates the trained model of one seed: whole, by path length, and the baselines.

    Args:
        task: What was trained; its flags say which sets of paths are sampled.
        model: The trained model.
        data: Examples of the seed: "train" and "eval", and "texts" where "train" is packed.
        key: Random key of the seed; sets of paths and the random baseline are drawn from it.

    Returns:
        {evaluation: {metric: [] or [k]}}: "whole", "whole_train", the baselines and the results of
        `length_sums`; "sets": {size: {metric: [k, r]}}; "tokens": [], the number of evaluated
        tokens.
    """
    config, metrics, batch_size = task.recipe.config, task.metrics, task.batch_size
    key_paths, key_guess = jax.random.split(jax.random.fold_in(key, 1))
    held_out, num_labels = data["eval"], task.recipe.num_outputs
    guesses = (
        majority_baseline(data["train"], held_out, num_labels),
        random_baseline(key_guess, held_out, num_labels),
    )
    return {
        "whole": whole_metrics(model, held_out, config, metrics, batch_size),
        **{name: {"accuracy": value} for name, value in zip(BASELINES, guesses, strict=True)},
        "sets": evaluate_samples(task, model, held_out, key_paths),
        **length_sums(model, held_out, config, metrics, batch_size),
        "tokens": token_mask(held_out).sum(),
        "whole_train": whole_metrics(
            model, data.get("texts", data["train"]), config, metrics, batch_size or 500
        ),
    }


def sampled_lengths(options: Options) -> np.ndarray:
    """Lists the lengths of the sampled paths [k].

    Raises:
        ValueError: The shortest path is longer than the network is deep.
    """
    if options.path_len > options.depth:
        raise ValueError(f"path_len={options.path_len} is larger than depth={options.depth}")
    return np.arange(options.path_len, options.depth + 1)


def evaluate_samples(
    task: TrainedTask, model: Model, held_out: Examples, key: jax.Array
) -> dict[str, dict[str, Float[Array, "k r"]]]:
    """Evaluates sampled sets of paths, each of which computes attention from its own states, as in
    the paper.

    Sets of all sizes are one array: smaller sets are padded, and the padding is not a member.

    Args:
        task: The training task.
        model: The trained model of one seed.
        held_out: Examples to evaluate, [b, n].
        key: Random key of the seed.

    Returns:
        {number of paths in a set: {metric: [k, r]}}.
    """
    config, options, lengths = task.recipe.config, task.options, sampled_lengths(task.options)
    sizes = sorted({options.n_paths, *SET_SIZES})
    shape = (len(sizes), len(lengths), options.n_repeat, sizes[-1])
    is_kept = np.arange(sizes[-1]) < np.reshape(sizes, (-1, 1, 1, 1))
    is_kept = jnp.broadcast_to(is_kept, shape)

    def draw_paths(size):
        key_size = jax.random.fold_in(key, size)
        return sample_path_sets(key_size, lengths, *shape[2:], config.depth, config.num_heads)

    paths = jax.vmap(draw_paths)(jnp.asarray(sizes))
    paths = jnp.where(is_kept[..., None], paths, paths[..., :1, :])

    def single_logits(example):
        """Computes the logits of all sampled sets of paths for one example, (inputs, mask)."""
        inputs, mask = example
        return path_set_logits(
            model.network,
            inputs,
            config,
            paths.reshape(-1, *paths.shape[2:]),
            model.classifier,
            mask=mask,
            semantics="recomputed",
            no_sub_path=options.no_sub_path,
            keep=is_kept.reshape(-1, *shape[2:]),
        )

    logits = in_batches(single_logits, (held_out.inputs, held_out.mask), task.batch_size)
    logits = jnp.moveaxis(logits, 0, 2)  # [sizes k, r, b, n, c]
    measure_logits = functools.partial(compute_metrics, task.metrics, held_out)
    values = jax.lax.map(measure_logits, logits.reshape(-1, *logits.shape[2:]))
    values = {metric: array.reshape(shape[:3]) for metric, array in values.items()}
    return {str(size): {m: a[i] for m, a in values.items()} for i, size in enumerate(sizes)}


def length_sums(
    model: Model,
    examples: Examples,
    config: TransformerConfig,
    metrics: Metrics,
    batch_size: int | None = None,
) -> dict[str, PyTree[Array]]:
    """Computes the metrics of exact sums over all paths by length 0..L, and the value of each
    length.

    Sums C_k are frozen: they use the attention of the full model. All have the offset and the
    classifier of the full model, so they differ only in the lengths. The offset holds the biases,
    through the frozen 1/σ of the full model: a network without any path already guesses.

    Args:
        model: The trained model of one seed.
        examples: Examples to evaluate.
        config: The network.
        metrics: Functions of (logits, examples) by name.
        batch_size: Examples at a time; None for all.

    Returns:
        {name: {metric: array}}, k for lengths 0..L:
        "offset"     []   no path
        "exact"      [k]  C_k + offset
        "up_to"      [k]  Σ_{j≤k} C_j + offset; the last is the whole model
        "from"       [k]  Σ_{j≥k} C_j + offset; the first is the whole model
        "shapley"    [k]  Shapley value of the lengths, from "offset" to the whole
        "truncated"  [k]  self-consistent: the network without paths longer than k, `truncated`
        and without metrics
        "covariance"   [k]  Cov(z_k, z)/Var z of the logits; sums to 1 with the offset's share
        "cancellation" []   Σ_k ‖C_k‖/‖Y‖ of the states, the offset's among them
    """
    size = config.depth + 1

    def single_example(example):
        """Computes for one example the logits of the sum of each path length, of the offset
        (biases, without a path) and of the network truncated at each length, and the squared sizes
        of the sums, the offset and the output."""
        inputs, mask = example
        sums = path_contributions(model.network, inputs, config, mask=mask)
        short = truncated(model.network, inputs, config, jnp.arange(size), mask=mask).output
        states = jnp.concatenate([sums.by_attention_length, sums.offset[None]])
        token_exists = jnp.ones(states.shape[1], bool) if mask is None else mask
        states = jnp.where(token_exists[None, :, None], states, 0)
        states = jnp.concatenate([states, states.sum(axis=0, keepdims=True)])
        return {
            "lengths": logit_attribution(sums.by_attention_length, model.classifier),
            "offset": classify_states(model.classifier, sums.offset, normalise=False),
            "truncated": classify_states(model.classifier, short, normalise=False),
            "squares": jnp.sum(jnp.square(states), axis=(1, 2)),
        }

    outputs = in_batches(single_example, (examples.inputs, examples.mask), batch_size)
    offset = outputs["offset"]  # [b, n, c]
    by_length, short = (jnp.moveaxis(outputs[n], 0, 1) for n in ("lengths", "truncated"))

    measure_logits = functools.partial(compute_metrics, metrics, examples)

    def coalition_metrics(is_present):
        logits = offset + jnp.tensordot(is_present.astype(by_length.dtype), by_length, 1)
        return measure_logits(logits)

    values = coalition_values(coalition_metrics, size)
    bits, full_set = 2 ** np.arange(size), 2**size - 1
    sets = {"offset": 0, "exact": bits, "up_to": 2 * bits - 1, "from": full_set - bits + 1}
    norms = jnp.sqrt(jnp.sum(outputs["squares"], axis=0))
    return {
        **{name: {m: v[index] for m, v in values.items()} for name, index in sets.items()},
        "shapley": shapley_values(values, size),
        "truncated": jax.lax.map(measure_logits, short),
        "covariance": covariance_shares(by_length, offset + by_length.sum(axis=0), examples.mask),
        "cancellation": jnp.sum(norms[:-1]) / norms[-1],
    }


def name_axes(task: TrainedTask, arrays: Mapping[str, np.ndarray]) -> xr.Dataset:
    """Names the axes of the results of `evaluate_paths`.

    Args:
        task: The training task.
        arrays: {"name/level": [s, ...]}.

    Returns:
        A Dataset over "seed", "metric", "path_length", "num_paths" and "repeat"; "fine" marks the
        seeds that did not diverge.
    """
    axes = {"losses": ("epoch",), "covariance": ("path_length",)}
    evaluations = {name: a for name, a in arrays.items() if not name.startswith("model/")}
    sets = {n: evaluations.pop(n) for n in [*evaluations] if n.startswith("sets/")}
    exact = labelled.make_dataset(evaluations, ("metric", "path_length"), **axes)
    exact = exact.assign_coords(path_length=np.arange(task.recipe.config.depth + 1))
    sampled = labelled.make_dataset(sets, ("num_paths", "metric", "path_length", "repeat"))
    sampled = sampled.assign_coords(path_length=sampled_lengths(task.options))
    sampled = sampled.rename(sets="sampled").sortby("num_paths")
    return xr.merge([exact, sampled], join="outer").assign(fine=exact.diverged_at < 0)
