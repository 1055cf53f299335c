"""What every binary shares: flags, errors in one line, devices, run folders.

    FLAGS = cli.make_flags("sort", num_seeds=8)
    flags.DEFINE_integer("depth", 6, "Layers.", lower_bound=1, flag_values=FLAGS)

    def main(options):
        with cli.open_run(options, "sort") as run:
            progress = Progress(total=10, label="train", log=run.log)   # experiments/progress.py
            mesh = cli.mesh(options)                # all devices asked for, axis "seeds"
            ...

    if __name__ == "__main__":
        cli.run(main, FLAGS)

Each binary has its own FlagValues, so that several of them live in one process (tests,
`reproduce`): `cli.execute(main, FLAGS, ["--depth=2"])` returns the exit code. Exit codes: 0 done,
2 a mistake of the user's in one line on stderr, 130 Ctrl-C, 143 SIGTERM (see `signals`).
"""

import contextlib
import hashlib
import inspect
import io
import json
import math
import os
import re
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import flags
from jax.sharding import Mesh

from experiments.shell import compilation, exhausted, process, several, signals
from experiments.shell.flag_values import Flags
from rank_collapse.runs.files import RunError
from rank_collapse.runs.folder import RunFolder
from rank_collapse.runs.seeds import seed_mesh

# Flags that do not change results, or their rounding alone (num_devices): recorded in config.json,
# not compared on resume.
EXECUTION = {
    "help", "output_dir", "run_name", "overwrite", "num_devices", "distributed", "debug",
    "sweep", "sweep_shows", "slice", "workers", "memory_gb",
}  # fmt: skip


def make_flags(
    experiment: str,
    *,
    num_seeds: int | None = None,
    sweeps: bool = True,
    execution: Sequence[str] = (),
    **about: Any,
) -> Flags:
    """The flags all binaries share, to which a binary adds its own with `flag_values=`.

    Args:
        experiment: Name of the folder under results/.
        num_seeds: Default of --num_seeds; None for a binary without seeds (no --seed and no
            --distributed either).
        sweeps: Whether --sweep makes sense: a run leaves a folder with a table.
        execution: Names of further flags that change no result beyond rounding (a chunk size).
        **about: Further arguments of `Flags`.
    """
    values = bare_flags(Flags(experiment, aside=EXECUTION | set(execution), **about))

    def boolean(name, text):
        flags.DEFINE_boolean(name, False, text, flag_values=values)

    def integer(name, default, text, lower_bound):
        flags.DEFINE_integer(name, default, text, lower_bound=lower_bound, flag_values=values)

    folder = (
        f"Folder of the run (default results/{experiment}/<run name>); with --run_name its parent."
    )
    name = "Name of the run (default: made from the flags that are not at their defaults)."
    flags.DEFINE_string("output_dir", None, folder, flag_values=values)
    flags.DEFINE_string("run_name", None, name, flag_values=values)
    boolean("overwrite", "Delete what an earlier run left in the folder and start afresh.")
    if num_seeds is not None:
        integer("seed", 0, "Base seed; seed s of the run is fold_in(key(seed), s).", 0)
        integer("num_seeds", num_seeds, "Seeds, run as one ensemble.", 1)
        boolean("distributed", "One of several processes that share the seeds; see BUILD.md.")
    integer(
        "num_devices",
        0,
        "Devices of a process, which share the seeds (0: all; on a CPU one per core).",
        0,
    )
    if sweeps:
        _sweep_flags(values)
    return values


def bare_flags(values: flags.FlagValues | None = None) -> flags.FlagValues:
    """The flags of a command that computes nothing: --debug and --help; added to those given."""
    values = flags.FlagValues() if values is None else values
    for name, text, short in (
        ("debug", "Show the traceback of an error.", None),
        ("help", "Show this and exit.", "h"),
    ):
        flags.DEFINE_boolean(name, False, text, short_name=short, flag_values=values)
    return values


def _sweep_flags(values):
    def string(name, text):
        flags.DEFINE_string(name, None, text, flag_values=values)

    string(
        "sweep",
        "Run a grid: products a=1,2;b=3,4 and values that change together a,b=1:3,2:4. Each cell "
        "is a run in <folder>/cells/; the folder holds one table and one figure of all.",
    )
    string(
        "sweep_shows",
        "What its figure shows: a column of results.csv, then conditions such as layer=2 or "
        f"layer=last (default {values.shows or 'the first column of fractions'}).",
    )
    string("slice", "i/n: the i-th of n parts of the sweep, from 0 (default: of a Slurm array).")
    flags.DEFINE_integer(
        "workers", 1, "Processes that share the sweep; more may be started by hand or killed.",
        lower_bound=1, flag_values=values,
    )  # fmt: skip


