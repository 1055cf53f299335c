"""Runs of binaries in worker processes."""

import contextlib
import importlib
import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from experiments.lab import cli, pool, progress


class Ended(NamedTuple):
    """How a run ended: its exit code, all it printed, its seconds and those of the CPU."""

    code: int
    printed: str
    seconds: float
    cpu: float = 0.0


def run(module: str, *arguments: str) -> Ended:
    """Runs a binary as `python -m module` would, in this process."""
    binary, begun, cpu = importlib.import_module(module), time.monotonic(), time.process_time()
    sys.modules["__main__"], sys.argv = binary, [str(binary.__file__), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.execute(binary.main, binary.FLAGS, arguments)
    return Ended(code, printed.getvalue(), time.monotonic() - begun, time.process_time() - cpu)


def run_all(
    commands: Mapping[str, Sequence[str]], jobs: int, ended: Callable[[str, Ended], None]
) -> None:
    """Runs commands in their order, some at a time.

    Args:
        commands: By name, a module and its arguments.
        ended: Called with the name of each that has ended, as it ends.

    Raises:
        Stopped: A signal asked for it.
    """
    left = dict(commands)
    while left:
        with pool.start_workers(jobs) as executor:
            running = {
                pool.submit_work(executor, run, *command): name for name, command in left.items()
            }
            for future in pool.iterate_ended(running):
                name = running[future]
                print(f"[{len(commands) - len(left) + 1}/{len(commands)}] {name}", file=sys.stderr)
                left.pop(name)
                try:
                    ended(name, future.result())
                except BrokenProcessPool:  # its process died: the others go on
                    progress.raise_if_stopped()
                    ended(name, Ended(1, "its process was ended (out of memory?)", 0.0))
                    break
