"""Statistics over seeds: means, deviations, intervals and slopes, as values of JSON."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rank_collapse.report.intervals import mean_interval, share_interval

# Columns of tables that are shares or 1 and 0 of a seed: their intervals stay within [0, 1].
SHARES = frozenset(
    (
        "accuracy",
        "exact",
        "exact_match",
        "failed",
        "diverged",
        "fell",
        "trains",
        "saturated",
        "largest_weight",
    )
)


def number(value: Any) -> float | None:
    """A float, or None where it is not finite: JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


def numbers(values: Any) -> list[float | None]:
    """`number` of each value [k]."""
    return [number(value) for value in values]


def moments(values: Any, *, interval: bool = True, share: bool = False) -> dict[str, Any]:
    """Mean, standard deviation and 95 % interval over seeds.

    Args:
        values: One per seed, [s, ...].
        interval: Whether to give the interval of the mean, as `mean_and_ends` does.
        share: Whether the values are shares.

    Returns:
        {"mean": [...], "std": [...], "interval": [2, ...]}; no interval of one seed, nor where a
        value is not finite, and None for the ends that seeds do not tell.
    """
    values = np.asarray(values, float)
    found = {"mean": values.mean(axis=0).tolist(), "std": values.std(axis=0).tolist()}
    if interval and len(values) > 1 and np.isfinite(values).all():
        columns = values.reshape(len(values), -1).T
        ends = np.array([mean_and_ends(column, share=share)[1:] for column in columns])
        found["interval"] = ends.T.reshape(2, *values.shape[1:]).tolist()
    return found


def mean_and_ends(values: Any, *, share: bool = False) -> list[float | None]:
    """[mean, low, high] over seeds [s], of shares within [0, 1]; None for ends that are not known:
    of one seed, of seeds that are no number, and of numbers that are all equal and no shares."""
    values = [float(v) for v in values]
    low = high = math.nan
    if len(values) > 1 and all(map(math.isfinite, values)):
        low, high = (share_interval if share else mean_interval)(values)
    return [float(np.mean(values)), *((low, high) if math.isfinite(low) else (None, None))]


def by_seed(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row of a table for each seed: {"seed": s, name: number} of columns [s]."""
    values = {name: np.asarray(column).tolist() for name, column in columns.items()}
    count = len(next(iter(values.values())))
    return [{"seed": s} | {name: own[s] for name, own in values.items()} for s in range(count)]


def between(found: list[Any] | dict[str, Any], digits: int = 3) -> str:
    """A mean with its interval, "0.123 (0.100 to 0.200)", from `moments` or `mean_and_ends`."""
    if isinstance(found, dict):
        mean, (low, high) = found["mean"], found.get("interval", (None, None))
    else:
        mean, low, high = found
    text = f"{mean:.{digits}f}"
    return text if low is None else f"{text} ({low:.{digits}f} to {high:.{digits}f})"


def slope(x: Any, y: Any) -> np.ndarray:
    """Least-squares slope of each row of y [..., k] over x [k]: Σ (x − x̄) y / Σ (x − x̄)².

    NaN where x has one point only, or a value of y is not finite.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    away = x - x.mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(y @ away / (away @ away))


def order_of(a: Any, b: Any) -> float | None:
    """Spearman's rank correlation of two arrays; None where one is empty or constant."""
    from scipy import stats

    if any(np.size(v) == 0 or np.ptp(v) == 0 for v in (a, b)):
        return None
    return float(stats.spearmanr(a, b).statistic)


def geometric_mean(values: Any) -> np.ndarray:
    """exp of the mean over seeds of ln values [s, ...]; NaN where a seed has none above 0."""
    values = np.asarray(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp(np.log(np.where(values > 0, values, np.nan)).mean(axis=0))


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
