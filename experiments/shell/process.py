"""A child process that ends with this one, however this one ends."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from experiments.shell.signals import Stopped, stopping

# Set in a child of `run_process`: its standard input ends when its parent does.
_VARIABLE = "RANK_COLLAPSE_ENDS_WITH_STDIN"
_GRACE = 30  # seconds to save what is finished


def run_process(command: Sequence[str]) -> tuple[int, str]:
    """Runs a command, passing on what it prints as it comes; (exit code, all it printed).

    Ctrl-C, SIGTERM and SIGHUP are passed on to the command and all it has started; it has ended
    when they are raised here. Where this process is killed, a binary of ours stops too, see
    `end_with_parent`.
    """
    lines = []
    with (
        stopping(),
        subprocess.Popen(
            command,
            env=os.environ | {_VARIABLE: "1"},
            stdin=subprocess.PIPE,  # nothing is written: no other process holds its other end
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches it once, from here
        ) as process,
    ):
        try:
            for line in process.stdout:
                lines.append(line)
                print(f"    {line}", end="", file=sys.stderr, flush=True)
            return process.wait(), "".join(lines)
        except (KeyboardInterrupt, Stopped) as asked:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, getattr(asked, "number", signal.SIGINT))
            process.wait()
            raise


class Children:
    """Processes that run beside each other; a signal to this one reaches each. A context manager.

    At its end all have ended.
    """

    def __init__(self):
        self.started: list[subprocess.Popen] = []

    def __enter__(self) -> "Children":
        return self

    def start(self, command: Sequence[str], log: str | os.PathLike) -> subprocess.Popen:
        """Starts a command, whose output is appended to a file."""
        with open(log, "a") as file:
            process = subprocess.Popen(
                command,
                env=os.environ | {_VARIABLE: "1"},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is not None:
            number = getattr(error, "number", signal.SIGINT)
            for process in self.started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        for process in self.started:
            process.wait()
            process.stdin.close()


def end_with_parent() -> None:
    """In a child of `run_process`: sends this process SIGTERM when its parent has ended.

    Also where the parent was killed by a signal that it cannot handle. On any system.
    """
    if not os.environ.pop(_VARIABLE, None):
        return
    source = os.dup(0)

    def watch():
        while os.read(source, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
