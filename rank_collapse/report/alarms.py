"""Thresholds on metrics of a run, which report in one line that it collapses."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rank_collapse.measures.spikes import choose_ratio
from rank_collapse.measures.table import Threshold

_RATIO = "residual_ratio"


class Alarm(NamedTuple):
    """The first step at which a metric passed a threshold, and its worst layer there.

    Attributes:
        metric, threshold: The metric, and the threshold that it passed.
        step, value: The step, and the metric at this step.
        layer: Index of the worst layer; None for a metric without layers.
        seed: Seed of the run in an ensemble; None without an ensemble.
        spiked: Whether a residual ratio is mostly of one token, see `measures.Profile`.
        uses_bulk: Whether the value is `bulk_ratio`, since a few tokens decide the residual ratio.
    """

    metric: str
    threshold: Threshold
    step: int
    value: float
    layer: int | None
    seed: int | None
    spiked: bool = False
    uses_bulk: bool = False

    def __str__(self) -> str:
        _, bound, above, meaning, _ = self.threshold
        where = "" if self.layer is None else f" at layer {self.layer}"
        where += "" if self.seed is None else f" of seed {self.seed}"
        side = f"{'above' if above else 'below'} {bound:g}"
        if not np.isfinite(self.value):
            side = "is not finite"
        text = f"step {self.step}: {self.metric} {self.value:.3g} {side}{where}"
        note = "of one token" if self.spiked else ""
        note = "of all tokens but a few" if self.uses_bulk else note
        meaning = ", ".join(filter(None, (meaning, note)))
        return f"{text} ({meaning})" if meaning else text


def find_alarms(
    rows: Iterable[Mapping[str, object]], thresholds: Sequence[Threshold]
) -> list[Alarm]:
    """Find the first alarm of every metric, threshold and seed, in order of steps.

    Args:
        rows: Rows from `runs.metrics.read`. NaN exceeds no threshold except one that is `finite`.
        thresholds: Thresholds to look for, such as `measures.table.COLLAPSE`; metrics that do not
            exist are ignored.
    """
    rows = sorted(rows, key=lambda row: row["step"])
    names = dict.fromkeys(name for row in rows for name in row)
    by_metric = {name: metric_thresholds(name, thresholds) for name in names}
    guarded = {name: bounds for name, bounds in by_metric.items() if bounds}
    columns: dict[Any, tuple[list[Any], list[Any]]] = {}  # of a metric and a seed: rows, values
    for row in rows:
        for name in (n for n in row if n in guarded):
            seed_rows, values = columns.setdefault((name, row.get("seed")), ([], []))
            seed_rows.append(row)
            values.append(_decisive_value(row, name))
    raised = []
    for (name, seed), (seed_rows, values) in columns.items():
        for threshold in guarded[name]:
            for index in _passing_indices(values, threshold)[:1]:
                value_at_step = np.asarray(values[index], float)
                worst = _worst_layer(np.atleast_1d(value_at_step), threshold)
                layer = worst if value_at_step.ndim else None  # None for a metric of the model
                value = float(np.atleast_1d(value_at_step)[worst])
                row = seed_rows[index]
                full_value = np.atleast_1d(np.asarray(row[name], float))[worst]
                is_bulk = bool(np.isfinite(value) and value != full_value)
                spiked = not is_bulk and _is_spiked(row, name, worst)
                raised.append(
                    Alarm(name, threshold, row["step"], value, layer, seed, spiked, is_bulk)
                )
    return sorted(raised, key=lambda alarm: alarm.step)


def _decisive_value(row, name):
    """Returns a value of a row; for a residual ratio that a few tokens decide, the ratio of the
    bulk.

    Args:
        row: Row from `runs.metrics.read`.
        name: Name of the metric, such as "encoder.residual_ratio".
    """
    value, bulk_name = row[name], name.removesuffix(_RATIO) + "bulk_ratio"
    if name.rpartition(".")[2] != _RATIO or bulk_name not in row:
        return value
    if np.shape(row[bulk_name]) != np.shape(value):
        return value
    return choose_ratio(value, row[bulk_name])


def metric_thresholds(name: str, thresholds: Sequence[Threshold]) -> list[Threshold]:
    """Returns the thresholds of a metric: of its full name, else of the name after the dot.

    Args:
        name: Name of the metric, such as "encoder.residual_ratio".
        thresholds: All thresholds.
    """
    by_name = [threshold for threshold in thresholds if threshold.name == name]
    return by_name or [t for t in thresholds if t.name == name.rpartition(".")[2]]


def _passing_indices(values, threshold):
    """Returns the indices of the values, numbers or arrays [l], that exceed a threshold; in order.

    Args:
        values: Values of one metric, in order of steps.
        threshold: Threshold of the metric.
    """
    sizes = [np.size(value) for value in values]
    flat = np.concatenate([np.atleast_1d(np.asarray(value, float)) for value in values])
    side = flat > threshold.value if threshold.above else flat < threshold.value
    passing = side | (threshold.finite & ~np.isfinite(flat))
    return np.unique(np.repeat(np.arange(len(sizes)), sizes)[passing])


def _is_spiked(row, name, layer):
    """Return whether a residual ratio is mostly that of one token (a spike) in most examples.

    Args:
        row: Row of metrics.
        name: Name of the ratio; the share of spiked examples has the same prefix.
        layer: Index of the layer.
    """
    shares = row.get(name.removesuffix(_RATIO) + "spiked", 0)
    return np.size(shares) > layer and bool(np.atleast_1d(shares)[layer] > 0.5)


def _worst_layer(values, threshold):
    """Returns the index of the worst of the values [l], at least one of which is beyond a
    threshold."""
    bad = np.flatnonzero(~np.isfinite(values))
    if threshold.finite and bad.size:
        return int(bad[0])
    return int(np.nanargmax(values if threshold.above else -values))
