"""Progress of a long computation, and where it ends if a signal asks: at the next step.

A first SIGINT, SIGTERM or SIGHUP waits until then, so that finished work is saved; a second ends
the process at once.
"""

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_signals_received: list[int] = []  # by this process, which has one set of handlers
_signal_read = threading.Event()


class Stopped(SystemExit):
    """A signal asked this process to end; the exit code is 128 + its number, as a shell has it."""


def stop_requested() -> bool:
    """Returns whether a signal has asked this process to end."""
    return bool(_signals_received)


def note_signal(number: int, *_: Any) -> None:
    """Notes a signal for `raise_if_stopped`; as a handler, of a worker that may have no work."""
    _signals_received.append(number)


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
    previous_fd = signal.set_wakeup_fd(writer)
    threading.Thread(target=_read_signals, args=(reader,), daemon=True).start()
    for number in handlers:  # only while there is a reader: without one they would wait for ever
        signal.signal(number, lambda *_: _signal_read.wait())
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        os.close(writer)
        _signals_received.clear()
        _signal_read.clear()


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


class _Lines(io.TextIOBase):
    """A stream that prints and logs each drawing of a bar as a line."""

    def __init__(self, log: Callable[[str], None]):
        self._log = log

    def write(self, text: str) -> int:
        if line := text.strip():
            print(line, file=sys.stderr)
            self._log(line)
        return len(text)


class Progress(tqdm):
    """A bar in a terminal; otherwise plain lines, which are logged too.

    Args:
        total: Steps in all; 0 shows nothing.
        label: Name of the computation.
        log: Called with each plain line, such as `RunFolder.log`.
        interval: Seconds between plain lines.
    """

    def __init__(
        self,
        total: int,
        label: str,
        *,
        log: Callable[[str], None] = lambda line: None,
        interval: float = 5.0,
    ):
        options: dict[str, Any] = {}
        if not sys.stderr.isatty():
            options = {"file": _Lines(log), "mininterval": interval, "delay": 1e-6}
            options["bar_format"] = (
                "{desc}: {n_fmt}/{total_fmt}{postfix}, {elapsed}, {remaining} left"
            )
        super().__init__(total=total, desc=label, disable=total == 0, **options)
        self.label, self.log = label, log

    def skip(self, steps: int) -> None:
        """Counts steps of an earlier run, which do not enter the speed."""
        if not self.disable:
            self.initial += steps
            self.n += steps

    def advance(self, steps: int = 1, **values: float) -> None:
        """Counts further steps, and shows values (loss=0.3) after the count.

        Args:
            steps: Steps that were done.
            **values: Shown after the count.

        Raises:
            Stopped: A signal has asked for it.
        """
        self.set_postfix({n: f"{v:.4g}" for n, v in values.items()}, refresh=False)
        self.update(steps)
        raise_if_stopped()

    def reach(self, steps: int, **values: float) -> None:
        """Advances to a number of steps."""
        self.advance(steps - self.n, **values)

    def say(self, message: str) -> None:
        """Writes one line, in the log and above the bar."""
        self.log(f"{self.label}: {message}")
        self.write(f"{self.label}: {message}", file=sys.stderr)

    @contextlib.contextmanager
    def time_activity(self, activity: str) -> Iterator[None]:
        """Says how long an activity took that is no step, such as compiling."""
        start = time.monotonic()
        yield
        if not self.disable:
            self.start_t += time.monotonic() - start
            self.say(f"{activity} took {self.format_interval(time.monotonic() - start)}")
