"""What every binary shares: flags, errors in one line, devices, run folders.

    FLAGS = cli.make_flags("sort", num_seeds=8)
    flags.DEFINE_integer("depth", 6, "Layers.", lower_bound=1, flag_values=FLAGS)

    def main(options):
        with cli.open_run(options) as run:
            progress = Progress(total=10, label="train", log=run.log)   # experiments/progress.py
            mesh = cli.mesh(options)                # all devices asked for, axis "seeds"
            ...

    if __name__ == "__main__":
        cli.run(main, FLAGS)

Each binary has its own FlagValues, so that several of them live in one process (tests,
`reproduce`): `cli.execute(main, FLAGS, ["--depth=2"])` returns the exit code. Exit codes: 0 done,
2 a mistake of the user's in one line on stderr, 130 Ctrl-C, 143 SIGTERM (see `signals`), 141 where
nobody reads what is printed any more.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
from absl import flags

from experiments.shell import memory, several, signals
from experiments.shell.devices import mesh as mesh, set_up_devices as set_up_devices
from experiments.shell.flag_values import Flags
from experiments.shell.options import (
    EXECUTION as EXECUTION,
    bare_flags as bare_flags,
    command_line as command_line,
    config_of as config_of,
    content_hash as content_hash,
    folder_of,
    help_text,
    make_flags as make_flags,
    options_of as options_of,
    parse as parse,
)
from experiments.shell.sweep import work
from experiments.shell.sweep.folder import BRIEFLY
from experiments.shell.vocabulary import MOST_SEEDS as MOST_SEEDS, definer as definer
from rank_collapse.printed import one_line, print_anything
from rank_collapse.runs.files import RunError
from rank_collapse.runs.folder import RunFolder

# Flags whose work is done by processes of their own, which find the devices free.
BY_CHILDREN = ("suite", "compile_for", "preset")


def run(
    main: Callable, flag_values: flags.FlagValues, *, positional: str | None = None
) -> NoReturn:
    """Runs a binary on the command line's arguments and exits; see `execute`."""
    print_anything()
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
    try:
        options = parse(flag_values, arguments, positional)
        if options.help:
            print(help_text(main, flag_values))
            return 0
        with signals.stopping(), jax.default_matmul_precision("highest"):
            if "sweep" in options and options.sweep is not None:
                code = work.run(main, options, list(arguments))
            else:
                by_children = any(getattr(options, name, None) for name in BY_CHILDREN)
                if "num_devices" in options and not by_children:
                    set_up_devices(options)
                several.check_flags(options)
                with several.one_voice():
                    code = main(options) or 0
            signals.check()
        return code
    except (KeyboardInterrupt, signals.Stopped) as asked:
        resumes = ": the same command again resumes" if "output_dir" in flag_values else ""
        print(f"\ninterrupted{resumes}", file=sys.stderr)
        return asked.code if isinstance(asked, signals.Stopped) else 130
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # nothing more can be said
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGPIPE
    except memory.MISTAKES as error:
        if "--debug" in arguments:
            traceback.print_exc()
        gone = several.lost(error)
        reason = f"another process of this run has stopped: {error}" if gone else None
        print(f"error: {one_line(reason or memory.reason_of(error))}", file=sys.stderr)
        return 1 if gone else 2


def open_run(
    options: Flags,
    *,
    extra: Mapping[str, Any] | None = None,
    execution: Sequence[str] = (),
    read_only: bool = False,
) -> RunFolder:
    """The run folder of these flags: results/<experiment>/<run name>/, a context manager.

    With --do_train a finished run begins afresh; with --overwrite_output_dir that and one of other
    flags, but not one that was interrupted.

    Args:
        options: Parsed flags.
        extra: More that determines the results, such as `content_hash` of an input file.
        execution: Names of further flags that change no result, beside `options.aside`.
        read_only: Whether the folder stays as it is, unlocked.

    Raises:
        RunError: See `rank_collapse.runs.folder.RunFolder`.
    """
    aside = options.aside | set(execution)
    fields = {
        "config": config_of(options, aside) | dict(extra or {}),
        "execution": {n: options[n].value for n in sorted(aside) if n in options and n != "help"}
        | {"command": command_line()},
        "overwrite": options.overwrite,
        # A cell of a sweep may still be another process's, which is ending.
        "wait": BRIEFLY if options.group is not None else 0.0,
    }
    if read_only:
        return RunFolder(folder_of(options, aside), fields["config"], primary=False)
    open_folder = partial(several.open_folder, folder_of(options, aside))
    train, replace = (
        name in options and options[name].value for name in ("do_train", "overwrite_output_dir")
    )
    try:
        run = open_folder(fields)
    except RunError:
        if not replace:
            raise
        return open_folder(fields | {"overwrite": True})
    if run.complete and (train or replace):
        run.close()
        run = open_folder(fields | {"overwrite": True})
    return run
