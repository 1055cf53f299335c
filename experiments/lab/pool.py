"""Work of several processes: runs of binaries, and the points of one run's axes.

Both go through an executor of `concurrent.futures`: processes of this machine, or the workers of a
Dask scheduler (--scheduler).
"""

import contextlib
import importlib
import io
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import NamedTuple

from rank_collapse.runs.files import RunError


class Ended(NamedTuple):
    """How a run ended: its exit code, all it printed, its seconds and those of the CPU."""

    code: int
    printed: str
    seconds: float
    cpu: float = 0.0


@contextlib.contextmanager
def workers(jobs: int, scheduler: str | None = None) -> Iterator[futures.Executor]:
    """So many processes, or the workers of a Dask scheduler by its address.

    Raises:
        RunError: A worker was ended, or the scheduler is lost.
        OSError: The scheduler does not answer.
    """
    if scheduler is not None:
        from distributed import Client  # here: it takes a second

        try:
            with Client(scheduler, timeout=10) as client:
                yield client.get_executor(pure=False)
        except (futures.CancelledError, TimeoutError, ValueError) as error:
            raise RunError(f"--scheduler={scheduler}: {error or 'it was lost'}") from error
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of several processes spin
    spawn = multiprocessing.get_context("spawn")
    pool = futures.ProcessPoolExecutor(jobs, spawn, end_with_parent)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise RunError("a worker was ended (out of memory?): fewer --jobs take less") from error
    finally:
        pool.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """A worker does not outlive a parent that is killed."""

    def wait():
        connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


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
    left = dict(commands)
    while left:
        with workers(jobs) as pool:
            running = {pool.submit(run, *command): name for name, command in left.items()}
            for future in futures.as_completed(running):
                name = running[future]
                print(f"[{len(commands) - len(left) + 1}/{len(commands)}] {name}", file=sys.stderr)
                left.pop(name)
                try:
                    ended(name, future.result())
                except BrokenProcessPool:  # its process died: the others go on
                    ended(name, Ended(1, "its process was ended (out of memory?)", 0.0))
                    break
