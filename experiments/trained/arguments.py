"""Flags of the trained experiments: the published code's names and meanings, and our own."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from absl import flags

from experiments.shell import cli, room
from experiments.shell.flag_values import Flags
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.paths.sets import SEMANTICS
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training.training import Hyper

# How the work is divided: no influence on results.
EXECUTION = (
    "epochs_per_chunk", "seeds_at_once", "checkpoint_seconds", "do_train", "overwrite_output_dir",
    "keep_models", "monitor",
)  # fmt: skip


def make_flags(
    experiment: str,
    *,
    shows: str = "accuracy,evaluation=whole",
    joined: bool = True,
    monitor: bool = True,
    **defaults: Any,
) -> Flags:
    """The flags that all trained experiments share.

    Args:
        experiment: Name of the folder under results/.
        shows: What the figure of a sweep shows.
        joined: Whether cells of a sweep that differ in the floats of `Hyper` alone are trained as
            one ensemble (`training.results_of` does).
        monitor: Whether there is --monitor: `training.results_of` trains, and the data have the
            held-out examples that `watched.layer_scalars` looks at.
        **defaults: Of width, depth, hidden_dim, seq_len, num_labels, n_train_data, n_eval_data,
            n_epochs, batch_sz, learning_rate, weight_decay.
    """
    values = cli.make_flags(
        experiment, num_seeds=2, shows=shows, joined=joined, execution=EXECUTION,
        traced=[field.name for field in dataclasses.fields(Hyper)],
    )  # fmt: skip

    def integer(name, text, low=1):
        flags.DEFINE_integer(name, defaults[name], text, lower_bound=low, flag_values=values)

    def boolean(name, text):
        flags.DEFINE_boolean(name, False, text, flag_values=values)

    integer("width", "Heads H of each layer.")
    integer("depth", "Layers L.")
    integer("hidden_dim", "Model width d; the MLP, where there is one, has the same width.", 3)
    integer("seq_len", "Tokens of an example.", 2)
    integer("num_labels", "Classes (letters of the alphabet when sorting).", 2)
    integer("n_train_data", "Training examples.")
    integer("n_eval_data", "Examples of the evaluation.")
    integer("n_epochs", "Passes over the training data.", 0)
    integer("batch_sz", "Examples per step.")
    flags.DEFINE_float(
        "learning_rate", defaults["learning_rate"],
        "Adam's learning rate; the published commands use 1e-5 (memorization 3e-4), at which "
        "sorting is not learned in the published number of epochs.",
        lower_bound=0.0, flag_values=values,
    )  # fmt: skip
    flags.DEFINE_float(
        "weight_decay", defaults["weight_decay"], "Added to the gradient times the weight (L2).",
        lower_bound=0.0, flag_values=values,
    )  # fmt: skip
    flags.DEFINE_float(
        "dropout", 0.1, "Dropout of embedding, attention weights and branches in training.",
        lower_bound=0.0, upper_bound=0.99, flag_values=values,
    )  # fmt: skip
    flags.DEFINE_float(
        "init_scale", 1.0, "Multiplies the initial weights of the layers.", lower_bound=0.0,
        flag_values=values,
    )  # fmt: skip
    room.define_flag(cli.definer(values))
    boolean("do_mlp", "An MLP sublayer (gelu, own skip) in each layer.")
    boolean("do_train", "Train even where the folder holds the finished run of the same flags.")
    boolean(
        "keep_models",
        "Write the trained weights of all seeds to the run folder: models.safetensors, or a file "
        "for each network in models/; rank_collapse.training.load_models reads them.",
    )
    if monitor:
        boolean(
            "monitor",
            "Write rc.monitor of every layer, and the loss, to metrics.jsonl (of several networks "
            "to a file for each in metrics/) before training and after each epoch; draw it with "
            "python -m experiments.watch FOLDER.",
        )
    boolean("train_as_eval", "Evaluate on the first n_eval_data training examples.")
    for name, default, text in (
        ("epochs_per_chunk", 0, "Epochs per jitted call (0: about a twentieth of the run)."),
        ("seeds_at_once", 0, "Seeds a device vmaps over (0: one on a CPU, all elsewhere)."),
        ("checkpoint_seconds", 20, "Seconds between checkpoints at least."),
    ):
        flags.DEFINE_integer(name, default, text, lower_bound=0, flag_values=values)
    return values


def add_path_flags(values: flags.FlagValues) -> None:
    """Flags of the evaluation by path length."""

    def integer(name, default, text, low):
        flags.DEFINE_integer(name, default, text, lower_bound=low, flag_values=values)

    def boolean(name, text):
        flags.DEFINE_boolean(name, False, text, flag_values=values)

    integer("path_len", 0, "Shortest path length evaluated; every length from it to the depth.", 0)
    integer("n_paths", 5, "Paths in a sampled set; sets of 5 and of 20 are evaluated too.", 1)
    integer("n_repeat", 5, "Sampled sets per length and size.", 1)
    flags.DEFINE_enum(
        "semantics", "recomputed", SEMANTICS, "Whether a sampled path computes its own attention "
        "(as published) or keeps the whole model's.", flag_values=values,
    )  # fmt: skip
    boolean("no_sub_path", "Recomputed paths without their layers' skips and learned norms.")
    boolean("all_heads", "Evaluate one path through all heads of all layers, and no sampled sets.")
    boolean("do_rank", "Ranks of hidden states and attention matrices of the whole model by layer.")
    boolean("compute_alpha", "α_l = ΣN(x) / (ΣN(x) + ΣN(SA(x))) of each layer.")


def accept_unused(values: flags.FlagValues, *names: str) -> None:
    """Flags that the published commands give to an experiment that does not use them."""
    text = "Accepted as in the published commands; this experiment has no use for it."
    for name in names:
        if name.startswith("no_"):
            flags.DEFINE_boolean(name, False, text, flag_values=values)
        else:
            flags.DEFINE_integer(name, None, text, flag_values=values)


def define_optional_choice(
    values: flags.FlagValues, name: str, plain: str, choices: Iterable[str], text: str
) -> None:
    """--name=CHOICE, or --name alone for `plain`; "" where it is not given."""
    known = {"true": plain, "false": "", "": ""} | {choice: choice for choice in choices}

    class Parser(flags.ArgumentParser):
        def parse(self, argument):
            if argument not in known:
                raise ValueError(f"{argument!r} is not one of {', '.join(choices)}")
            return known[argument]

        def flag_type(self):
            return "string"

    text = f"{text} <{'|'.join(choices)}>, alone {plain}."
    flag = flags.Flag(Parser(), flags.ArgumentSerializer(), name, "", text, boolean=True)
    flags.DEFINE_flag(flag, values)


def network_config(options: flags.FlagValues, embedding: EmbeddingConfig) -> TransformerConfig:
    """The published network: post-norm, skips, MLP of width d where asked for."""
    return TransformerConfig(
        depth=options.depth,
        num_heads=options.width,
        d_model=options.hidden_dim,
        d_ff=options.hidden_dim,
        mlp="gelu" if options.do_mlp else "none",
        attention_skip=True,
        mlp_skip=True,
        norm_placement="post",
        init="reference",
        embedding=embedding,
    )


def hyper(options: Flags) -> Hyper:
    """The traced values of a run, the same for every seed; those without a flag as by default.

    In an ensemble of several cells of a sweep those of each run.
    """
    names = [field.name for field in dataclasses.fields(Hyper) if field.name in options]
    if not options.cells:
        return Hyper(**{name: jnp.float32(options[name].value) for name in names})

    def by_run(name):
        values = jnp.float32([cell[name].value for cell in options.cells])
        return jnp.repeat(values, options.num_seeds // len(values))[options.window]

    return Hyper(**{name: by_run(name) for name in names})


def run_count(options: Flags) -> int:
    """Runs of an ensemble: its seeds, or the chunk of them that is computed at a time."""
    return len(range(*options.window.indices(options.num_seeds)))


def run_keys(options: Flags) -> Any:
    """Keys of the seeds; in an ensemble of several cells each cell has the same."""
    cells = len(options.cells) or 1
    keys = seed_keys(options.seed, options.num_seeds // cells)
    return jnp.concatenate([keys] * cells)[options.window]


def monitored(options: flags.FlagValues) -> bool:
    """Whether --monitor is there and given."""
    return "monitor" in options and options.monitor


def epochs_per_chunk(options: flags.FlagValues) -> int:
    """Epochs between two looks at the run."""
    return options.epochs_per_chunk or max(1, -(-options.n_epochs // 20))
