"""Progress of a long computation, and where it ends if a signal asks: at the next step.

A first SIGINT, SIGTERM or SIGHUP is kept until then, so that what is done is saved; a second ends
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
_asked: list[int] = []  # of this process: it has one set of handlers
_heard = threading.Event()


class Stopped(SystemExit):
    """A signal asked this process to end; the exit code is 128 + its number, as a shell has it."""


def stop_requested() -> bool:
    """Whether a signal has asked this process to end."""
    return bool(_asked)


def raise_if_stopped() -> None:
    """Raises `Stopped` where a signal has asked for it."""
    if _asked:
        raise Stopped(128 + _asked[0])


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """Signals are handled as above meanwhile; one that is ignored stays so, as SIGHUP in nohup.

    They are read in a thread: a handler of Python waits until a call of XLA returns.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    earlier = {n: signal.getsignal(n) for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN}
    for number in earlier:
        signal.signal(number, lambda *_: _heard.wait())
    before = signal.set_wakeup_fd(writer)
    threading.Thread(target=_read_signals, args=(reader,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        _asked.clear()
        _heard.clear()
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _read_signals(reader):
    while content := os.read(reader, 1):
        if _asked:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + content[0])
        _asked.append(content[0])
        if multiprocessing.parent_process() is None:
            os.write(2, b"\nstopping after this chunk; again to stop at once\n")
        _heard.set()
    os.close(reader)


class _Lines(io.TextIOBase):
    """Of a bar that is drawn again and again, each drawing as a line of its own."""

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
        total: Steps in all.
        label: What is done.
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
        how: dict[str, Any] = {}
        if not sys.stderr.isatty():
            how = {"file": _Lines(log), "mininterval": interval, "delay": 1e-6}
            how["bar_format"] = "{desc}: {n_fmt}/{total_fmt}{postfix}, {elapsed}, {remaining} left"
        super().__init__(total=total, desc=label, disable=total == 0, **how)
        self.label, self.log = label, log

    def skip(self, steps: int) -> None:
        """These steps were done by an earlier run: they do not count in the speed."""
        self.initial += steps
        self.n += steps

    def advance(self, steps: int = 1, **values: float) -> None:
        """Further steps are done; `values` (loss=0.3) are shown beside."""
        self.set_postfix({n: f"{v:.4g}" for n, v in values.items()}, refresh=False)
        self.update(steps)
        raise_if_stopped()

    def reach(self, done: int, **values: float) -> None:
        """`advance` to a number of steps."""
        self.advance(done - self.n, **values)

    def say(self, message: str) -> None:
        """One line, in the log and above the bar."""
        self.log(f"{self.label}: {message}")
        self.write(f"{self.label}: {message}", file=sys.stderr)

    @contextlib.contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Says how long something took that is no step, such as compiling."""
        start = time.monotonic()
        yield
        self.start_t += time.monotonic() - start
        self.say(f"{what} took {self.format_interval(time.monotonic() - start)}")
