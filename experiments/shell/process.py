"""A child process that ends with this one, however this one ends."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

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
