"""Child processes that end with this one, however this one ends."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import NamedTuple

from experiments.shell import signals
from experiments.shell.sweep.child import ENDS_WITH_STDIN

ENDED = "\x1eended "  # a worker's line after what a run printed: its exit code, its CPU seconds


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
    waiting, workers, lock = list(commands), [], threading.Lock()
    answers: queue.SimpleQueue[tuple[str, Ended]] = queue.SimpleQueue()

    def work(environment):
        child = None
        while True:
            with lock:  # a worker that is not among those that run could not be ended
                if not waiting:
                    return
                name, started = waiting.pop(0), time.monotonic()
                number = len(commands) - len(waiting)
                print(f"[{number}/{len(commands)}] {name}", file=sys.stderr, flush=True)
                if child is None or child.poll() is not None:
                    child = start(title, environment)
                    workers.append(child)
            head = f"{name}: " if len(environments) > 1 else ""
            lines, code, cpu = answer_of(child, commands[name], head)
            code = child.wait() if code is None else code
            answers.put((name, Ended(code, "".join(lines), time.monotonic() - started, cpu)))

    try:
        with signals.stopping(), futures.ThreadPoolExecutor(len(environments)) as pool:
            try:
                threads = [pool.submit(work, environment) for environment in environments]
                for _ in commands:
                    ended(*_next(answers, threads))
            except BaseException:
                with lock:
                    waiting.clear()  # no other begins
                for child in workers:
                    if child.poll() is None:
                        with contextlib.suppress(ProcessLookupError):  # it has just ended
                            os.killpg(child.pid, signal.SIGTERM)
                raise
    finally:
        for child in workers:
            child.communicate()


def _next(answers, threads):
    while True:
        signals.check()
        for thread in threads:
            if thread.done():
                thread.result()  # raises what went wrong in it
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=0.5)


def start(title: str, environment: Mapping[str, str]) -> subprocess.Popen:
    """A worker, see `experiments.shell.worker`.

    Threads of OpenBLAS wait by spinning: with those of several processes on the same cores, its
    singular values take twenty times as long.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.shell.worker", *([title] if title else [])],
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
) -> tuple[list[str], int | None, float]:
    """(lines that a run printed, its exit code, its CPU seconds); None where its worker ended."""
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
    return lines, None, 0.0


def end_with_parent() -> None:
    """In a child of a Dask worker: sends this process SIGTERM when its parent has ended.

    Also where the parent was killed by a signal that it cannot handle. On any system.
    """
    if not os.environ.pop(ENDS_WITH_STDIN, None):
        return
    source = os.dup(0)

    def watch():
        while os.read(source, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
