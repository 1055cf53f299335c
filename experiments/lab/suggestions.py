"""Suggestions for a flag that is not understood."""

import re
from collections.abc import Sequence

from absl import flags

from experiments.lab.flags import Flags

# {a name as others call it: the flag's}
SYNONYMS = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "l2": "weight_decay",
    "heads": "num_heads",
    "n_heads": "num_heads",
    "n_head": "num_heads",
    "layers": "depth",
    "n_layers": "depth",
    "n_layer": "depth",
    "num_layers": "depth",
    "num_hidden_layers": "depth",
    "width": "d_model",
    "dim": "d_model",
    "hidden_size": "d_model",
    "n_embd": "d_model",
    "tokens": "num_tokens",
    "n_tokens": "num_tokens",
    "seq_len": "num_tokens",
    "batch": "batch_size",
    "bs": "batch_size",
    "epochs": "n_epochs",
    "num_epochs": "n_epochs",
    "seeds": "num_seeds",
    "n_seeds": "num_seeds",
    "random_seed": "seed",
    "gain": "skip_gain",
    "scale": "weight_scale",
    "norm": "norm_placement",
    "out": "output_dir",
    "output": "output_dir",
    "outdir": "output_dir",
    "name": "run_name",
    "devices": "num_devices",
    "gpus": "num_devices",
    "workers": "jobs",
    "force": "overwrite",
    "model": "models",
    "checkpoint": "checkpoints",
}
MOST_VALUES = 12  # of a range that is written out
_NUMBER = r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\s*(?:\.\.\.?|:|-|–|to)\s*({_NUMBER})")


def suggest_flag(error: Exception, arguments: Sequence[str], flag_values: Flags) -> str:
    """Suggests how to write a flag; "" if nothing is known, or if absl suggests one.

    Args:
        error: Error that parsing the arguments raised.
        arguments: The typed arguments.
        flag_values: The flags of the binary.
    """
    if isinstance(error, flags.UnrecognizedFlagError):
        meant = SYNONYMS.get(error.flagname.lower())
        if meant is None:
            return "" if "Did you mean" in str(error) else "; --help lists the flags"
        if meant in flag_values:
            return f"; here it is --{meant}"
        return f"; elsewhere it is --{meant}, which this command does not have"
    if isinstance(error, flags.IllegalFlagValueError):
        for name, text in _pair_values(arguments):
            if flag_values.takes_several(name) and (values := list_values(text)):
                return f"; several values are written with commas: --{name}={values}"
    return ""


def _pair_values(arguments):
    """Yields (flag, its value) of arguments --flag=value and --flag value."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, text = argument.lstrip("-").partition("=")
        if argument.startswith("-"):
            yield name, text if equals else following


def list_values(text: str) -> str:
    """Rewrites a range or a list in another notation with commas; "" if it is neither.

    Args:
        text: Text such as "2..4", "[2,3]", "2;3" or "0.5 1".
    """
    inner = re.sub(r"[\[\](){}]", " ", text).strip()
    parts = [part for part in re.split(r"[,;\s]+", inner) if part]
    if (match := _RANGE.fullmatch(inner)) is not None:
        try:
            first, last = map(int, match.groups())
        except ValueError:
            return ",".join(match.groups())
        if not 0 <= last - first < MOST_VALUES:
            return f"{first},…,{last}"
        return ",".join(map(str, range(first, last + 1)))
    is_list = len(parts) > 0 and all(re.fullmatch(_NUMBER, part) for part in parts)
    return ",".join(parts) if is_list and (len(parts) > 1 or inner != text) else ""
