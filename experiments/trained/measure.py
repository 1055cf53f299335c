"""What is measured of a trained network: the whole model, baselines, paths by length, layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.trained.training import Setup
from rank_collapse.paths.enumeration import ALL_HEADS
from rank_collapse.paths.sets import sample_path_sets
from rank_collapse.training import path_accuracy
from rank_collapse.training.tasks.examples import majority_baseline, random_baseline, token_mask

SET_SIZES = (5, 20)  # of the published figures


def measure_of(options: flags.FlagValues, setup: Setup) -> Callable[[Any, Any, Any], dict]:
    """The measurement of one seed that the flags ask for.

    Returns:
        A function (model, data, key) → {"whole": {metric: []}, "baselines": {name: []},
        "sets": {size: {metric: [k, r]}}, what `length_sums` gives, "tokens": [] evaluated}, and
        where asked for "ranks": {name: [L(+1)]}, "alpha": [L] and "whole_train": {metric: []};
        k path lengths, r repeats.
    """
    config, metrics, size = setup.recipe.config, setup.metrics, setup.batch_size

    def measure(model, data, key):
        key_paths, key_guess = jax.random.split(jax.random.fold_in(key, 1))
        held_out = data["eval"]
        found = {
            "whole": path_accuracy.whole_model(model, held_out, config, metrics, size),
            "baselines": _baselines(data, key_guess, setup.recipe.num_outputs),
            "sets": _path_sets(options, setup, model, held_out, key_paths),
        }
        found |= path_accuracy.length_sums(model, held_out, config, metrics, size)
        found["tokens"] = token_mask(held_out).sum()
        if options.do_rank:
            found["ranks"] = path_accuracy.layer_ranks(model, held_out, config)
        if options.compute_alpha:
            found["alpha"] = path_accuracy.layer_alpha(model, held_out, config)
        if not options.train_as_eval:
            found["whole_train"] = path_accuracy.whole_model(
                model, data.get("texts", data["train"]), config, metrics, size or 500
            )
        return found

    return measure


def path_lengths(options: flags.FlagValues) -> np.ndarray:
    """The lengths of the evaluated paths [k]."""
    first = options.depth if options.all_heads else options.path_len
    return np.arange(first, options.depth + 1)


def _baselines(data, key, num_outputs):
    return {
        "majority": majority_baseline(data["train"], data["eval"], num_outputs),
        "random": random_baseline(key, data["eval"], num_outputs),
    }


def _path_sets(options, setup, model, held_out, key):
    """{size of the sets: {metric: [k, r]}}."""
    config = setup.recipe.config

    def paths_of(count):
        if options.all_heads:
            return jnp.full((1, 1, 1, config.depth), ALL_HEADS)
        return sample_path_sets(
            jax.random.fold_in(key, count), path_lengths(options), options.n_repeat, count,
            config.depth, config.num_heads,
        )  # fmt: skip

    return {
        str(count): path_accuracy.path_sets(
            model, held_out, config, setup.metrics, paths_of(count),
            semantics=options.semantics, no_sub_path=options.no_sub_path,
            batch_size=setup.batch_size,
        )
        for count in ((1,) if options.all_heads else sorted({options.n_paths, *SET_SIZES}))
    }  # fmt: skip
