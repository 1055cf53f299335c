"""The command `rank-collapse`, which is installed with the library.

    rank-collapse check FOLDER ...        one page about checkpoints
    rank-collapse compare FOLDER FOLDER   how two of them differ, by layer
    rank-collapse series FOLDER ...       checkpoints over training
    rank-collapse watch FILE_OR_FOLDER    a training run while it runs
    rank-collapse depth-check             depth parametrisations before training

`python -m rank_collapse` is the same; without one of these names it is `check`. Exit codes: 0 done,
2 a mistake in one line, 3 a threshold of `watch` was passed, 130 an interrupt, 141 where nobody
reads what is printed any more.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

from rank_collapse.command import check, depth_check, several, watch
from rank_collapse.printed import one_line, print_anything
from rank_collapse.runs import files, limits

COMMANDS = {  # its module, what adds its flags, what runs it
    "check": (check, check.add_arguments, check.run),
    "compare": (several, several.compare_arguments, several.compare),
    "series": (several, several.series_arguments, several.series),
    "watch": (watch, watch.add_arguments, watch.run),
    "depth-check": (depth_check, depth_check.add_arguments, depth_check.run),
}


def run() -> NoReturn:
    """The command as a process."""
    print_anything()
    sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = [*(sys.argv[1:] if arguments is None else arguments)]
    given = parsed(arguments)
    try:
        limits.check_address_space()
        code = COMMANDS[given.command][2](given, arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, MemoryError, ModuleNotFoundError, files.RunError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"error: out of memory: {one_line(error, 300)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 2


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; `check` where no command is named."""
    if arguments and arguments[0] not in (*COMMANDS, "-h", "--help"):
        arguments = ["check", *arguments]
    form = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(prog="rank-collapse", description=__doc__, **form)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, add_arguments, _) in COMMANDS.items():
        first = module.__doc__.partition(":")[0]
        add_arguments(commands.add_parser(name, help=first, description=module.__doc__, **form))
    return parser.parse_args(arguments)


class _Parser(argparse.ArgumentParser):
    """A mistake is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(message)}; {self.prog} --help says more\n")
