"""Child processes that end with this one, however this one ends."""

import contextlib
import json
import os
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
WORKER = (sys.executable, "-m", "experiments.shell.worker")


class Ended(NamedTuple):
    """How a run ended: its exit code, all it printed, its seconds and those of the CPU."""

    code: int
    printed: str
    seconds: float
    cpu: float = 0.0


def run_in_workers(
    commands: Mapping[str, Sequence[str]],
    at_once: int,
    ended: Callable[[str, Ended], None],
    worker: Sequence[str] = WORKER,
) -> None:
    """Runs commands in their order, some at a time, passing on what they print as it comes.

    Each worker runs one after the other, so that modules are imported and programs compiled once.
    One that ends itself, as by a crash, is replaced. A signal that asks this process to end, and
    any error, is passed on to the workers as SIGTERM; they have ended when it is raised here.

    Args:
        commands: By name, which heads what a command prints: a module and its arguments.
        at_once: How many run side by side.
        ended: Called with the name of each that has ended, as it ends.
        worker: The command of a worker.
    """
    waiting, idle, lock = list(commands), [], threading.Lock()
    workers: list[subprocess.Popen] = []

    def one():
        with lock:  # a worker that is not among those that run could not be ended
            name, started = waiting.pop(0), time.monotonic()
            number = len(commands) - len(waiting)
            print(f"[{number}/{len(commands)}] {name}", file=sys.stderr, flush=True)
            child = next((c for c in idle if c.poll() is None), None)
            if child is None:
                workers.append(child := _start(worker))
            else:
                idle.remove(child)
        head = f"{name}: " if at_once > 1 else ""
        lines, code, cpu = _answer(child, commands[name], head)
        if code is None:
            code = child.wait()
        else:
            idle.append(child)
        return name, Ended(code, "".join(lines), time.monotonic() - started, cpu)

    try:
        with signals.stopping(), futures.ThreadPoolExecutor(at_once) as pool:
            try:
                left = {pool.submit(one) for _ in commands}
                while left:
                    signals.check()
                    done, left = futures.wait(left, 0.5, futures.FIRST_COMPLETED)
                    for future in done:
                        ended(*future.result())
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


def _start(command):
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # its end is that of this process
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches it once, from here
    )


def _answer(child, command, head):
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
