"""Child processes that run binaries one after the other and end with their parent.

A child is an `experiments.shell.worker`, of this process or of a Dask worker (`on_dask`).
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

from experiments.shell import signals

ENDED = "\x1eended "  # a worker's line after what a run printed: its exit code, its CPU seconds
SHARE = "RANK_COLLAPSE_SHARE"  # the variable of how many processes of a sweep share a host
SIGNALLED = (129, 130, 143)  # exit codes of a run that was asked to end
LINES = 20  # of what a child of a Dask worker prints at its end are kept


class Ended(NamedTuple):
    """How a run ended: its exit code, all it printed, its seconds and those of the CPU."""

    code: int
    printed: str
    seconds: float
    cpu: float = 0.0


def run_in_workers(
    commands: Mapping[str, Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    ended: Callable[[str, Ended], None],
    title: str = "",
) -> None:
    """Runs commands in their order, some at a time, passing on what they print as it comes.

    Each worker runs one after the other, so that modules are imported and programs compiled once.
    One that ends itself, as by a crash, is replaced. A signal that asks this process to end, and
    any error, is passed on to the workers as SIGTERM; they have ended when it is raised here.

    Args:
        commands: By name, which heads what a command prints: a module and its arguments.
        environments: Of each worker that runs beside the others: variables that it has.
        ended: Called with the name of each that has ended, as it ends.
        title: Of the workers in a list of processes.
    """
    free: queue.SimpleQueue = queue.SimpleQueue()
    for environment in environments:
        free.put((None, environment))
    workers, lock, number, ending = [], threading.Lock(), 0, False

    def work(name):
        nonlocal number
        with lock:  # a worker that is not among those that run could not be ended
            if ending:
                return None
            number, started, (child, environment) = number + 1, time.monotonic(), free.get()
            print(f"[{number}/{len(commands)}] {name}", file=sys.stderr, flush=True)
            if child is None or child.poll() is not None:
                child = start(title, environment)
                workers.append(child)
        head = f"{name}: " if len(environments) > 1 else ""
        lines, code, cpu = answer_of(child, commands[name], head)
        free.put((child, environment))
        return Ended(code, "".join(lines), time.monotonic() - started, cpu)

    try:
        with signals.stopping(), futures.ThreadPoolExecutor(len(environments)) as pool:
            running = {pool.submit(work, name): name for name in commands}
            try:
                while running:
                    signals.check()
                    for future in futures.wait(running, 0.5, futures.FIRST_COMPLETED).done:
                        ended(running.pop(future), future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # no other begins
                with lock:
                    ending = True
                    for child in workers:
                        ask_to_end(child)
                raise
    finally:
        for child in workers:
            child.communicate()


def start(
    title: str, environment: Mapping[str, str], folder: str | None = None
) -> subprocess.Popen:
    """A worker, in a folder other than this process's where one is given.

    Threads of OpenBLAS wait by spinning: with those of several processes on the same cores, its
    singular values take twenty times as long.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.shell.worker", *([title] if title else [])],
        cwd=folder,
        env={"OPENBLAS_NUM_THREADS": "1"} | os.environ | environment,
        stdin=subprocess.PIPE,  # its end is that of this process
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches it once, from here
    )


def answer_of(
    child: subprocess.Popen, command: Sequence[str], head: str
) -> tuple[list[str], int, float]:
    """(lines that a run printed, its exit code or that of a worker that ended, CPU seconds)."""
    lines = []
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(list(command)) + "\n")
        child.stdin.flush()
    for line in child.stdout:
        text, end, said = line.partition(ENDED)
        if text:
            lines.append(text)
            print(f"    {head}{text}", end="", file=sys.stderr, flush=True)
        if end:
            code, cpu = said.split()
            return lines, int(code), float(cpu)
    return lines, child.wait(), 0.0


def ask_to_end(child: subprocess.Popen) -> None:
    """Sends a worker and its children SIGTERM."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(child.pid, signal.SIGTERM)


def killed(code: int | None) -> str:
    """Which signal an exit code is of; "" of none."""
    if code is None or not (code < 0 or code in SIGNALLED):
        return ""
    name = signal.Signals(-code if code < 0 else code - 128).name
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"


def on_dask(
    title: str, command: list[str], folder: str, places: dict[str, int]
) -> tuple[int, list[str]]:
    """Runs a command in a child of this Dask worker; (its exit code, the last lines it printed).

    The child is sent SIGTERM when the task is cancelled, and ends by itself when this process does.

    Args:
        title, command: As of `start` and `answer_of`.
        folder: In which it runs.
        places: {address of a host: children at a time}.

    Raises:
        ChildProcessError: A signal ended it.
    """
    from distributed import get_worker
    from distributed.comm.addressing import get_address_host

    worker = get_worker()
    key = worker.get_current_task()
    environment = {SHARE: str(places.get(get_address_host(worker.address), 1))}
    with contextlib.ExitStack() as stack:
        if worker.state.total_resources.get("GPU"):
            environment = {"CUDA_VISIBLE_DEVICES": stack.enter_context(gpu(worker)), SHARE: "1"}
        child = start(title, environment, folder)
        stack.callback(child.communicate)
        answer = stack.enter_context(futures.ThreadPoolExecutor()).submit(
            answer_of, child, command, ""
        )
        asked = False
        while not futures.wait([answer], 0.3).done:
            task = worker.state.tasks.get(key)
            if not asked and (task is None or task.state not in ("executing", "long-running")):
                asked = True
                ask_to_end(child)
        lines, code, _ = answer.result()
    if reason := killed(code):
        raise ChildProcessError(reason)
    return code, lines[-LINES:]


@contextlib.contextmanager
def gpu(worker: Any) -> Iterator[str]:
    """One of the GPUs of a Dask worker, which no other of its children has meanwhile."""
    with worker._lock:
        free = worker.__dict__.get("free_gpus")
        if free is None:
            free = worker.free_gpus = queue.SimpleQueue()
            own = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            count = int(worker.state.total_resources["GPU"])
            for name in own if own != [""] else range(count):
                free.put(str(name))
    one = free.get()
    try:
        yield one
    finally:
        free.put(one)
