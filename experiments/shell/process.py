"""A child process that ends when this one is asked to."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence


class Stopped(SystemExit):
    """A signal asked this process to end; the exit code is 128 + its number, as a shell has it."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


@contextlib.contextmanager
def stopping(numbers: Sequence[int] = (signal.SIGTERM, signal.SIGHUP)) -> Iterator[None]:
    """These signals raise `Stopped` meanwhile, as Ctrl-C raises KeyboardInterrupt.

    One that is ignored, as SIGHUP under nohup, stays ignored.
    """

    def stop(number, _):
        raise Stopped(number)

    earlier = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    for number in earlier:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def run_process(command: Sequence[str]) -> tuple[int, str]:
    """Runs a command, passing on what it prints as it comes; (exit code, all it printed).

    Ctrl-C, SIGTERM and SIGHUP are passed on to the command and all it has started; it has ended
    when they are raised here.
    """
    lines = []
    with (
        stopping(),
        subprocess.Popen(
            command,
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
