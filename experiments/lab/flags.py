"""The flags of a binary: the shared ones, how they are parsed, and the folder they name.

A flag of one number or of a choice takes several by commas: the run is then computed at each of
them, and at each combination of several such flags. These are the axes of the run.
"""

import copy
import hashlib
import inspect
import itertools
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments.lab import vocabulary
from rank_collapse.runs.files import damaged, read_object

# Flags that do not change results, or their rounding alone (num_devices): recorded in config.json,
# not compared on resume.
EXECUTION = {
    "help",
    "output_dir",
    "run_name",
    "overwrite",
    "num_devices",
    "jobs",
    "scheduler",
    "debug",
}
LARGEST = 3.4e38  # number of float32
# Of the seeds, which are an axis of every result.
ONE_VALUE = {"seed", "first_seed", "num_seeds"}


class Flags(flags.FlagValues):
    """absl's flag values, and beside them what no flag says.

    Args:
        experiment: Name of the folder under results/.
        shows: The column of the table that the figure over the axes shows.
        traced: Flags whose values compiled programs take as arguments: points of the axes that
            differ in them alone are computed together, see `Executor`.
        execution: Flags that change no result beyond rounding.
        asked: Flags that choose what of a folder is shown, which may differ between its runs.

    Attributes:
        axes: {flag: its values, as they were written}, those with several.
        point: {flag: its value} of one point of the axes.
        group: The points that differ from this one in `traced` alone, itself among them.
        number: Of the group.
        worker_group: The number of the group that a worker measures; None measures all.
        reading: Whether a finished folder is only read.
        begin_with: Arrays that a new folder begins with.
    """

    def __init__(
        self,
        experiment: str = "",
        *,
        shows: str | None = None,
        traced: Iterable[str] = (),
        execution: Iterable[str] = (),
        asked: Iterable[str] = (),
    ):
        super().__init__()
        # absl takes attributes for flags.
        vars(self).update(
            experiment=experiment,
            shows=shows,
            traced=frozenset(traced),
            execution=frozenset({*EXECUTION, *execution, *asked}),
            asked=frozenset(asked),
        )
        vars(self).update(axes={}, point={}, group=[self], number=0)
        vars(self).update(worker_group=None, reading=False, begin_with={})

    def points(self) -> "list[Flags]":
        """The flags at every point of the axes.

        Raises:
            flags.Error, ValueError: A value that a flag does not take.
        """
        groups: dict[str, list[Flags]] = {}
        for values in itertools.product(*self.axes.values()):
            point = copy.deepcopy(self)
            for name, text in zip(self.axes, values, strict=True):
                point[name].parse(text)
                _check_value(name, point[name])
            setting = {name: point[name].value for name in self.axes}
            apart = str([value for name, value in setting.items() if name not in self.traced])
            group = groups.setdefault(apart, [])
            if all(setting != other.point for other in group):  # 1 and 1.0 are one
                vars(point).update(point=setting, group=group, number=[*groups].index(apart))
                group.append(point)
        return [point for group in groups.values() for point in group]

    def takes_several(self, name: str) -> bool:
        """Whether a flag of one value takes several, which are an axis."""
        if name not in self or self[name].name in self.execution | ONE_VALUE:
            return False
        return type(self[name].parser) in vocabulary.SINGLE

    @property
    def prefix(self) -> str:
        """Before the names of the arrays of a point; "" where there are no axes."""
        return "".join(f"{name}={value}/" for name, value in self.point.items())


def make_flags(
    experiment: str,
    *,
    num_seeds: int | None = None,
    **about: Any,
) -> Flags:
    """The flags all binaries share, to which a binary adds its own with `flag_values=`.

    Args:
        experiment: Name of the folder under results/.
        num_seeds: Default of --num_seeds; None for a binary without seeds.
        **about: Further arguments of `Flags`.
    """
    values = bare_flags(Flags(experiment, **about))
    vocabulary.define(values, output_dir=None, run_name=None, overwrite=False, num_devices=0)
    if num_seeds is not None:
        vocabulary.define(values, seed=0, first_seed=0, num_seeds=num_seeds)
        vocabulary.define(values, jobs=0, scheduler=None)
    return values


