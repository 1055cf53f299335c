"""Output of `reproduce`: a line for each experiment, and meanwhile the running ones and their
times.

In a terminal the last lines show the running experiments and are redrawn; otherwise one line shows
them, after a while without other lines. The remaining time follows from the CPU seconds that the
runs took on the machine of docs/results/runs.csv, and from how much slower the finished runs were.
"""

import contextlib
import csv
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from experiments import verdicts
from experiments.lab import progress
from rank_collapse.printed import format_one_line
from rank_collapse.report.page import format_number

TIMES = Path(__file__).with_name("times.csv")  # CPU seconds of each run of the presets
USUAL_SECONDS = 30.0  # of a run that the table does not have
SECONDS_TO_READ = 5.0  # of a run that is complete
LEAST_LEFT = 0.2  # of the time that a run has taken which takes longer than expected


def read_times(preset: str) -> dict[str, float]:
    """Reads {run: CPU seconds} of a preset."""
    with TIMES.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["preset"] == preset]
    return {row["run"]: float(row["cpu_seconds"]) for row in rows}


class Screen(contextlib.ExitStack):
    """The lines about a number of runs. A context manager.

    Args:
        expected: {run: expected CPU seconds}, in the order in which they run.
        jobs: Runs at a time.
        folder: Folder that holds the run folders, whose logs show what a run does.
    """

    def __init__(self, expected: Mapping[str, float], jobs: int, folder: Path):
        super().__init__()
        self._expected, self._jobs, self._folder = dict(expected), jobs, folder
        self._seconds: dict[str, float] = {}  # of runs that have ended
        self._computed: list[str] = []  # those of them that have a time to learn from
        self._begun: dict[str, float] = {}  # when each running one began, by `time.monotonic`
        self._start = self._last_line = time.monotonic()
        self._is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self._num_drawn, self._lock = 0, threading.RLock()

    def __enter__(self) -> "Screen":
        """Begins to draw."""
        super().__enter__()
        self._list_running()
        seconds = progress.REDRAWN if self._is_terminal else progress.SILENCE / 4
        self.callback(self._clear)
        self.enter_context(progress.repeat_until_done(self._draw, seconds))
        return self

    def end(self, run: str, seconds: float) -> None:
        """Notes that a run has ended.

        Args:
            run: Name of the run.
            seconds: Duration in seconds; 0 if unknown.
        """
        with self._lock:
            self._seconds[run] = seconds
            if seconds and self._expected[run] != SECONDS_TO_READ:
                self._computed.append(run)
            self._begun.pop(run, None)
            self._list_running()

    def say(self, line: str) -> None:
        """Prints a line above the lines of the running experiments."""
        with self._lock:
            self._clear()
            width = shutil.get_terminal_size().columns - 1
            print(line[:width] if self._is_terminal else line, flush=True)
            self._last_line = time.monotonic()
            if self._is_terminal:
                self._draw()

    def seconds_left(self) -> float:
        """Estimates the seconds until all runs have ended.

        Expected CPU times are multiplied by how much slower the ended runs were than expected, and
        divided by the number of runs side by side.
        """
        taken = USUAL_SECONDS + sum(self._seconds[run] for run in self._computed)
        expected = USUAL_SECONDS + sum(self._expected[run] for run in self._computed)
        slowdown = taken / expected
        remaining = [0.0]  # seconds of each run that has not ended
        for run, cpu_seconds in self._expected.items():
            if run in self._seconds:
                continue
            seconds = cpu_seconds * slowdown
            if run in self._begun:
                elapsed = time.monotonic() - self._begun[run]
                seconds = max(seconds - elapsed, LEAST_LEFT * elapsed)
            remaining.append(seconds)
        return max(sum(remaining) / self._jobs, max(remaining))

    def _list_running(self):
        """Lists the runs at work: as many of the first unfinished ones as there are jobs."""
        running = [run for run in self._expected if run not in self._seconds][: self._jobs]
        for run in running:
            self._begun.setdefault(run, time.monotonic())
        return running

    def _describe_total(self):
        """Writes "4 of 16 runs in 01:20, about 03:10 left"."""
        elapsed, remaining = (
            progress.Progress.format_interval(seconds)
            for seconds in (time.monotonic() - self._start, self.seconds_left())
        )
        count = f"{len(self._seconds)} of {len(self._expected)} runs"
        return f"{count} in {elapsed}, about {remaining} left"

    def _clear(self):
        """Deletes the lines of the running experiments."""
        if self._num_drawn:
            print(f"\x1b[{self._num_drawn}A\x1b[J", end="", file=sys.stderr, flush=True)
            self._num_drawn = 0

    def _draw(self):
        """Draws the lines of the running experiments; outside a terminal, one line after a
        silence."""
        with self._lock:
            running = {
                run: progress.read_activity(self._folder / run) for run in self._list_running()
            }
            if self._is_terminal:
                width = shutil.get_terminal_size().columns - 1
                lines = [f"  {run:22s} {text}"[:width] for run, text in running.items()]
                lines.append(f"  {self._describe_total()}"[:width])
                self._clear()
                print("\n".join(lines), file=sys.stderr, flush=True)
                self._num_drawn = len(lines)
            elif time.monotonic() - self._last_line > 0.7 * progress.SILENCE:
                texts = [self._describe_total(), *(f"{r}: {text}" for r, text in running.items())]
                print("  " + "; ".join(texts), file=sys.stderr, flush=True)
                self._last_line = time.monotonic()


def describe_number(section: verdicts.Section) -> str:
    """Writes one number of an experiment, with the published one if it exists.

    A published number comes before words, and words before a number that should be 0. Without any
    comparison it is the first statistic of a statement.

    Args:
        section: Section of the report.
    """

    def rank(comparison):
        """Ranks a comparison: 3 with a published number, 2 with a text, 1 with 0, 0 without."""
        published = comparison.published
        if published is None or published == 0:
            return int(published is not None)
        return 3 if isinstance(published, int | float) else 2

    if section.comparisons:
        number = replace(max(section.comparisons, key=rank), note="")
        return verdicts.comparison_line(number)
    for row in section.claims:
        if row.estimate is not None:
            text = verdicts.STATEMENTS[row.key].statistic
            return f"{text}, {row.setting}: {format_number(row.estimate)}"
    return "it has no number"


def describe_ended(place: str, section: verdicts.Section, cpu_seconds: float) -> str:
    """Writes the line of an experiment: its name, CPU seconds, and one number.

    Args:
        place: Place in the order, such as "3/16".
        section: Section of the report.
        cpu_seconds: CPU seconds of its runs.
    """
    result = describe_number(section)
    if section.error:
        lines = section.error.splitlines()
        reasons = [line for line in lines if line.startswith("error: ")]  # what its command printed
        reason = reasons[-1].removeprefix("error: ") if reasons else lines[0]
        result = f"failed: {format_one_line(reason)}"
    return f"{place:>5s} {section.name:20s} {cpu_seconds:5.0f} s CPU  {result}"
