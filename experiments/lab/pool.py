"""Runs of binaries side by side, each in a process that runs one after the other."""

import contextlib
import importlib
import io
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import NamedTuple


class Ended(NamedTuple):
    """How a run ended: its exit code, all it printed, its seconds and those of the CPU."""

    code: int
    printed: str
    seconds: float
    cpu: float = 0.0


def run(module: str, *arguments: str) -> Ended:
    """Runs a binary as `python -m module` would, in this process."""
    from experiments.lab import cli

    own, begun, cpu = importlib.import_module(module), time.monotonic(), time.process_time()
    sys.modules["__main__"], sys.argv = own, [str(own.__file__), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.execute(own.main, own.FLAGS, arguments)
    return Ended(code, printed.getvalue(), time.monotonic() - begun, time.process_time() - cpu)


def run_all(
    commands: Mapping[str, Sequence[str]], jobs: int, ended: Callable[[str, Ended], None]
) -> None:
    """Runs commands in their order, some at a time; Ctrl-C reaches all of them.

    Args:
        commands: By name, a module and its arguments.
        ended: Called with the name of each that has ended, as it ends.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of several processes spin
    spawn, left = multiprocessing.get_context("spawn"), dict(commands)
    while left:
        with futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
            running = {pool.submit(run, *command): name for name, command in left.items()}
            for future in futures.as_completed(running):
                name = running[future]
                print(f"[{len(commands) - len(left) + 1}/{len(commands)}] {name}", file=sys.stderr)
                try:
                    ended(name, future.result())
                except futures.process.BrokenProcessPool:  # its process died: the others go on
                    ended(name, Ended(1, "its process was ended (out of memory?)", 0.0))
                    left.pop(name)
                    break
                left.pop(name)
