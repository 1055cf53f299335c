"""The progress of a long computation: a line in a terminal, lines from time to time elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rank_collapse.printed import escape_text, print_lines


class Progress:
    """Shows the part that is done and the time left, on the standard error by default.

    Args:
        total: Number that the count reaches at the end.
        label: Name of the computation.
        quiet: Whether nothing is shown.
        stream: Stream that shows the line.
        interval: Seconds between two lines, by default a fifth in a terminal and 5 elsewhere.
    """

    def __init__(
        self,
        total: int,
        label: str,
        *,
        quiet: bool = False,
        stream: object = None,
        interval: float | None = None,
    ):
        self._stream = stream or sys.stderr
        self._total, self._label, self._quiet = total, label, quiet
        self._in_terminal = self._stream.isatty()
        self._interval = interval or (0.2 if self._in_terminal else 5.0)
        self._done = self._skipped = 0
        self._begun = self._shown = time.monotonic()
        self._width = 0

    def skip(self, count: int) -> None:
        """Count what an earlier call did, which does not enter the speed."""
        self._done += count
        self._skipped += count

    def advance(self, count: int, describe: Callable[[], str] = str) -> None:
        """Count a finished step, and show values after it.

        Args:
            count: Done since the last time.
            describe: Returns the values, such as "loss 0.31"; called only where they are shown.
        """
        self._done += count
        now = time.monotonic()
        if now - self._shown >= self._interval or self._done >= self._total:
            self._shown = now
            if not self._quiet:
                self._show(self._describe(now, describe()))

    def say(self, message: str) -> None:
        """Write a line that stays."""
        if not self._quiet:
            self._clear()
            print_lines(f"{self._label}: {message}", file=self._stream, flush=True)

    @contextlib.contextmanager
    def time_activity(self, activity: str) -> Iterator[None]:
        """Report how long an activity without steps took, such as compiling; it does not enter the
        speed."""
        begun = time.monotonic()
        yield
        seconds = time.monotonic() - begun
        self._begun += seconds
        if seconds >= 1:
            self.say(f"{activity} took {format_seconds(seconds)}")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:  # the line of a terminal
            print_lines("", file=self._stream, flush=True)
            self._width = 0

    def _describe(self, now, values):
        """Return the share that is done, the values, the time taken and the time left."""
        elapsed, fresh = now - self._begun, self._done - self._skipped
        share = self._done / max(self._total, 1)
        seconds_left = elapsed * (self._total - self._done) / max(fresh, 1)
        parts = [f"{share:4.0%}", values, format_seconds(elapsed)]
        parts += [f"{format_seconds(seconds_left)} left"] if self._done < self._total else []
        return ", ".join(filter(None, parts))

    def _show(self, line):
        """Print a line; in a terminal it replaces the last one."""
        line = escape_text(f"{self._label}: {line}")
        if self._in_terminal:
            self._stream.write(f"\r{line:<{self._width}}")
            self._stream.flush()
            self._width = len(line)
        else:
            print_lines(line, file=self._stream, flush=True)

    def _clear(self):
        if self._width:
            self._stream.write(f"\r{'':<{self._width}}\r")
            self._width = 0


def format_seconds(seconds: float) -> str:
    """Write a time as 0.4 s, 12 s, 3:05 or 2:03:05."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
