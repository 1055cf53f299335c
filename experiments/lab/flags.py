"""The flags of a binary: the shared flags, how they are parsed, and the folder that they name.

A flag with one number or a choice accepts several values, separated by commas. The run is then
computed at each of them, and at each combination of several such flags. These are the axes of the
run.
"""

import hashlib
import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments.lab import shared_flags
from experiments.lab.folder_files import read_config
from experiments.lab.provenance import JsonObject
from experiments.lab.shared_flags import FlagValue as FlagValue
from rank_collapse.runs.files import damaged_file_error

# Flags that do not change results, or their rounding alone (num_devices): recorded in config.json,
# not compared on resume.
EXECUTION = {
    "help",
    "output_dir",
    "run_name",
    "overwrite",
    "pdf",
    "num_devices",
    "jobs",
    "scheduler",
    "debug",
    "max_seeds",
    "max_texts",
}
LARGEST = 3.4e38  # number of float32
# Flags of the seeds, which are an axis of every result, and of the arithmetic of the whole run.
ONE_VALUE = {"seed", "first_seed", "num_seeds", "num_texts", "until", "dtype"}


@dataclass(frozen=True)
class Mode:
    """Settings of the run of a command, in addition to the typed flags.

    Attributes:
        is_read: Whether a finished folder is only read.
        is_judged: Whether results are only judged, not saved: a round of --until=decided.
        worker_group: The number of the group of points that a worker measures; None measures all.
        begin_with: Initial arrays of a new folder.
        begun_in: The environments in which they were made.
    """

    is_read: bool = False
    is_judged: bool = False
    worker_group: int | None = None
    begin_with: Mapping[str, np.ndarray] = field(default_factory=dict)
    begun_in: Sequence[JsonObject] = ()


