"""The command `rank-collapse`, which is installed with the library.

    rank-collapse check FOLDER ...            one page about checkpoints
    rank-collapse depth FOLDER                how much of its depth a language model uses
    rank-collapse watch FILE_OR_FOLDER        a training run while it runs
    rank-collapse agree A B                   at which layer two runs of one model part

`python -m rank_collapse` is the same; without one of these names the command is `check`. Exit
codes: 0 done, 1 two runs differ, 2 a mistake (one line explains it), 3 a value is beyond a
threshold of `watch`, 130 an interrupt, 141 the reader of the output has gone.
"""

import argparse
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rank_collapse.printed import (
    format_one_line,
    prepare_streams,
    print_lines,
    show_warnings_in_lines,
)
from rank_collapse.runs import files

# Modules, imported when they are asked for, and what they do.
COMMANDS = {
    "check": "one page about checkpoints; the command where none is named",
    "depth": "how much of its depth a language model uses",
    "watch": "the metrics of a training run so far",
    "agree": "at which layer two runs of one model part",
}


def run() -> NoReturn:
    """Run the command as a process, which Ctrl-C ends at once.

    XLA's compiler cannot be interrupted by an exception.
    """
    prepare_streams()
    show_warnings_in_lines()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_on_interrupt)
    sys.exit(main())


def end_on_interrupt(*_: object) -> NoReturn:
    """End the process on Ctrl-C."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Words of the command line; by default the arguments of the process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        flags = parse_flags(arguments)
        if sys.stdout is None:
            raise ValueError("standard output is closed: nothing can be printed")
        code = flags.module.run(flags, arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, MemoryError, ModuleNotFoundError, files.RunError) as error:
        print_lines(f"error: {format_one_line(error)}", file=sys.stderr)
    except RuntimeError as error:  # of JAX
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print_lines(f"error: out of memory: {format_one_line(error, 300)}", file=sys.stderr)
    except KeyboardInterrupt:
        print_lines("", "interrupted", file=sys.stderr)
        return 130
    return 2


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the flags, and find the module of the command: `check` where none is named.

    Args:
        arguments: Words of the command line.

    Raises:
        ValueError: The first word is neither a command nor a possible checkpoint; an empty word or
            value.
    """
    form = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    first, *remaining = arguments or ["--help"]
    if first in ("-h", "--help"):
        parser = _Parser(prog="rank-collapse", description=__doc__, **form)
        listed = parser.add_subparsers(title="commands", metavar="COMMAND")
        for name, text in COMMANDS.items():
            listed.add_parser(name, help=text)
        parser.parse_args(["--help"])
    if first not in COMMANDS:
        first, remaining = "check", list(arguments)
        if remaining[0].isidentifier() and not Path(remaining[0]).exists():
            from rank_collapse.pretrained.published import suggest_names  # here: it takes seconds

            near = difflib.get_close_matches(remaining[0], COMMANDS, 1)
            meant = f", did you mean {near[0]}?" if near else suggest_names(remaining[0])
            commands = ", ".join(COMMANDS)
            raise ValueError(
                f"{remaining[0]} is neither a command ({commands}) nor a folder{meant}"
            )
    module = importlib.import_module(f"rank_collapse.command.{first}")
    parser = _Parser(prog=f"rank-collapse {first}", description=module.__doc__, **form)
    module.add_arguments(parser)
    for word in remaining:  # empty where a variable of the shell is not set
        flag, has_value, value = word.partition("=")
        if not word or (flag.startswith("--") and has_value and not value):
            raise ValueError(f"{word or repr(word)} is empty")
    return parser.parse_args(remaining, argparse.Namespace(command=first, module=module))


class _Parser(argparse.ArgumentParser):
    """A mistake is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {format_one_line(message)}; {self.prog} --help says more\n")
