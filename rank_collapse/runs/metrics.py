"""Scalars of a run while it goes on: metrics.jsonl, a JSON object a line, appended.

    append("run/metrics.jsonl", 120, {"loss": 2.1, "residual_ratio": [0.9, 0.7]}, seed=0)

    {"step": 120, "seed": 0, "loss": 2.1, "residual_ratio": [0.9, 0.7]}

Any program can write such a file, and `python -m experiments.watch` draws it while it grows.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rank_collapse.runs.files import RunError, writing

NAME = "metrics.jsonl"


def append(
    path: str | os.PathLike, step: int, values: Mapping[str, Any], *, seed: int | None = None
) -> None:
    """Appends the line of one step.

    Args:
        path: The file; made if absent. A line that an interrupted run left unfinished is ended.
        step: Of training: steps, epochs, tokens, as the run counts.
        values: Numbers by name, or arrays [l] with one for each layer. What is not finite is
            written as null, since JSON has no other word for it.
        seed: Which run of an ensemble.

    Raises:
        ValueError: A value that is neither a number nor a list of them.
        RunError: The file cannot be written.
    """
    line = {"step": int(step)} | ({} if seed is None else {"seed": int(seed)})
    for name, value in values.items():
        value = np.asarray(value, np.float64)
        if value.ndim > 1 or name in ("step", "seed"):
            raise ValueError(f"{name!r} of shape {value.shape} is no metric: a number, or [l]")
        line[name] = [_number(v) for v in value] if value.ndim else _number(value)
    with writing(path), open(path, "ab+") as file:
        ended = file.tell() == 0 or _last_byte(file) == b"\n"
        file.write((b"" if ended else b"\n") + json.dumps(line).encode() + b"\n")


def _number(value):
    return float(value) if math.isfinite(value) else None


def _last_byte(file):
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a file in order of (seed, step); of a step written twice the last.

    A run that resumes from a checkpoint writes some steps again. Lines that are cut off, as by a
    process that was killed while it wrote, are left out. null is read as NaN.

    Raises:
        RunError: The file cannot be read, or holds a line that is no metric's.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    rows = {}
    for number, text in enumerate(content.split(b"\n"), 1):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise RunError(f"{path}, line {number}: no JSON object with a whole number 'step'")
        rows[row.get("seed", 0), row["step"]] = row
    try:
        return [{n: _restored(v) for n, v in rows[key].items()} for key in sorted(rows)]
    except (TypeError, ValueError) as error:
        raise RunError(f"{path}: a value that is neither a number nor a list of them") from error


def _restored(value):
    if isinstance(value, list):
        return np.array([np.nan if v is None else float(v) for v in value])
    return math.nan if value is None else value
