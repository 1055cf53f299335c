"""The rows of a watch: their alarms, their way to a log, and the reasons for missing metrics.

A row is {"step": .., name: a number, or a list with one for each layer}.
"""

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rank_collapse.measures.table import COLLAPSE
from rank_collapse.report.alarms import Alarm, find_alarms
from rank_collapse.runs import metrics

WANDB_STEP = "watch/step"
_log = logging.getLogger("rank_collapse")


class LeftOut(ValueError):
    """Raised for a metric that cannot be measured here; the text gives the reason."""


class Notes:
    """Reasons by the dotted name of a module, or None, and by the metric that is left out.

    Attributes:
        reasons: {(name, subject): a sentence}, the last of each.
    """

    def __init__(self):
        self.reasons: dict[tuple[str | None, str], str] = {}
        self._said: set[str] = set()

    def attempt(
        self, name: str | None, subject: str, measure: Callable[..., Any], *args: object
    ) -> Any:
        """Calls measure(*args); None where it fails, which becomes a reason.

        Args:
            name: Dotted name of the module, or None.
            subject: Name of the measurement, for the message.
            measure, *args: Function and its arguments.
        """
        try:
            result = measure(*args)
        except Exception as error:
            kind = "" if isinstance(error, LeftOut) else f"{type(error).__name__}: "
            self.leave_out(name, subject, f"{kind}{error}")
            return None
        self.reasons.pop((name, subject), None)
        return result

    def leave_out(self, name: str | None, subject: str, reason: str) -> None:
        """Keeps a reason; the first of its kind (the text before a colon) is also a warning.

        Args:
            name, subject: See `attempt`.
            reason: Why it is not measured.
        """
        self.reasons[name, subject] = f"no {subject}: {reason}"
        self._say(reason, f"no {subject}{f' of {name}' if name else ''}: {reason}")

    def remark(self, name: str | None, subject: str, text: str) -> None:
        """Keeps a sentence about the measurement; the first of its kind is also a warning.

        Args:
            name, subject: See `attempt`.
            text: The sentence.
        """
        self.reasons[name, subject] = text
        self._say(text, f"{name}: {text}" if name else text)

    def _say(self, reason, text):
        """Warns once for each kind of reason, which is the text before a colon."""
        kind = reason.partition(":")[0]  # texts of one error may differ, as those of no memory do
        if kind not in self._said:
            self._said.add(kind)
            self.warn(f"watch: {text}")

    def warn(self, text: object) -> None:
        """Writes a warning to the logger `rank_collapse`, whose handlers may raise."""
        with contextlib.suppress(Exception):
            _log.warning("%s", text)


class Recorder:
    """Rows, their alarms, and where they go.

    Args:
        log: A path of JSON lines, or its folder; a function log({name: number}, step=...); an
            object with `add_scalar`, as TensorBoard's writers; None for `rows` alone.
        notes: Notes that keep the reasons of failures.

    Raises:
        ValueError: An invalid log, or an invalid path.
    """

    def __init__(self, log: object, notes: Notes):
        self.rows: list[dict[str, Any]] = []
        self.alarms: list[Alarm] = []
        self._log, self._notes, self._process = _check_log(log), notes, os.getpid()

    def add(
        self, step: int, scalars: Mapping[str, Mapping[int, float]], count: int, writes: bool = True
    ) -> None:
        """Records the row of a step: warns of new alarms, and writes it.

        Args:
            step: Number of the training step.
            scalars: {name: {number of a layer, or -1 for all of them: value}}.
            count: Number of layers.
            writes: Whether this process warns and writes.
        """
        row: dict[str, Any] = {"step": step}
        for name, by_layer in scalars.items():
            values = [by_layer.get(i, math.nan) for i in range(count)]
            row[name] = by_layer.get(-1, values)
        self.rows.append(row)
        if not writes:
            return
        if os.getpid() != self._process:
            text = "this process was forked from the one that watches: its rows are in `rows` alone"
            self._notes.leave_out(None, "line of the log", text)
            return
        earlier = {(alarm.metric, alarm.threshold) for alarm in self.alarms}
        for alarm in find_alarms([row], COLLAPSE):
            if (alarm.metric, alarm.threshold) not in earlier:
                self.alarms.append(alarm)
                self._notes.warn(alarm)
        values = {name: value for name, value in row.items() if name != "step"}
        self._notes.attempt(None, "line of the log", self._write, step, values)

    def _write(self, step, values):
        """Writes the values of a step to the file, the writer, wandb or the function."""
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


def flatten_row(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yields (name, number) of a row, by layer "name/layer_3"; without gaps."""
    for name, value in values.items():
        if isinstance(value, list):
            yield from ((f"{name}/layer_{i}", v) for i, v in enumerate(value) if not math.isnan(v))
        else:
            yield name, value


TRAINER_METRICS = ("residual_ratio", "attention_entropy")  # which the Trainer prints


def summarise_layers(row: Mapping[str, object]) -> dict[str, float]:
    """Computes the mean over layers and the worst layer of the metrics that a Trainer prints.

    Args:
        row: Row of a watch. Each of its metrics is worst where it is smallest.

    Returns:
        {"name_mean_of_layers": .., "name_worst_layer": its number, "name_of_worst_layer": ..}.
    """
    scalars = {}
    for name in TRAINER_METRICS:
        by_layer = row.get(name, ())
        numbers = {i: value for i, value in enumerate(by_layer) if not math.isnan(value)}
        if numbers:
            worst = min(numbers, key=numbers.__getitem__)
            scalars[f"{name}_mean_of_layers"] = sum(numbers.values()) / len(numbers)
            scalars[f"{name}_of_worst_layer"] = numbers[worst]
            scalars[f"{name}_worst_layer"] = worst
    return scalars


def make_transformers_callback(watched: object) -> Any:
    """Makes a `transformers.TrainerCallback` that joins a watch and the Trainer.

    It sets the watch's step from the Trainer, and adds the watch's rows to the Trainer's log.

    Args:
        watched: The watch, which it closes at the end.
    """
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            """Tells the watch the number of the step that begins; the Trainer counts from 0."""
            watched.step = state.global_step + 1

        def on_log(self, args, state, control, logs=None, **kwargs):
            """Adds the last row to the Trainer's history, and a few of its numbers to `logs`."""
            if not watched.rows:
                return
            row = watched.rows[-1]
            by_layer = {name: values for name, values in row.items() if isinstance(values, list)}
            state.log_history[-1].update(flatten_row(by_layer))
            logs.update(summarise_layers(by_layer))

        def on_train_end(self, args, state, control, **kwargs):
            """Closes the watch."""
            watched.close()

    return Callback()