def definer(flag_values: flags.FlagValues) -> Callable[..., None]:
    """define(kind, name, default, text, *choices, **limits): absl's DEFINE_<kind> on them."""

    def define(kind, name, default, text, *choices, **limits):
        add = getattr(flags, f"DEFINE_{kind}")
        add(name, default, *choices, text, flag_values=flag_values, **limits)

    return define


def run(
    main: Callable, flag_values: flags.FlagValues, *, positional: str | None = None
) -> NoReturn:
    """Runs a binary on the command line's arguments and exits; see `execute`."""
    print_anything()
    process.end_with_parent()
    try:
        code = execute(main, flag_values, sys.argv[1:], positional=positional)
    except Exception:
        if not several.running():
            raise
        traceback.print_exc()
        code = 1
    if code and several.running():
        several.leave(code)
    if code > 128:
        sys.stdout.flush()
        os._exit(code)  # threads that still compile would keep the process alive
    sys.exit(code)


def print_anything() -> None:
    """What an encoding such as ASCII has no character for is printed as "?"."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def execute(
    main: Callable,
    flag_values: flags.FlagValues,
    arguments: Sequence[str],
    *,
    positional: str | None = None,
) -> int:
    """Parses arguments, runs main(options), and returns the exit code.

    Args:
        main: Called with the parsed flags, whose values are attributes; may return an exit code.
        flag_values: From `make_flags`; values of an earlier call are forgotten.
        arguments: Command-line arguments without the program's name.
        positional: Name of the flag whose value may stand alone.
    """
    show_traceback = "--debug" in arguments
    try:
        options = parse(flag_values, arguments, positional)
        if options.help:
            print(help_text(main, flag_values))
            return 0
        with signals.stopping(), jax.default_matmul_precision("highest"):
            if "sweep" in options and options.sweep is not None:
                from experiments.shell.sweep import work  # which is made of what is here

                code = work.run(main, options, list(arguments))
            else:
                if "num_devices" in options:
                    set_up_devices(options)
                with several.one_voice():
                    code = main(options) or 0
            signals.check()
        return code
    except (KeyboardInterrupt, signals.Stopped) as asked:
        resumes = ": the same command again resumes" if "output_dir" in flag_values else ""
        print(f"\ninterrupted{resumes}", file=sys.stderr)
        return asked.code if isinstance(asked, signals.Stopped) else 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, RunError, OSError, MemoryError, flags.Error) as error:
        if several.lost(error):
            return _report(f"another process of this run has stopped: {error}", show_traceback, 1)
        return _report(str(error) or type(error).__name__, show_traceback)
    except jax.errors.JaxRuntimeError as error:
        if several.lost(error):
            return _report(f"another process of this run has stopped: {error}", show_traceback, 1)
        if not exhausted.out_of_memory(error):
            raise
        return _report(exhausted.one_line(error), show_traceback)


def _report(message, show_traceback, code=2):
    if show_traceback:
        traceback.print_exc()
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code


def parse(
    flag_values: flags.FlagValues, arguments: Sequence[str], positional: str | None = None
) -> flags.FlagValues:
    """The flags with the given arguments' values; `positional` is a flag that may stand alone.

    Raises:
        flags.Error, ValueError: An unknown flag, a bad value, or an argument that is no flag.
    """
    for name in flag_values:
        flag_values[name].unparse()
    flag_values.unparse_flags()
    rest = flag_values(["binary", *arguments])[1:]
    if positional and rest and not flag_values[positional].present:
        flag_values[positional].parse(rest.pop(0))
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
    for name in flag_values:
        value = flag_values[name].value
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{name}={value} is not a finite number")
    if "output_dir" not in flag_values:
        return flag_values
    folder, name = flag_values.output_dir, flag_values.run_name
    if folder is not None and not folder.strip():
        raise ValueError("--output_dir= is empty: an unset variable? The current folder is '.'")
    if name is not None and (
        Path(name).name != name or name in ("", "..") or not name.isprintable()
    ):
        raise ValueError(f"--run_name={name!r} is no name of a folder")
    return flag_values


def help_text(main: Callable, flag_values: flags.FlagValues) -> str:
    """What the binary is about and one entry per flag: the binary's own first."""
    about = getattr(main, "about", None) or inspect.getmodule(main).__doc__ or ""
    purpose = inspect.cleandoc(about)
    common = {*EXECUTION, "seed", "num_seeds"}
    unique = {flag.name: flag for flag in (flag_values[name] for name in flag_values)}
    lines = [purpose, "", "Flags:"]
    for name in sorted(unique, key=lambda n: (n in common, n)):
        flag = unique[name]
        default = "" if flag.default in (None, False) else f" (default {flag.default})"
        choices = getattr(flag.parser, "enum_values", None)
        allowed = f" One of: {', '.join(choices)}." if choices else ""
        text = " ".join((flag.help + allowed + default).split())
        lines.append(f"  --{name}")
        lines += textwrap.wrap(text, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def set_up_devices(options: flags.FlagValues) -> None:
    """Several processes, and one XLA device per CPU core; must come before any JAX computation.

    XLA does not spread a vmapped small matrix product over cores; one device per core does.
    Where JAX already runs (several binaries in one process) its devices are used as they are.

    Raises:
        ValueError: JAX does not start.
    """
    compilation.keep_programs()
    if "distributed" in options and options.distributed:
        several.join()
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", options.num_devices or cores)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # a platform that is not there
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error) or "it is not installed"
        raise ValueError(f"JAX finds no device of JAX_PLATFORMS={asked!r}: {reason}") from error


