"""Child processes that end with this one, however this one ends."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from experiments.shell import signals

# Set in a child of `run_processes`: its standard input ends when its parent does.
ENDS_WITH_STDIN = "RANK_COLLAPSE_ENDS_WITH_STDIN"
_GRACE = 30  # seconds to save what is finished


class Ended(NamedTuple):
    """How a process ended: its exit code, all it printed, and the seconds it took."""

    code: int
    printed: str
    seconds: float


class _Child(NamedTuple):
    process: subprocess.Popen
    lines: list[str]
    started: float


def run_processes(
    commands: Mapping[str, Sequence[str]], at_once: int, ended: Callable[[str, Ended], None]
) -> None:
    """Runs commands in their order, some at a time, passing on what they print as it comes.

    Ctrl-C, SIGTERM and SIGHUP are passed on to the commands that run and to all these have started;
    they have ended when the signal is raised here. Where this process is killed, a binary of ours
    stops too, see `end_with_parent`.

    Args:
        commands: By name, which heads what a command prints.
        at_once: How many run side by side.
        ended: Called with the name of each that has ended, as it ends.
    """
    waiting, running = list(commands), {}
    # (name, line), and (name, None) at the end: a thread a child, since one may print while
    # another is silent. Only this thread starts children and waits for them.
    printed: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
    with signals.stopping():
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    name = waiting.pop(0)
                    number = len(commands) - len(waiting)
                    print(f"[{number}/{len(commands)}] {name}", file=sys.stderr, flush=True)
                    with signals.deferred():  # a child that no list holds could not be ended
                        running[name] = _start(name, commands[name], printed)
                signals.check()
                name, line = printed.get()
                if line is not None:
                    running[name].lines.append(line)
                    head = f"{name}: " if at_once > 1 else ""
                    print(f"    {head}{line}", end="", file=sys.stderr, flush=True)
                    continue
                code = running[name].process.wait()
                child = running.pop(name)
                child.process.stdin.close()
                seconds = time.monotonic() - child.started
                ended(name, Ended(code, "".join(child.lines), seconds))
        except (KeyboardInterrupt, signals.Stopped) as asked:
            for child in running.values():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(child.process.pid, getattr(asked, "number", signal.SIGINT))
            for child in running.values():
                child.process.wait()
            raise
        finally:
            for child in running.values():
                child.process.stdin.close()


def _start(name, command, printed):
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        env=os.environ | {ENDS_WITH_STDIN: "1"},
        stdin=subprocess.PIPE,  # nothing is written: no other process holds its other end
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches it once, from here
    )

    def read():
        with process.stdout:
            for line in process.stdout:
                printed.put((name, line))
        printed.put((name, None))

    threading.Thread(target=read, daemon=True).start()
    return _Child(process, [], started)


def end_with_parent() -> None:
    """In a child of `run_processes`: sends this process SIGTERM when its parent has ended.

    Also where the parent was killed by a signal that it cannot handle. On any system.
    """
    if not os.environ.pop(ENDS_WITH_STDIN, None):
        return
    source = os.dup(0)

    def watch():
        while os.read(source, 1024):
            pass
        if not signals.asked():  # a second signal would end it at once
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