def bare_flags(values: flags.FlagValues | None = None) -> flags.FlagValues:
    """The flags of a command that computes nothing: --debug and --help; added to those given."""
    values = Flags() if values is None else values
    define = vocabulary.definer(values)
    define("boolean", "debug", False, "Show the traceback of an error.")
    define("boolean", "help", False, "Show this and exit.", short_name="h")
    return values


def parse_flags(
    flag_values: Flags, arguments: Sequence[str], positional: str | None = None
) -> flags.FlagValues:
    """The flags with the given arguments' values; earlier ones are forgotten.

    Raises:
        flags.Error, ValueError: An unknown flag, a bad value, or an argument that is no flag.
    """
    for name in flag_values:
        flag_values[name].unparse()
    first, axes = _without_axes(flag_values, arguments)
    vars(flag_values).update(axes=axes, worker_group=None, reading=False, begin_with={})
    extra = flag_values(["binary", *first])[1:]
    if positional and extra and not flag_values[positional].present:
        flag_values[positional].parse(extra if len(extra) > 1 else extra[0])
        extra = []
    if extra:
        raise ValueError(f"unexpected argument {extra[0]!r}; flags are written --name=value")
    for name in flag_values:
        _check_value(name, flag_values[name])
    return flag_values


def _without_axes(flag_values, arguments):
    """(the arguments with the first of several values, {flag: all of them})."""
    first, axes, name = [], {}, ""
    for argument in arguments:
        head, equals, text = argument.partition("=") if argument[:1] == "-" else ("", "", argument)
        name = head.lstrip("-") or name
        if "," in text and flag_values.takes_several(name):
            values = list(dict.fromkeys(text.split(",")))
            axes[flag_values[name].name], text = values, values[0]
        first.append(f"{head}{equals}{text}")
    return first, axes


def _check_value(name, flag):
    """Refuses what no flag takes: a number that float32 has not, an integer of more than 32 bits,
    an empty text or list, a run name that is no folder's."""
    value = flag.value
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and abs(number) >= 2**31:
            raise ValueError(f"--{name}={number} is not between -2147483647 and 2147483647")
        if isinstance(number, float) and not abs(number) <= LARGEST:
            raise ValueError(f"--{name}={number} is not a finite number of float32")
    if name == "run_name" and value is not None:
        plain = Path(value).name == value and value not in ("", "..") and value.isprintable()
        if not plain or value.startswith("-") or len(value.encode()) > 200:
            raise ValueError(f"--run_name={value!r} is not a folder name")
    empty = not value.strip() if isinstance(value, str) else value == []
    if flag.present and empty and not flag.boolean:  # --noNAME leaves a choice empty
        raise ValueError(f"--{name} is empty: is a variable unset?")


def check_names(options: flags.FlagValues, flag: str, known: Iterable[str]) -> None:
    """Refuses a list of names that holds another than the known ones.

    Raises:
        ValueError: It names the flag and the first unknown name.
    """
    for name in options[flag].value:
        if name not in known:
            raise ValueError(f"--{flag}={name} is not one of {', '.join(known)}")


