"""Progress of a long computation: a bar in a terminal, plain lines otherwise.

Steps are where a run that was asked to end does so: see `signals`.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import jax

from experiments.shell import signals

BAR = 24


class Progress:
    """Reports steps done, values such as the loss, and the remaining time. A context manager.

    Args:
        total: Steps in all.
        label: What is done.
        log: Called with each plain line too, such as `RunFolder.log`.
        stream: Where to write; standard error by default.
        interval: Seconds between plain lines at least.
    """

    def __init__(
        self,
        total: int,
        label: str,
        *,
        log: Callable[[str], None] | None = None,
        stream: TextIO | None = None,
        interval: float = 5.0,
    ):
        self.total, self.label, self.log, self.interval = total, label, log, interval
        self.stream = sys.stderr if stream is None else stream
        self._terminal, self._silent = self.stream.isatty(), jax.process_index() != 0
        self._started = self._last = time.monotonic()
        self.first = self.done = self._aside = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._terminal and not self._silent:
            print(file=self.stream)
        if kind is None:
            signals.check()

    def skip(self, steps: int) -> None:
        """These steps were done by an earlier run: they do not count in the speed."""
        self.first += steps
        self.done += steps

    def advance(self, steps: int = 1, **values: float) -> None:
        """`update` by the number of further steps."""
        self.update(self.done + steps, **values)

    def update(self, done: int, **values: float) -> None:
        """`done` steps of the total are done; `values` (loss=0.3) are shown beside.

        Values must be host floats already: reading a device array here would make the device wait.
        """
        self.done, now = done, time.monotonic()
        elapsed, steps = now - self._started - self._aside, done - self.first
        shown = " ".join([f"{done}/{self.total}", *(f"{n} {v:.4g}" for n, v in values.items())])
        if done >= self.total:
            shown += f", {duration(elapsed)}"
        elif steps > 0:
            shown += f", {duration(elapsed / steps * (self.total - done))} left"
        if self._terminal and not self._silent:
            filled = round(BAR * done / max(self.total, 1))
            bar = "█" * filled + "·" * (BAR - filled)
            print(f"\r\x1b[K{self.label} {bar} {shown}", end="", file=self.stream, flush=True)
        if done >= self.total or now - self._last >= self.interval:
            self._last = now
            self.say(shown, terminal=False)
        signals.check()

    def say(self, message: str, terminal: bool = True) -> None:
        """One line, in the log and where progress is written."""
        line = f"{self.label}: {message}"
        if self.log is not None and not self._silent:
            self.log(line)
        if not self._silent and (terminal or not self._terminal):
            print(("\r\x1b[K" if self._terminal else "") + line, file=self.stream, flush=True)

    @contextlib.contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Reports the time of something that is no step, such as compiling."""
        start = time.monotonic()
        yield
        taken = time.monotonic() - start
        self._aside += taken
        self.say(f"{what} took {duration(taken)}")


def duration(seconds: float) -> str:
    """ "4.2 s", "3 min 05 s" or "2 h 10 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
