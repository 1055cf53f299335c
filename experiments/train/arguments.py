"""Flags of the trained experiments: the published code's names and meanings, and our own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

import rank_collapse as rc
from experiments.lab import Flags, FlagValue, Options, cli, shared_flags
from rank_collapse.training import Hyper, Recipe

# How the work is divided: no influence on results.
EXECUTION = ("do_train", "keep_models", "monitor")
# {published name: ours}
PUBLISHED_NAMES = {
    "width": "num_heads",
    "hidden_dim": "d_model",
    "seq_len": "num_tokens",
    "batch_sz": "batch_size",
}
# Of presets.
TINY = (
    "--num_seeds=2 --depth=2 --num_heads=2 --d_model=4 --num_tokens=3 --n_train_data=6 "
    "--n_eval_data=4 --n_epochs=1 --batch_size=3"
)


def make_flags(
    experiment: str,
    *,
    shows: str = "accuracy,evaluation=whole",
    num_seeds: int = 2,
    monitor: bool = True,
    do_mlp: bool = False,
    can_grow: bool = True,
    **defaults: FlagValue,
) -> Flags:
    """Makes the flags that all trained experiments share, by our names and the published ones.

    Args:
        experiment: Name of the folder under results/.
        shows: Quantity in the figure of a sweep.
        num_seeds, do_mlp: Defaults.
        can_grow: See `cli.make_flags`.
        monitor: Whether the command has --monitor; the data then have held-out examples for
            `watched.layer_scalars`.
        **defaults: Defaults of the flags for sizes, data and training.
    """
    values = cli.make_flags(
        experiment,
        num_seeds=num_seeds,
        can_grow=can_grow,
        shows=shows,
        execution=EXECUTION,
        traced=[field.name for field in dataclasses.fields(Hyper)],
    )
    # Normalised tokens of two numbers are (1, -1) or (-1, 1), whatever the network.
    shared_flags.define(values, least={"d_model": 3}, init_scale=1.0, seed_chunk=0, **defaults)
    shared_flags.define_alias(values, **PUBLISHED_NAMES)
    values.define("boolean", "do_mlp", do_mlp, "An MLP sublayer (gelu, own skip) in each layer.")
    values.define(
        "boolean",
        "do_train",
        False,
        "Accepted as in the published commands; only --overwrite trains finished runs again.",
    )
    values.define(
        "boolean",
        "keep_models",
        False,
        "Write the trained weights of all seeds to the run folder: models.safetensors, or a "
        "file for each network in models/; rank_collapse.training.load_models reads them.",
    )
    if monitor:
        values.define(
            "boolean",
            "monitor",
            False,
            "Write rc.monitor of every layer, and the loss, to metrics.jsonl (of several "
            "networks to a file for each in metrics/) before training and after each epoch; "
            "draw it with rank-collapse watch FOLDER.",
        )
    return values


def make_recipe(options: Options, embedding: rc.EmbeddingConfig, **fields: Any) -> Recipe:
    """Makes the recipe of the published network: post-norm with skips, trained as the flags say.

    Args:
        options: Sizes; --do_mlp adds an MLP of width d to each layer.
        embedding: Embedding of the network.
        **fields: Further fields of the recipe, or values that replace those of the flags.
    """
    config = rc.TransformerConfig(
        depth=options.depth,
        num_heads=options.num_heads,
        d_model=options.d_model,
        d_ff=options.d_model,
        mlp="gelu" if options.do_mlp else "none",
        attention_skip=True,
        mlp_skip=True,
        norm_placement="post",
        init="reference",
        embedding=embedding,
    )
    defaults = {"batch_size": options.batch_size, "num_epochs": options.n_epochs}
    return Recipe(config, options.num_labels, **defaults | fields)


def make_hyper(options: Options, fields: Mapping[str, PyTree[ArrayLike]] | None = None) -> Hyper:
    """Makes the traced values of a run, the same for every seed.

    Args:
        options: The flags; values without a flag are the defaults.
        fields: Values that are not taken from the flags.
    """
    names = [field.name for field in dataclasses.fields(Hyper) if field.name in options]
    values = {name: np.float32(options[name]) for name in names}
    return Hyper(**values | dict(fields or {}))