def help_text(main: Callable, flag_values: flags.FlagValues) -> str:
    """What the binary is about and one entry per flag: the binary's own first."""
    purpose = inspect.cleandoc(inspect.getmodule(main).__doc__ or "")
    common = {*EXECUTION, "seed", "num_seeds"}
    unique = {flag.name: flag for flag in (flag_values[name] for name in flag_values)}
    lines = [purpose, "", "Flags:"]
    for name in sorted(unique, key=lambda n: (n in common, n)):
        flag = unique[name]
        default = "" if flag.default in (None, False) else f" (default {flag.default})"
        choices = getattr(flag.parser, "enum_values", None)
        allowed = f" One of: {', '.join(filter(None, choices))}." if choices else ""
        text = " ".join((flag.help + allowed + default).split())
        lines.append(f"  --{name}")
        lines += textwrap.wrap(text, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def set_precision(options: Flags) -> AbstractContextManager:
    """float64 where a flag --dtype asks for it: JAX computes in float32 otherwise."""
    asked = "dtype" in options and options.dtype == "float64"
    return jax.enable_x64(asked or jax.config.jax_enable_x64)


def list_arguments(options: Flags) -> list[str]:
    """The arguments that ask for the same results."""
    others = [n for n in options if n not in EXECUTION | options.axes.keys()]
    texts = [options[n].serialize() for n in others if options[n].name == n and options[n].present]
    return [*filter(None, texts), *(f"--{n}={','.join(v)}" for n, v in options.axes.items())]


def saved_config(folder: Path) -> dict[str, Any]:
    """Reads what determines the results of a run folder.

    Raises:
        RunError: A damaged config.json.
    """
    config = read_object(folder / "config.json").get("config")
    if not isinstance(config, dict):
        raise damaged(folder / "config.json", "it has no config")
    return config


def read_flags(flag_values: Flags, folder: Path, shown: Mapping[str, Any]) -> Flags:
    """The flags that a run folder was made with; all count as given.

    Args:
        shown: Those that may differ between its runs, by name.

    Raises:
        RunError: A damaged config.json.
    """
    config = saved_config(folder)
    options = parse_flags(flag_values, [f"--output_dir={folder}"])
    axes = config.get("axes", {})
    try:
        for name, value in (config | shown).items():
            if name in options and value is not None:
                options[name].parse(value)
            if name in options:
                options[name].present = 1
        for name, texts in axes.items():
            if not options.takes_several(name) or not all(isinstance(t, str) for t in texts):
                raise ValueError(f"{name}={texts} is no axis")
    except (flags.Error, AttributeError, TypeError, ValueError) as error:
        raise damaged(folder / "config.json", error) from error
    vars(options)["axes"] = axes
    return options


def make_config(options: Flags) -> dict[str, Any]:
    """What of the flags determines the results: all but those of `execution`."""
    named = (n for n in sorted(options) if options[n].name == n and n not in options.execution)
    axes = {"axes": options.axes} if options.axes else {}
    return {"experiment": options.experiment} | {n: options[n].value for n in named} | axes


def run_path(options: Flags) -> Path:
    """Where a run with these flags leaves what it finds."""
    name = options.run_name
    if options.output_dir is None:
        return Path("results") / options.experiment / (name or default_run_name(options))
    return Path(options.output_dir) / name if name else Path(options.output_dir)


def default_run_name(options: Flags) -> str:
    """Flags that are not at their defaults, shortened, with a hash of all of them.

    "default" when there are none: the same flags give the same folder, others another.
    """
    config = make_config(options)
    changed = {n: v for n, v in config.items() if n in options and v != options[n].default}
    changed |= options.axes
    if not changed:
        return "default"
    text = ",".join(
        f"{name}={'+'.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in changed.items()
    )
    short = re.sub(r"[^A-Za-z0-9=.,+_-]+", "-", text)[:80].rstrip(",-=")
    return f"{short},{content_hash(json.dumps(changed, default=str).encode())[:6]}"


def content_hash(data: bytes) -> str:
    """SHA-256 of an input, for `extra` of `open_run`."""
    return hashlib.sha256(data).hexdigest()


def command_line() -> str:
    """The command that started this process, as a user types it, without machine paths."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = f"-m {spec.name}" if spec is not None else Path(sys.argv[0]).name
    return f"python {program} {shlex.join(sys.argv[1:])}".strip()
