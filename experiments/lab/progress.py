"""Progress of a long computation, and where it ends if a signal asks: at the next step.

A first SIGINT, SIGTERM or SIGHUP waits until then, so that finished work is saved; a second ends
the process at once.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_signals_received: list[int] = []  # by this process, which has one set of handlers
_signal_read = threading.Event()


class Stopped(SystemExit):
    """A signal asked this process to end; the exit code is 128 + its number, as a shell has it."""


def stop_requested() -> bool:
    """Returns whether a signal has asked this process to end."""
    return bool(_signals_received)


def raise_if_stopped() -> None:
    """Raises `Stopped` if a signal has asked for it."""
    if _signals_received:
        raise Stopped(128 + _signals_received[0])


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """Handles signals as above meanwhile; an ignored one stays ignored, as SIGHUP in nohup.

    A thread reads them, because a Python handler waits until a call of XLA returns.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handlers = {n: signal.getsignal(n) for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN}
    for number in handlers:
        signal.signal(number, lambda *_: _signal_read.wait())
    previous_fd = signal.set_wakeup_fd(writer)
    threading.Thread(target=_read_signals, args=(reader,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        os.close(writer)
        _signals_received.clear()
        _signal_read.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _read_signals(reader):
    """Notes the first signal; at the second, kills the workers and ends this process."""
    while content := os.read(reader, 1):
        if _signals_received:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + content[0])
        _signals_received.append(content[0])
        _signal_read.set()
        if multiprocessing.parent_process() is None:
            with contextlib.suppress(OSError):  # of a terminal that is gone
                os.write(2, b"\nstopping after this chunk; again to stop at once\n")
    os.close(reader)


class Progress:
    """Counts the steps of a computation; every few seconds a line says how far it is.

    Args:
        total: Steps in all; 0 shows nothing.
        label: Name of the computation.
        log: Called with each line, such as `RunFolder.log`.
        interval: Seconds between lines.

    Attributes:
        done: Steps so far.
    """

    def __init__(
        self,
        total: int,
        label: str,
        *,
        log: Callable[[str], None] = lambda line: None,
        interval: float = 5.0,
    ):
        self.total, self.label, self._log, self._interval = total, label, log, interval
        self.done, self._last_line = 0, time.monotonic()

    def skip(self, steps: int) -> None:
        """Counts steps of an earlier run."""
        self.done += steps

    def advance(self, steps: int = 1, **values: float) -> None:
        """Counts further steps, and shows values (loss=0.3) after the count.

        Args:
            steps: Steps that were done.
            **values: Shown after the count.

        Raises:
            Stopped: A signal has asked for it.
        """
        self.done += steps
        is_due = self.done >= self.total or time.monotonic() - self._last_line >= self._interval
        if self.total and is_due:
            self._last_line = time.monotonic()
            texts = [f"{name}={value:.4g}" for name, value in values.items()]
            self.say(", ".join([f"{self.done}/{self.total}", *texts]))
        raise_if_stopped()

    def say(self, message: str) -> None:
        """Writes one line, which is logged too."""
        line = f"{self.label}: {message}"
        print(line, file=sys.stderr)
        self._log(line)

    @contextlib.contextmanager
    def time_activity(self, activity: str) -> Iterator[None]:
        """Says how long an activity took that is no step, such as compiling."""
        start = time.monotonic()
        yield
        self.say(f"{activity} took {time.monotonic() - start:.1f} s")
