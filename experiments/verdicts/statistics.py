"""Statistics over seeds: means, deviations, intervals and slopes, as values of JSON."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rank_collapse.report.intervals import Interval, mean_interval, share_interval, slope


def number(value: Any) -> float | None:
    """A float, or None where it is not finite: JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


def mean_of(values: Any, *, share: bool = False) -> tuple[float, Interval]:
    """(mean, 95 % interval) over seeds [s], of shares within [0, 1]; not known of one seed."""
    values = [float(v) for v in values]
    known = len(values) > 1 and all(map(math.isfinite, values))
    interval = (share_interval if share else mean_interval)(values) if known else Interval()
    return float(np.mean(values)), interval


def by_seed(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row of a table for each seed: {"seed": s, name: number} of columns [s]."""
    values = {name: np.asarray(column).tolist() for name, column in columns.items()}
    count = len(next(iter(values.values())))
    return [{"seed": s} | {name: own[s] for name, own in values.items()} for s in range(count)]


def between(found: tuple[float, Interval], digits: int = 3) -> str:
    """A mean with its interval where it is known, "0.123 (0.100 to 0.200)", from `mean_of`."""
    mean, (low, high) = found
    text = f"{mean:.{digits}f}"
    return f"{text} ({low:.{digits}f} to {high:.{digits}f})" if found[1].is_finite else text


def log10(values: Any) -> np.ndarray:
    """log10 of values, of those that float32 cannot hold that of the smallest it can."""
    return np.log10(np.maximum(values, np.finfo(np.float32).tiny))


def power_law_wins(curves: Any) -> np.ndarray:
    """ln of the squared error of y = a r^l over that of y = a l^p, [...]; above 0 favours a power.

    Both are fitted to ln y over l = 1 .. L by least squares, with two parameters each.

    Args:
        curves: y by l = 0 .. L, [..., L + 1]; NaN where one is not above 0 or L < 3.
    """
    curves = np.asarray(curves, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.where(curves[..., 1:] > 0, curves[..., 1:], np.nan))
        away = logs - logs.mean(axis=-1, keepdims=True)
        layers = np.arange(1, curves.shape[-1])
        squares = [
            np.sum((away - slope(x, away)[..., None] * (x - x.mean())) ** 2, axis=-1)
            for x in (layers, np.log(layers))
        ]
        found = np.log(squares[0] / squares[1])
    return found if len(layers) > 2 else np.full(curves.shape[:-1], np.nan)


def fisher_exact(count: int, total: int, other_count: int, other_total: int) -> float:
    """Computes p of two counts if both shares are one: Fisher's exact test, two-sided."""
    from scipy import stats  # here: it takes a second, which `--help` need not

    samples = (count, total), (other_count, other_total)
    return float(stats.fisher_exact([[k, n - k] for k, n in samples]).pvalue)
