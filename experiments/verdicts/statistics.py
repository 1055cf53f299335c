"""Statistics over seeds: means, deviations, intervals and slopes, as values of JSON."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from experiments.verdicts.share_intervals import share_interval, slope
from rank_collapse.report.intervals import Interval, mean_interval

TableRow = dict[str, str | float | np.generic | None]  # of results.csv: {column: value}


def finite_or_none(value: ArrayLike) -> float | None:
    """Converts a number to a float, or to None where it is not finite: JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


def mean_with_interval(values: ArrayLike, *, share: bool = False) -> tuple[float, Interval]:
    """Computes (mean, 95 % interval) over seeds [s]; the interval of one seed is unknown.

    Args:
        values: Values of the seeds.
        share: Whether they are shares; the interval is then within [0, 1].
    """
    values = [float(v) for v in values]
    enough = len(values) > 1 and all(map(math.isfinite, values))
    interval = (share_interval if share else mean_interval)(values) if enough else Interval()
    return float(np.mean(values)), interval


def seed_rows(columns: Mapping[str, ArrayLike]) -> list[TableRow]:
    """Makes a row of a table for each seed: {"seed": s, name: number} of columns [s].

    Args:
        columns: Values [s] by the name of the column.

    Raises:
        ValueError: Columns of different lengths.
    """
    lists = [np.asarray(column).tolist() for column in columns.values()]
    return [
        {"seed": seed} | dict(zip(columns, numbers, strict=True))
        for seed, numbers in enumerate(zip(*lists, strict=True))
    ]


def format_interval(estimate: tuple[float, Interval], digits: int = 3) -> str:
    """Writes a mean with its interval where it is known, "0.123 (0.100 to 0.200)".

    Args:
        estimate: Estimate from `mean_with_interval`.
        digits: Digits after the point.
    """
    mean, interval = estimate
    text = f"{mean:.{digits}f}"
    if not interval.is_finite:
        return text
    return f"{text} ({interval.low:.{digits}f} to {interval.high:.{digits}f})"


def clipped_log10(values: ArrayLike) -> np.ndarray:
    """Computes log10 of values, after raising them to the smallest normal number of float32."""
    return np.log10(np.maximum(values, np.finfo(np.float32).tiny))


def power_law_wins(curves: ArrayLike) -> np.ndarray:
    """Computes ln of the squared error of y = a r^l over that of y = a l^p; above 0, a power fits.

    Both are fitted to ln y over l = 1 .. L by least squares, with two parameters each.

    Args:
        curves: y by l = 0 .. L, [..., L + 1].

    Returns:
        [...]; NaN if a y is not above 0 or L < 3.
    """
    curves = np.asarray(curves, float)
    layers = np.arange(1, curves.shape[-1])
    if len(layers) < 3:
        return np.full(curves.shape[:-1], np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.where(curves[..., 1:] > 0, curves[..., 1:], np.nan))
        centred = logs - logs.mean(axis=-1, keepdims=True)
        errors = []
        for x in (layers, np.log(layers)):
            fit = slope(x, centred)[..., None] * (x - x.mean())
            errors.append(np.sum((centred - fit) ** 2, axis=-1))
        return np.log(errors[0] / errors[1])


def fisher_exact(count: int, total: int, other_count: int, other_total: int) -> float:
    """Computes the p-value of two counts if both have the same share: Fisher's exact test,
    two-sided.

    Args:
        count, total: Count and total of the first sample.
        other_count, other_total: Count and total of the second sample.
    """
    from scipy import stats  # here: it takes a second, which `--help` need not

    samples = (count, total), (other_count, other_total)
    return float(stats.fisher_exact([[k, n - k] for k, n in samples]).pvalue)
