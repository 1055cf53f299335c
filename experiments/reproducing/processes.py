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


class ProcessResult(NamedTuple):
    """How a run ended.

    Attributes:
        code: Its exit code.
        output: All that it printed.
        seconds: Its time.
        cpu: Its time on the CPU, in seconds.
    """

    code: int
    output: str
    seconds: float
    cpu: float = 0.0


def run_binary(module: str, *arguments: str) -> ProcessResult:
    """Runs a binary as `python -m module` would, in this process.

    Args:
        module: Of the binary.
        *arguments: Of its flags.
    """
    binary = importlib.import_module(module)
    start, cpu_start = time.monotonic(), time.process_time()
    sys.modules["__main__"], sys.argv = binary, [str(binary.__file__), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = cli.execute(binary.main, binary.FLAGS, arguments)
    seconds, cpu = time.monotonic() - start, time.process_time() - cpu_start
    return ProcessResult(code, output.getvalue(), seconds, cpu)


def run_commands(
    commands: Mapping[str, Sequence[str]], jobs: int, on_end: Callable[[str, ProcessResult], None]
) -> None:
    """Runs commands in their order, some at a time.

    Args:
        commands: {name: (module, *arguments)}.
        jobs: Commands at a time.
        on_end: Called with the name of each command that has ended, as it ends; also of those that
            a signal ended.

    Raises:
        Stopped: A signal asked for it.
    """
    remaining, running = dict(commands), {}

    def end(name: str, result: ProcessResult) -> None:
        remaining.pop(name)
        on_end(name, result)

    try:
        while remaining:
            with pool.start_workers(jobs) as executor:
                work = {name: (run_binary, *remaining[name]) for name in remaining}
                running = {}
                for name, future in pool.iterate_ended(executor, work, jobs, running):
                    num_ended = len(commands) - len(remaining) + 1
                    print(f"[{num_ended}/{len(commands)}] {name}", file=sys.stderr)
                    try:
                        end(name, future.result())
                    except BrokenProcessPool:  # its process died: the others go on
                        progress.raise_if_stopped()
                        end(name, ProcessResult(1, "its process was ended (out of memory?)", 0.0))
                        break
    except progress.Stopped:
        for future, name in running.items():
            was_run = future.done() and not future.cancelled() and future.exception() is None
            if was_run and name in remaining:
                end(name, future.result())
        raise
