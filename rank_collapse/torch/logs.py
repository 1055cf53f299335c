"""Where rows go: a file, a function, wandb with its own step."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rank_collapse.runs import metrics

WANDB_STEP = "watch/step"
Log = Callable[..., Any] | str | Path | None


def checked(log: Any) -> Log:
    """A path of a file, or a function, or None.

    Raises:
        ValueError: Something else.
    """
    if isinstance(log, str | Path):
        return Path(log) / metrics.NAME if Path(log).is_dir() else Path(log)
    if log is not None and not callable(log):
        raise ValueError(f"log={log!r} is not a function or a path")
    return log


def write(log: Log, step: int, values: Mapping[str, Any]) -> None:
    """Writes a row, {name: a number, or a list with one for each layer}."""
    if isinstance(log, Path):
        metrics.append(log, step, values)
    elif log is not None and (getattr(log, "__module__", None) or "").split(".")[0] == "wandb":
        # wandb drops what comes with a step below its own, which its other callers count up
        sys.modules["wandb"].define_metric("watch/*", step_metric=WANDB_STEP)
        log({f"watch/{name}": value for name, value in flat(values)} | {WANDB_STEP: step})
    elif log is not None:
        log(dict(flat(values)), step=step)


def flat(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, number) of a row, by layer "name/layer_3"; without gaps."""
    for name, value in values.items():
        if isinstance(value, list):
            yield from ((f"{name}/layer_{i}", v) for i, v in enumerate(value) if not math.isnan(v))
        else:
            yield name, value
