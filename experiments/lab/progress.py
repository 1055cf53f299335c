"""Progress of a long computation, and its end after a signal: at the next step.

A computation is never silent for longer than `SILENCE`: where it has no step to report, a thread
reports the activity and its duration. Compiling is named, and does not enter the remaining time.

A first SIGINT, SIGTERM or SIGHUP waits until then, so that finished work is saved; a second ends
the process at once. A step is what `Progress` counts: a chunk of seeds, an epoch of training, a
network or a point. Between two points, and before the first step, the process ends soon.
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
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rank_collapse.printed import format_one_line

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SILENCE = 10.0  # most seconds between two plain lines
REDRAWN = 1.0  # seconds between two drawings of a bar in a terminal
TAIL_BYTES = 2000  # of a log
_signals_received: list[int] = []  # by this process, which has one set of handlers
_signal_read = threading.Event()


class Stopped(SystemExit):
    """A signal asked this process to end; the exit code is 128 + its number, as in a shell."""


def stop_requested() -> bool:
    """Returns whether a signal has asked this process to end."""
    return bool(_signals_received)


def note_signal(number: int, *_: Any) -> None:
    """Notes a signal for `raise_if_stopped`; as a handler, in a worker that may have no work."""
    _signals_received.append(number)


def raise_if_stopped() -> None:
    """Raises `Stopped` if a signal has asked for it."""
    if _signals_received:
        raise Stopped(128 + _signals_received[0])


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """Handles signals as above inside the block; ignored signals stay ignored, such as SIGHUP in
    nohup.

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
                os.write(2, b"\nstopping at the next step; again to stop at once\n")
    os.close(reader)


def print_line(line: str, log: Callable[[str], None]) -> None:
    """Prints a line on stderr, and logs it."""
    print(line, file=sys.stderr, flush=True)
    log(line)


@contextlib.contextmanager
def repeat_until_done(report: Callable[[], None], seconds: float) -> Iterator[None]:
    """Calls a function without arguments at regular intervals inside the block, from a thread.

    Args:
        report: The function; it returns at once.
        seconds: Time between two calls, and before the first.
    """
    done = threading.Event()

    def repeat():
        while not done.wait(seconds):
            with contextlib.suppress(OSError, ValueError):  # of a terminal that is gone
                report()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def report_activity(
    activity: str, log: Callable[[str], None] = lambda line: None
) -> Iterator[None]:
    """Reports an activity and its duration, where it takes longer than `SILENCE`.

    Args:
        activity: Name of the activity, such as "drawing figures".
        log: Function that is called with each line.
    """
    start = time.monotonic()

    def report():
        print_line(f"{activity}, {tqdm.format_interval(time.monotonic() - start)}", log)

    with repeat_until_done(report, SILENCE):
        yield


def read_activity(folder: Path) -> str:
    """Reads the activity of a run: the last line of its log, without the time; "starting" without
    one.

    Args:
        folder: Folder of the run.
    """
    path = folder / "log.txt"
    if not path.is_file():
        return "starting"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return format_one_line(lines[-1][20:]) if lines else "starting"


class _Lines(io.TextIOBase):
    """A stream that prints and logs each drawing of a bar as a line."""

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self.last = time.monotonic()

    def write(self, text: str) -> int:
        """Prints a line of the bar and returns the number of characters, as files do."""
        if line := text.strip():
            print_line(line, self._log)
            self.last = time.monotonic()
        return len(text)


class Progress(tqdm):
    """A bar in a terminal; otherwise plain lines, which are logged too. A context manager.

    Args:
        total: Number of all steps; 0 shows nothing.
        label: Name of the computation.
        log: Called with each plain line, such as `RunFolder.log`.
        interval: Seconds between plain lines.
        details: Returns further text for a report after nearly `SILENCE` without a line.
    """

    def __init__(
        self,
        total: int,
        label: str,
        *,
        log: Callable[[str], None] = lambda line: None,
        interval: float = 5.0,
        details: Callable[[], str] = lambda: "",
    ):
        options: dict[str, Any] = {}
        self._lines = None if sys.stderr.isatty() else _Lines(log)
        if self._lines is not None:
            options = {"file": self._lines, "mininterval": interval, "delay": 1e-6}
            options["bar_format"] = (
                "{desc}: {n_fmt}/{total_fmt}{postfix}, {elapsed}, {remaining} left"
            )
        # Without smoothing the remaining time follows from all steps since the clock was started.
        super().__init__(total=total, desc=label, disable=total == 0, smoothing=0, **options)
        self.label, self.log, self._activity, self._details = label, log, "", details
        self._begun = time.monotonic()  # the activity, or counting
        self._reports = contextlib.ExitStack()
        if not self.disable:
            seconds = REDRAWN if self._lines is None else SILENCE / 4
            self._reports.enter_context(repeat_until_done(self._report, seconds))

    def close(self) -> None:
        """Draws the bar for the last time."""
        if hasattr(self, "_reports"):  # not so where `tqdm` itself was refused
            self._reports.close()
        super().close()

    def _report(self) -> None:
        """Redraws the bar; prints a line after nearly `SILENCE` without one."""
        if self._lines is None:
            if details := self._details():
                self.set_postfix_str(details, refresh=False)
            self.refresh()
        elif time.monotonic() - self._lines.last > SILENCE * 0.7:
            elapsed = self.format_interval(time.monotonic() - self._begun)
            doing = self._activity or f"{self.n}/{self.total}"
            texts = f"{self.label}: {doing}, {elapsed}", self._details()
            self._lines.write("; ".join(filter(None, texts)))

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
        if self._lines is not None:
            self._lines.last = time.monotonic()

    @contextlib.contextmanager
    def time_activity(self, activity: str) -> Iterator[None]:
        """Names an activity that is not a step, such as compiling, and reports how long it took.

        Its time does not enter the speed of the steps.

        Args:
            activity: Name of the activity.
        """
        start, outer = time.monotonic(), self._activity
        self._activity, self._begun = activity, start
        if not self.disable:
            self.set_description_str(f"{self.label}: {activity}", refresh=self._lines is None)
        try:
            yield
        finally:
            self._activity, self._begun = outer, time.monotonic()
            if not self.disable:
                self.set_description_str(self.label, refresh=False)
        if not self.disable:
            took = time.monotonic() - start
            if not outer:  # else its time is part of the outer activity's
                self.start_t += took
            self.say(f"{activity} took {self.format_interval(took)}")
