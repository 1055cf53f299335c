"""The rows of what is watched: their alarms, their way to a log, and why something is left out.

A row is {"step": .., name: a number, or a list with one for each layer}.
"""

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rank_collapse.measures.table import COLLAPSE
from rank_collapse.report.alarms import Alarm, find_alarms
from rank_collapse.runs import metrics

WANDB_STEP = "watch/step"
ATTEMPTS = 3  # steps in a row with a failure, after which a measure is not tried again
_log = logging.getLogger("rank_collapse")


@runtime_checkable
class ScalarWriter(Protocol):
    """A writer of scalars, such as TensorBoard's SummaryWriter."""

    def add_scalar(self, name: str, value: float, step: int, /) -> Any:
        """Writes a number."""


Log = Callable[..., Any] | str | Path | ScalarWriter | None


class LeftOut(ValueError):
    """What is not measured here; the text says why."""


class Notes:
    """Reasons by the dotted name of a module, or None, and by what is left out.

    Attributes:
        reasons: {(name, subject): reason}, the last of each.
    """

    def __init__(self):
        self.reasons: dict[tuple[str | None, str], str] = {}
        self._said: set[str] = set()
        self._failures: dict[tuple[str | None, str], set[int]] = {}  # steps of each, in a row
        self._step = 0

    def begin_step(self) -> None:
        """Begins a step: all failures of one measure in it, such as of several heads, are one."""
        self._step += 1

    def attempt(
        self,
        name: str | None,
        subject: str,
        measure: Callable[..., Any],
        *args: Any,
        attempts: float = ATTEMPTS,
    ) -> Any:
        """Calls measure(*args); None where it fails, which becomes a reason.

        After another error than `LeftOut`, such as one of memory, it is tried again, until it
        failed in so many steps in a row.

        Args:
            name: Dotted name of the module, or None.
            subject: What is measured, for the message.
            measure, *args: What is called.
            attempts: In how many steps in a row it may fail.
        """
        key = name, subject
        if len(self._failures.get(key, ())) >= attempts:
            return None
        try:
            result = measure(*args)
        except LeftOut as error:
            self.leave_out(name, subject, str(error))
            return None
        except Exception as error:
            self._failures.setdefault(key, set()).add(self._step)
            self.leave_out(name, subject, f"{type(error).__name__}: {error}")
            return None
        self._failures.pop(key, None)
        self.reasons.pop(key, None)
        return result

    def leave_out(self, name: str | None, subject: str, reason: str) -> None:
        """Keeps a reason; the first time that it comes it is also a warning.

        Args:
            name, subject: As `attempt` takes them.
            reason: Why it is not measured.
        """
        self.reasons[name, subject] = reason
        if reason not in self._said:
            self._said.add(reason)
            self.warn(f"watch: no {subject}{f' of {name}' if name else ''}: {reason}")

    def warn(self, text: Any) -> None:
        """Writes a warning to the logger `rank_collapse`, whose handlers may raise."""
        with contextlib.suppress(Exception):
            _log.warning("%s", text)


class Recorder:
    """Rows, their alarms, and where they go.

    Args:
        log: A path of JSON lines, or its folder; a function log({name: number}, step=...); an
            object with `add_scalar`, as TensorBoard's writers; None for `rows` alone.
        notes: Where what fails is kept.

    Raises:
        ValueError: Another log, or a path that cannot be one.
    """

    def __init__(self, log: Any, notes: Notes):
        self.rows: list[dict[str, Any]] = []
        self.alarms: list[Alarm] = []
        self._log, self._notes = _check_log(log), notes

    def add(
        self, step: int, scalars: Mapping[str, Mapping[int, float]], count: int, writes: bool = True
    ) -> None:
        """Records the row of a step: warns of new alarms, and writes it.

        Args:
            step: Of training.
            scalars: {name: {number of a layer, or -1 for all of them: value}}.
            count: How many layers there are.
            writes: Whether this process warns and writes.
        """
        row: dict[str, Any] = {"step": step}
        for name, by_layer in scalars.items():
            values = [by_layer.get(i, math.nan) for i in range(count)]
            row[name] = by_layer.get(-1, values)
        self.rows.append(row)
        if not writes:
            return
        earlier = {(alarm.metric, alarm.threshold) for alarm in self.alarms}
        for alarm in find_alarms([row], COLLAPSE):
            if (alarm.metric, alarm.threshold) not in earlier:
                self.alarms.append(alarm)
                self._notes.warn(alarm)
        values = {name: value for name, value in row.items() if name != "step"}
        arguments = None, "line of the log", self._write, step, values
        self._notes.attempt(*arguments, attempts=math.inf)  # a disk may be full for a while

    def _write(self, step, values):
        log = self._log
        if isinstance(log, Path):
            metrics.append(log, step, values)
        elif hasattr(log, "add_scalar"):
            for name, value in flatten_row(values):
                log.add_scalar(name, value, step)
        elif log is not None and (getattr(log, "__module__", None) or "").startswith("wandb"):
            # wandb drops what comes with a step below its own, which its other callers count up
            sys.modules["wandb"].define_metric("watch/*", step_metric=WANDB_STEP)
            log({f"watch/{name}": v for name, v in flatten_row(values)} | {WANDB_STEP: step})
        elif log is not None:
            log(dict(flatten_row(values)), step=step)


def _check_log(log):
    """Returns a log: a path of a file, a function, a writer, or None."""
    if isinstance(log, str | Path):
        try:
            path = Path(log) / metrics.NAME if Path(log).is_dir() else Path(log)
            path.exists()
        except (OSError, ValueError) as error:
            raise ValueError(f"log={str(log)[:40]!r}... is not a path: {error}") from error
        return path
    if log is not None and not callable(log) and not hasattr(log, "add_scalar"):
        raise ValueError(f"log={log!r} is not a function, a path, or a writer with add_scalar")
    return log


def flatten_row(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields (name, number) of a row, by layer "name/layer_3"; without gaps."""
    for name, value in values.items():
        if isinstance(value, list):
            yield from ((f"{name}/layer_{i}", v) for i, v in enumerate(value) if not math.isnan(v))
        else:
            yield name, value
