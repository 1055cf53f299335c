"""The flags that experiments share, with one name and one text each.

    shared_flags.define(FLAGS, depth=12, num_heads=4, d_model=64, norm_placement="post")

defines the named flags, with their defaults. `define_numbers` defines lists separated by commas,
`define_alias` a second name, such as that of a published command, `define_text` the text file with
its former name.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from absl import flags

from rank_collapse.network.attention_config import MASKS
from rank_collapse.network.config import INITS
from rank_collapse.network.layers import MLP_KINDS, NORM_KINDS, NORM_PLACEMENTS

if TYPE_CHECKING:
    from experiments.lab.flags import Flags

# Parsers of one value, of which several are an axis.
SINGLE = (
    flags.FloatParser,
    flags.IntegerParser,
    flags.EnumParser,
    flags.BooleanParser,
)
MOST_SEEDS = 10**6  # of one run: its keys, its list of seeds and its table are held as a whole
# {name: (kind, text, choices, or the lower and the upper bound)}; the text may name the experiment.
VOCABULARY = {
    "depth": ("integer", "Layers L.", 1),
    "num_heads": ("integer", "Heads H of each layer.", 1),
    "d_model": ("integer", "Width d of the tokens.", 1),
    "d_ff": ("integer", "Width of the MLP (default 4 d_model).", 1),
    "num_tokens": ("integer", "Tokens of an example.", 2),
    "num_labels": ("integer", "Classes, or letters of the alphabet.", 2),
    "batch_size": ("integer", "Examples per training step.", 1),
    "n_epochs": ("integer", "Passes over the training data.", 0),
    "n_train_data": ("integer", "Training examples.", 1),
    "n_eval_data": ("integer", "Examples of the evaluation.", 1),
    "learning_rate": (
        "float",
        "Adam's learning rate; the published commands use 1e-5 (memorization 3e-4), at "
        "which sorting is not learned in the published number of epochs.",
        0.0,
    ),
    "dropout": (
        "float",
        "Dropout of embedding, attention weights and branches in training.",
        0.0,
        0.99,
    ),
    "init_scale": ("float", "Multiplies the initial weights of the layers.", 0.0),
    "weight_decay": ("float", "Added to the gradient times the weight (L2).", 0.0),
    "mlp": ("enum", "MLP of every layer, or none.", MLP_KINDS),
    "norm_placement": ("enum", "Where norms are.", NORM_PLACEMENTS),
    "norm_kind": ("enum", "Kind of norm.", NORM_KINDS),
    "mask": ("enum", "Attention mask.", MASKS),
    "window": ("integer", "Reach of --mask=local."),
    "init": ("enum", "Initialisation.", INITS),
    "weight_scale": ("float", "Multiplies every weight."),
    "skip_gain": ("float", "Multiplies the skips."),
    "bias_scale": ("float", "Standard deviation of the biases."),
    "seed_chunk": ("integer", "Seeds computed at a time, in all cells together (0: all).", 0),
    "no_repeat": ("boolean", "No letter twice in a sequence."),
    "path_len": (
        "integer",
        "Shortest path length evaluated; every length from it to the depth.",
        0,
    ),
    "n_paths": ("integer", "Paths in a sampled set; sets of 5 and of 20 are evaluated too.", 1),
    "n_repeat": ("integer", "Sampled sets per length and size.", 1),
    "no_sub_path": (
        "boolean",
        "Recomputed paths without their layers' skips and learned norms.",
    ),
    # Of all commands, of those with seeds, and of those with sweeps: `options.make_flags`.
    "output_dir": (
        "string",
        "Folder of the run (default results/{flags.experiment}/<run name>); with --run_name its "
        "parent.",
    ),
    "run_name": (
        "string",
        "Name of the run (default: made from the flags that are not at their defaults).",
    ),
    "overwrite": ("boolean", "Delete what an earlier run left in the folder and start afresh."),
    "pdf": ("boolean", "Also save each figure as PDF."),
    "num_devices": (
        "integer",
        "Devices of a process, which share the seeds (0: all; on a CPU one per core).",
        0,
    ),
    "jobs": (
        "integer",
        "Points of a grid that are measured side by side (0: one for each core, one on an "
        "accelerator).",
        0,
    ),
    "scheduler": ("string", "Address of a Dask scheduler, whose workers measure the points."),
    "seed": ("integer", "Base seed; seed s of the run is fold_in(key(seed), s).", 0),
    "first_seed": (
        "integer",
        "The first of the seeds; `python -m experiments.join` puts runs of several together.",
        0,
    ),
    "num_seeds": ("integer", "Seeds, run as one ensemble.", 1, MOST_SEEDS),
    "until": (
        "enum",
        "decided: add seeds (or texts) in rounds of 8, 16, 32, ... in all, until every row of the "
        "statements is decided. Points of a grid are then measured one after another.",
        ["decided"],
    ),
    "max_seeds": ("integer", "The most seeds of --until=decided.", 1, MOST_SEEDS),
    "max_texts": ("integer", "The most texts of --until=decided.", 2, MOST_SEEDS),
}


FlagValue = bool | int | float | str | list[str] | list[float] | None


def define(
    values: "Flags", *, least: Mapping[str, int] | None = None, **defaults: FlagValue
) -> None:
    """Defines flags of the vocabulary.

    Args:
        values: The `Flags` of a binary.
        least: {flag: lower bound instead of the vocabulary's}.
        **defaults: {flag: its default} of each flag that the binary has.
    """
    for name, default in defaults.items():
        kind, text, *limits = VOCABULARY[name]
        choices, bounds = limits, {}
        if kind in ("integer", "float"):
            lowest, highest = [*limits, None, None][:2]
            lowest = (least or {}).get(name, lowest)
            choices, bounds = [], {"lower_bound": lowest, "upper_bound": highest}
        values.define(kind, name, default, text.format(flags=values), *choices, **bounds)


class NamesParser(flags.ListParser):
    """Parses names separated by commas; one that is repeated counts once."""

    def parse(self, argument: str | list[str]) -> list[str]:
        return list(dict.fromkeys(super().parse(argument)))


class NumbersParser(flags.ListParser):
    """Parses numbers separated by commas; as for every flag, the last one on the command line
    counts.

    Args:
        number: Parser of each number.
    """

    def __init__(self, number: flags.ArgumentParser):
        super().__init__()
        self.number = number
        self.syntactic_help = f"{number.syntactic_help}, or several by commas"

    def parse(self, argument: str | list[float]) -> list[float]:
        return [self.number.parse(value) for value in super().parse(argument)]

    def flag_type(self) -> str:
        return "numbers"


def define_numbers(
    values: flags.FlagValues,
    name: str,
    default: list[float],
    text: str,
    *,
    kind: type = int,
    lower_bound: float | None = None,
) -> None:
    """Defines a flag that is a list of integers or floats by commas.

    Args:
        values: The flags of a binary.
        name, default, text: Name, default and help text of the flag.
        kind: `int` or `float`.
        lower_bound: Lower bound of each number.
    """
    number = {int: flags.IntegerParser, float: flags.FloatParser}[kind](lower_bound)
    text = f"{text} A list by commas."
    flags.DEFINE(NumbersParser(number), name, default, text, values, flags.CsvListSerializer(","))


# {name that a flag had: its name}, for those that are still accepted.
FORMER_NAMES = {"text_file": "text"}


def define_text(values: "Flags", text: str) -> None:
    """Defines --text, the file of the text, which was called --text_file before.

    Args:
        values: The `Flags` of a binary.
        text: Help text of the flag.
    """
    values.define("string", "text", None, text)
    define_alias(values, text_file="text")


def define_alias(values: flags.FlagValues, **names: str) -> None:
    """Defines second names of flags, which are neither recorded nor shown again.

    Args:
        values: The flags of a binary.
        **names: {second name: the flag's}.
    """
    for name, target in names.items():
        flag = values[name] = values[target]
        flag.help = f"{flag.help} Also --{name}."
