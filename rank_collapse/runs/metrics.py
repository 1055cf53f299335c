"""Scalars of a run while it runs: metrics.jsonl, a JSON object a line, appended.

    append("run/metrics.jsonl", 120, {"loss": 2.1, "residual_ratio": [0.9, 0.7]}, seed=0)

    {"step": 120, "seed": 0, "loss": 2.1, "residual_ratio": [0.9, 0.7]}

Any program can write such a file, and `rank-collapse watch` draws it.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rank_collapse.checks import refuse_if
from rank_collapse.regular import read_regular
from rank_collapse.runs.files import RunError, make_folder, open_log, write_atomically

NAME = "metrics.jsonl"
FOLDER = "metrics"  # of a run of several networks: a file for each, metrics/<network>.jsonl


def append(
    path: str | os.PathLike, step: int, values: Mapping[str, object], *, seed: int | None = None
) -> None:
    """Append the line of one step.

    Args:
        path: The file; made if absent, with its folder. A line that an interrupted run left
            unfinished is ended.
        step: Number of the step, epoch or token, as the run counts.
        values: Numbers by name, or arrays [l] with one for each layer. NaN is written as null and
            infinity as "Infinity" or "-Infinity", since JSON has no numbers for them.
        seed: Seed of the run in an ensemble.

    Raises:
        ValueError: A value that is neither a number nor a list of them; or a step between whole
            numbers, of which all but the last would be lost.
        RunError: The file cannot be written.
    """
    for name, number in (("step", step), ("seed", 0 if seed is None else seed)):
        is_whole = not isinstance(number, str | None) and float(number).is_integer()
        refuse_if(not is_whole, f"{name}={number!r} is not a whole number")
    refuse_if(
        not isinstance(values, Mapping),
        f"values={values!r:.80} is not a mapping from names to values",
    )
    line = {"step": int(step)} | ({} if seed is None else {"seed": int(seed)})
    for name, value in values.items():
        try:
            value = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"{name!r}={value!r:.80} is not a metric: a number, or [l]") from None
        if value.ndim > 1 or name in ("step", "seed"):
            raise ValueError(f"{name!r} of shape {value.shape} is not a metric: a number, or [l]")
        line[name] = [_to_json(v) for v in value] if value.ndim else _to_json(value)
    _append_line(path, line)


def drop(path: str | os.PathLike, seeds: Iterable[int], after: int = -1) -> None:
    """Delete the lines of some seeds that are of later steps, and those that are cut off.

    Args:
        path: The file; nothing is done where there is none.
        seeds: Seeds of the runs in an ensemble.
        after: The last step whose lines stay.

    Raises:
        RunError: The file cannot be read or written.
    """
    if not os.path.exists(path):
        return
    try:
        lines, seeds = read_regular(path).splitlines(keepends=True), set(seeds)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    remaining = [line for line in lines if not _is_later(line, seeds, after)]
    if len(remaining) < len(lines):
        write_atomically(path, b"".join(remaining))


def _is_later(line, seeds, after):
    """Return whether a line belongs to one of the seeds and a later step, or is cut off."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return True
    has_step = isinstance(row, dict) and type(row.get("step")) is int
    return has_step and row["step"] > after and row.get("seed", 0) in seeds


def _append_line(path, line):
    """Append a JSON line, after the end of a line that was cut off."""
    make_folder(Path(path).parent)
    with open_log(path) as file:
        file.seek(0, os.SEEK_END)
        ended = file.tell() == 0 or _last_byte(file) == b"\n"
        file.write((b"" if ended else b"\n") + json.dumps(line).encode() + b"\n")


def _to_json(value):
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return None if math.isnan(value) else float(value)


def _last_byte(file):
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Read the lines of a file in order of (seed, step); if a step was written twice, the last line
    counts.

    A run that resumes from a checkpoint writes some steps again. The function leaves out lines that
    are cut off (by a process that was killed while it wrote), lines without a whole number "step",
    and values that are not metrics, such as text. null is read as NaN.

    Args:
        path: The file.

    Returns:
        One dictionary for each line: "step", "seed" where there is one, numbers or arrays [l] by
        name.

    Raises:
        RunError: The file cannot be read, or none of its lines has metrics.
    """
    try:
        lines = read_regular(path).split(b"\n")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    skipped = 0
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # cut off
            continue
        try:
            step, seed = _read_integer(row["step"]), _read_integer(row.get("seed", 0))
        except (TypeError, KeyError, OverflowError):
            skipped += 1
            continue
        metrics = {name: _read_metric(row[name]) for name in row if name not in ("step", "seed")}
        numbers = {name: value for name, value in metrics.items() if value is not None}
        rows[seed, step] = {"step": step} | ({"seed": seed} if "seed" in row else {}) | numbers
    if skipped and not rows:
        raise RunError(f"{path} has no JSON object with a whole number 'step'")
    return [rows[key] for key in sorted(rows)]


def _read_integer(value):
    """Read a whole number, 1.0 among them."""
    if type(value) not in (int, float) or not float(value).is_integer():
        raise TypeError
    return int(value)


def _read_metric(value):
    """Read a number, or an array of numbers; None for any other value."""
    try:
        return (
            np.array([_read_float(v) for v in value])
            if isinstance(value, list)
            else _read_float(value)
        )
    except (TypeError, OverflowError):
        return None


def _read_float(value):
    """Read a JSON number; a bool, a text or an object raises a TypeError."""
    if value is None:
        return math.nan
    if value not in ("Infinity", "-Infinity") and type(value) not in (int, float):
        raise TypeError
    return float(value)