class Flags(flags.FlagValues):
    """absl's flag values: the flags of a program, and the typed values. `grid` makes points of
    them.

    Args:
        experiment: Name of the folder under results/.
        shows: The column of the table that the figure over the axes shows; None where flags are not
            axes, as in commands that are not experiments.
        traced: Flags whose values are arguments of compiled programs: points of the axes that
            differ only in them are computed together, see `Executor`.
        execution: Flags that change results only by rounding.
        selecting: Flags that choose which part of a folder is shown; they may differ between its
            runs.
        counts: The flag that counts draws, which --until=decided raises; "" for none.

    Attributes:
        typed: The arguments that were parsed.
        axes: {flag: its values as written}, for flags with several values.
        mode: Settings of the command's run.
    """

    PROPERTIES = ("experiment", "shows", "traced", "execution", "selecting", "counts")
    CHANGING = ("typed", "axes", "mode")

    def __init__(
        self,
        experiment: str = "",
        *,
        shows: str | None = None,
        traced: Iterable[str] = (),
        execution: Iterable[str] = (),
        selecting: Iterable[str] = (),
        counts: str = "num_seeds",
    ):
        super().__init__()
        self.experiment, self.shows, self.counts = experiment, shows, counts
        self.traced, self.selecting = frozenset(traced), frozenset(selecting)
        self.execution = frozenset({*EXECUTION, *execution, *selecting})
        self.typed, self.axes, self.mode = (), {}, Mode()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a property of the binary or of the command; absl treats other names as flags."""
        if name in (*self.PROPERTIES, *self.CHANGING):
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)

    def define(
        self,
        kind: str,
        name: str,
        default: FlagValue,
        text: str,
        *choices: Sequence[str],
        **limits: str | float | None,
    ) -> None:
        """Defines a flag as absl's `DEFINE_<kind>` does.

        Args:
            kind: "integer", "float", "boolean", "string", "enum" or "list".
            name, default, text: Name, default and help text of the flag.
            *choices: Values of an enum.
            **limits: Further arguments of absl's function.
        """
        if kind == "list":
            parser, serializer = shared_flags.NamesParser(), flags.CsvListSerializer(",")
            flags.DEFINE(parser, name, default, text, self, serializer)
            return
        add = getattr(flags, f"DEFINE_{kind}")
        add(name, default, *choices, text, flag_values=self, **limits)

    def takes_several(self, name: str) -> bool:
        """Returns whether a flag may be an axis: it has one value, and accepts several."""
        if not self.shows or name not in self or self[name].name in self.execution | ONE_VALUE:
            return False
        return type(self[name].parser) in shared_flags.SINGLE

    @property
    def grows(self) -> bool:
        """Returns whether draws are added until the statements are decided."""
        return bool(self.counts) and "until" in self and self.until is not None


def make_flags(
    experiment: str,
    *,
    num_seeds: int | None = None,
    num_devices: int = 0,
    pdf: bool | None = True,
    can_grow: bool = False,
    **properties: Any,
) -> Flags:
    """Makes the flags that all binaries share, to which a binary adds its own.

    Args:
        experiment: Name of the folder under results/.
        num_seeds: Default of --num_seeds; None for a binary without seeds.
        num_devices: Default of --num_devices; 0 for all devices.
        pdf: Default of --pdf; None for a binary that decides it by other flags.
        can_grow: Whether it has --until=decided, which adds seeds until statements are decided.
        **properties: Further arguments of `Flags`.
    """
    values = bare_flags(Flags(experiment, **properties))
    shared_flags.define(values, output_dir=None, run_name=None, overwrite=False)
    shared_flags.define(values, pdf=pdf)
    shared_flags.define(values, num_devices=num_devices)
    if num_seeds is not None:
        shared_flags.define(values, seed=0, first_seed=0, num_seeds=num_seeds)
        shared_flags.define(values, jobs=0, scheduler=None)
    if can_grow:
        shared_flags.define(values, until=None, **{values.counts.replace("num_", "max_"): 256})
    return values


def bare_flags(values: Flags | None = None) -> Flags:
    """Defines --debug and --help, the flags of a command that computes nothing."""
    values = Flags() if values is None else values
    values.define("boolean", "debug", False, "Show the traceback of an error.")
    values.define("boolean", "help", False, "Show this and exit.", short_name="h")
    return values


def parse_flags(
    flag_values: Flags, arguments: Sequence[str], positional: str | None = None
) -> Flags:
    """Parses arguments into the flags; values of an earlier call are forgotten.

    Args:
        flag_values: The flags, which are changed.
        arguments: Arguments of the command line, without the program's name.
        positional: Name of the flag whose value may stand alone.

    Returns:
        The same flags.

    Raises:
        flags.Error, ValueError: An unknown flag, a bad value, or an argument that is not a flag.
    """
    for name in flag_values:
        flag_values[name].unparse()
    flag_values.typed, flag_values.mode = arguments, Mode()
    arguments, flag_values.axes = _split_axes(flag_values, arguments)
    unparsed = flag_values(["binary", *arguments])[1:]
    if positional and unparsed and not flag_values[positional].present:
        flag_values[positional].parse(unparsed if len(unparsed) > 1 else unparsed[0])
    elif unparsed:
        raise ValueError(f"unexpected argument {unparsed[0]!r}; flags are written --name=value")
    for name in flag_values:
        check_value(name, flag_values[name])
    return flag_values


def _split_axes(flag_values, arguments):
    """Returns (the arguments with the first value of each axis, {axis: all its values}).

    Args:
        flag_values: The flags.
        arguments: Arguments of the command line.
    """
    single, axes, name = [], {}, ""
    for argument in arguments:
        head, equals, text = argument.partition("=") if argument[:1] == "-" else ("", "", argument)
        name = head.lstrip("-") or name
        name = name if name in flag_values else name.removeprefix("no")  # --noNAME
        if flag_values.takes_several(name):
            axes.pop(flag_values[name].name, None)  # the last one counts
            if "," in text:
                values = list(dict.fromkeys(text.split(",")))
                axes[flag_values[name].name], text = values, values[0]
        single.append(f"{head}{equals}{text}")
    return single, axes


def check_value(name, flag):
    """Refuses a value that no flag accepts.

    These are a number that does not fit into float32, an integer of more than 32 bits, an empty
    text or list, and a run name that cannot name a folder.
    """
    value = flag.value
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and abs(number) >= 2**31:
            raise ValueError(f"--{name}={number} is not between -2147483647 and 2147483647")
        if isinstance(number, float) and not abs(number) <= LARGEST:
            raise ValueError(f"--{name}={number} is not a finite number of float32")
    if name == "run_name" and value is not None:
        is_name = Path(value).name == value and value not in ("", "..") and value.isprintable()
        if not is_name or value.startswith("-") or len(value.encode()) > 200:
            raise ValueError(f"--run_name={value!r} is not a folder name")
    empty = not value.strip() if isinstance(value, str) else value == []
    if flag.present and empty:
        raise ValueError(f"--{name} is empty: is a variable unset?")


def check_names(options: Mapping[str, FlagValue], flag: str, allowed: Iterable[str]) -> None:
    """Raises an error if a list of names has one that is not allowed.

    Args:
        options: The flags, or the options of a point.
        flag: The name of the list.
        allowed: Allowed names.

    Raises:
        ValueError: The message names the flag and the first unknown name.
    """
    for name in getattr(options, flag):
        if name not in allowed:
            raise ValueError(f"--{flag}={name} is not one of {', '.join(allowed)}")


def help_text(main: Callable, flag_values: Flags) -> str:
    """Writes the output of `--help`: the module's docstring, then the flags in absl's format.

    Args:
        main: A function of the module.
        flag_values: The flags.
    """
    lines = flag_values.get_help(include_special_flags=False).splitlines()
    described = [line for line in lines if line.startswith(" ")]  # no names of our modules
    purpose = inspect.cleandoc(inspect.getmodule(main).__doc__ or "")
    return "\n".join([purpose, "", "Flags:", *described])


def read_flags(flag_values: Flags, folder: Path, selection: Mapping[str, FlagValue]) -> Flags:
    """Reads the flags that a run folder was made with, as if all of them had been typed.

    Args:
        flag_values: The flags of its binary, which are changed.
        folder: The run folder.
        selection: {flag: value} of the flags that are not in config.json, because they only choose
            the part of the folder that is shown.

    Raises:
        RunError: A damaged config.json.
    """
    config = read_config(folder)
    arguments = [f"--output_dir={folder}"]
    try:
        axes = config.get("axes", {})  # last and in their order, as parts of arrays are named
        for name, value in (*(config | selection).items(), *axes.items()):
            if name in flag_values and value not in (None, "", []):  # these are defaults alone
                text = ",".join(map(str, value)) if isinstance(value, list) else value
                arguments.append(f"--{name}={text}")
        return parse_flags(flag_values, arguments)
    except (flags.Error, AttributeError, TypeError, ValueError) as error:
        raise damaged_file_error(folder / "config.json", error) from error


def make_config(options: Flags) -> dict[str, FlagValue]:
    """Lists the settings that determine the results: the experiment, and all flags except those of
    execution.

    With --until=decided the number of draws is a result.
    """
    left_out = options.execution | {options.counts if options.grows else "until"}
    names = (n for n in sorted(options) if options[n].name == n and n not in left_out)
    axes = {"axes": options.axes} if options.axes else {}
    return {"experiment": options.experiment} | {n: options[n].value for n in names} | axes


def run_path(options: Flags) -> Path:
    """Returns the folder of a run: results/<experiment>/<run name>/, or --output_dir."""
    if options.output_dir is None:
        return Path("results", options.experiment, options.run_name or default_run_name(options))
    return Path(options.output_dir, options.run_name or "")


def default_run_name(options: Flags) -> str:
    """Names a run by the changed flags, shortened, and a hash of these flags and their values.

    A flag is changed if it is not at its default. Without changed flags the name is "default".
    Equal flags give the same folder, different flags another.
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


def content_hash(content: bytes) -> str:
    """Returns the SHA-256 of an input, which identifies it in config.json."""
    return hashlib.sha256(content).hexdigest()


def command_line() -> str:
    """Returns the command that started this process, as typed, without machine paths."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = f"-m {spec.name}" if spec is not None else Path(sys.argv[0]).name
    return f"python {program} {shlex.join(sys.argv[1:])}".strip()