def mesh(options: flags.FlagValues) -> Mesh:
    """The mesh of the devices asked for by --num_devices in each process; its axis is "seeds".

    Raises:
        ValueError: There are fewer devices.
    """
    devices = []
    for index in range(jax.process_count()):
        own = [d for d in jax.devices() if d.process_index == index]
        if options.num_devices > len(own):
            raise ValueError(f"num_devices={options.num_devices}, but there are {len(own)}")
        devices += own[: options.num_devices or len(own)]
    return seed_mesh(devices)


def open_run(
    options: flags.FlagValues,
    experiment: str,
    *,
    extra: Mapping[str, Any] | None = None,
    execution: Sequence[str] = (),
    overwrite: bool | None = None,
) -> RunFolder:
    """The run folder of these flags: results/<experiment>/<run name>/, a context manager.

    Args:
        options: Parsed flags.
        experiment: Name of the experiment.
        extra: More that determines the results, such as `content_hash` of an input file.
        execution: Names of further flags that change no result beyond rounding (a chunk size).
        overwrite: In place of --overwrite.

    Raises:
        RunError: See `rank_collapse.runs.folder.RunFolder`.
    """
    aside = EXECUTION | set(execution)
    path = folder_of(options, experiment, aside)
    fields = {
        "config": config_of(options, experiment, aside) | dict(extra or {}),
        "execution": {n: options[n].value for n in sorted(aside) if n in options and n != "help"}
        | {"command": command_line()},
        "overwrite": options.overwrite if overwrite is None else overwrite,
    }
    return several.open_folder(path, fields)


def config_of(
    options: flags.FlagValues, experiment: str, aside: set[str] = EXECUTION
) -> dict[str, Any]:
    """What of the flags determines the results."""
    named = (n for n in sorted(options) if options[n].name == n and n not in aside)
    return {"experiment": experiment} | {n: options[n].value for n in named}


def folder_of(options: flags.FlagValues, experiment: str, aside: set[str] = EXECUTION) -> Path:
    """Where a run with these flags leaves what it finds; that of a sweep is named after it too."""
    name = options.run_name
    if options.output_dir is None:
        return Path("results") / experiment / (name or default_run_name(options, aside))
    return Path(options.output_dir) / name if name else Path(options.output_dir)


def default_run_name(options: flags.FlagValues, aside: set[str] = EXECUTION) -> str:
    """Flags that are not at their defaults, shortened, with a hash of all of them.

    "default" when there are none: the same flags give the same folder, others another.
    """
    changed = {
        name: options[name].value
        for name in sorted(options)
        if options[name].name == name
        and name not in aside
        and options[name].value != options[name].default
    }
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
