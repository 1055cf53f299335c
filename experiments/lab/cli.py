"""How every binary runs: flags, errors in one line, devices, signals, exit codes.

Each binary has its own flag values, so several of them can run in one process (tests, `reproduce`):
`cli.execute(main, FLAGS, ["--depth=2"])` returns the exit code. Exit codes: 0 done, 2 a user's
mistake (one line on stderr), 130 Ctrl-C, 143 SIGTERM (see `progress`), 141 the reader of the output
has gone.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
from absl import flags

from experiments.lab import devices, progress, rounds
from experiments.lab.flags import (
    Flags,
    bare_flags as bare_flags,
    help_text,
    make_flags as make_flags,
    parse_flags as parse_flags,
)
from experiments.lab.shared_flags import FORMER_NAMES
from experiments.lab.suggestions import suggest_flag
from rank_collapse.extras import MissingPackage
from rank_collapse.printed import format_one_line, prepare_streams, print_lines
from rank_collapse.runs.files import RunError

# Mistakes of the user or the machine, said in one line. Other errors are ours, with a traceback.
MISTAKES = (ValueError, RunError, MissingPackage, OSError, MemoryError, flags.Error)


def run(main: Callable, flag_values: Flags, *, positional: str | None = None) -> NoReturn:
    """Runs a binary on the command line's arguments and exits; see `execute`."""
    prepare_streams()
    if sys.stdout is None:  # closed: the results are in files
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    code = execute(main, flag_values, sys.argv[1:], positional=positional)
    sys.stdout.flush()
    if code > 128:
        os._exit(code)  # threads that still compile would keep the process alive
    sys.exit(code)


def execute(
    main: Callable,
    flag_values: Flags,
    arguments: Sequence[str],
    *,
    positional: str | None = None,
) -> int:
    """Parses arguments, runs main(options), and returns the exit code.

    Args:
        main: Called with the parsed flags, whose values are attributes; may return an exit code, or
            an object with one, `code`.
        flag_values: Flags from `make_flags`; values of an earlier call are forgotten.
        arguments: Command-line arguments without the program's name.
        positional: Name of the flag whose value may stand alone.
    """
    try:
        options = parse_flags(flag_values, arguments, positional)
        if multiprocessing.parent_process() is None:
            _report_former_names(arguments)
        if options.help:
            print(help_text(main, flag_values))
            return 0
        if "num_devices" in options and "preset" not in options:  # else its workers have them
            devices.start_devices(options.num_devices)
        with progress.handle_signals(), jax.default_matmul_precision("highest"):
            result = rounds.run_until_decided(main, options) if options.grows else main(options)
            return getattr(result, "code", result) or 0
    except (KeyboardInterrupt, progress.Stopped) as interrupt:
        if multiprocessing.parent_process() is None:  # else the parent says so
            with contextlib.suppress(OSError):  # of a terminal that is gone
                print(f"\ninterrupted{how_to_resume(flag_values, arguments)}", file=sys.stderr)
        return interrupt.code if isinstance(interrupt, progress.Stopped) else 130
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # nothing more can be said
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGPIPE
    except (*MISTAKES, jax.errors.JaxRuntimeError) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        message = in_typed_names(format_one_line(error), arguments, flag_values)
        message += suggest_flag(error, arguments, flag_values)
        if isinstance(error, jax.errors.JaxRuntimeError):
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            message = "out of memory: fewer seeds at a time need less"
        print_lines(f"error: {message}", file=sys.stderr)
        return 2


def _report_former_names(arguments):
    """Reports on stderr the flags that were typed by a former name."""
    options = (argument for argument in arguments if argument.startswith("-"))
    for former in dict.fromkeys(option.lstrip("-").partition("=")[0] for option in options):
        if former in FORMER_NAMES:
            print_lines(f"--{former} is now called --{FORMER_NAMES[former]}", file=sys.stderr)


def how_to_resume(flag_values: Flags, arguments: Sequence[str]) -> str:
    """Writes the end of the message of an interrupt: the command that resumes the run.

    It is the same command without --overwrite, which would delete the saved results. Of a binary
    without a run folder it is "".

    Args:
        flag_values: The flags of the binary.
        arguments: The typed arguments.
    """
    if "output_dir" not in flag_values:
        return ""
    overwrite = next((a for a in arguments if a.lstrip("-").startswith("overwrite")), None)
    return f": the same command {f'without {overwrite}' if overwrite else 'again'} resumes"


def in_typed_names(message: str, arguments: Sequence[str], flag_values: Flags) -> str:
    """Replaces names in a message by the flags as they were typed, as in "d_model=47".

    Args:
        message: Error message, with names as in "d_model=47".
        arguments: The typed arguments.
        flag_values: The flags of the binary.
    """
    typed = {argument.lstrip("-").partition("=")[0] for argument in arguments}
    for name in sorted(filter(flag_values.__contains__, typed)):
        message = re.sub(rf"\b{flag_values[name].name}=", f"{name}=", message)
    return message
