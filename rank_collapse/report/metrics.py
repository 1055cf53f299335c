"""The picture of a run's metrics: one panel each, by step, layers from dark to light."""

from collections.abc import Mapping, Sequence

import numpy as np

from rank_collapse.printed import escape_text
from rank_collapse.report import figures
from rank_collapse.report.alarms import Threshold, find_alarms, metric_thresholds

COLUMNS = 3
MOST_LAYERS = 8  # lines of a panel: the first, the last, and some between
MOST_PANELS = 36
LONGEST = 60  # characters of a name


@figures.styled
def metrics_figure(
    rows: Sequence[Mapping[str, object]], thresholds: Sequence[Threshold] = ()
) -> figures.Figure:
    """Plot a panel for each of the first 36 metrics: means over seeds, their range as bands.

    Metrics that passed a threshold come first.

    Args:
        rows: Rows of metrics, from `runs.metrics.read`.
        thresholds: Thresholds, which are drawn as lines.
    """
    names = metric_names(rows, thresholds)[:MOST_PANELS]
    fig, axes = figures.panels(len(names), COLUMNS, width=3.4, height=2.5)
    for name, ax in zip(names, axes.flat, strict=False):
        steps, values = by_step(rows, name)
        layers = values.shape[-1]
        chosen = np.unique(np.linspace(0, layers - 1, min(layers, MOST_LAYERS)).round().astype(int))
        for layer, shade in zip(chosen, figures.shades(len(chosen)), strict=True):
            by_seed = np.ma.masked_invalid(values[..., layer])
            label = f"layer {layer}" if layers > 1 else None
            mean = by_seed.mean(axis=0).filled(np.nan)
            ax.plot(steps, mean, color=shade, label=label, **figures.mark_isolated(mean))
            if len(by_seed) > 1:
                low, high = by_seed.min(axis=0).filled(np.nan), by_seed.max(axis=0).filled(np.nan)
                ax.fill_between(steps, low, high, color=shade, alpha=0.15, linewidth=0)
        for threshold in metric_thresholds(name, thresholds):
            if np.isfinite(threshold.value):
                ax.axhline(threshold.value, color=figures.DARK_GREY, linestyle="--", linewidth=0.9)
        finite = values[np.isfinite(values)]
        if finite.size and finite.min() > 0 and finite.max() > 100 * finite.min():
            ax.set_yscale("log")
        figures.integer_ticks(ax)
        ax.set_xlabel("step")
        title = escape_text(name[:LONGEST].replace("_", " "))  # others chose the name
        ax.set_title(title, parse_math=False)
    legends = [ax.get_legend_handles_labels() for ax in axes.flat[: len(names)]]
    longest = max(legends, key=lambda legend: len(legend[1]))
    if longest[1]:
        fig.legend(*longest, loc="outside lower center", ncols=4)
    return fig


def metric_names(
    rows: Sequence[Mapping[str, object]], thresholds: Sequence[Threshold] = ()
) -> list[str]:
    """List the metrics: those that passed a threshold, then the loss, then others in their order.

    Args:
        rows: Rows of a file with metrics.
        thresholds: Thresholds that may be crossed.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in names if name not in ("step", "seed")]
    passed = {alarm.metric for alarm in find_alarms(rows, thresholds)}
    return sorted(names, key=lambda name: (name not in passed, "loss" not in name))


def by_step(rows: Sequence[Mapping[str, object]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps [k], values [s, k, l]) of one metric, NaN where a seed has none at a step.

    Args:
        rows: Rows of a file with metrics.
        name: Name of the metric.
    """
    steps = sorted({row["step"] for row in rows if name in row})
    seeds = sorted({row.get("seed", 0) for row in rows if name in row})
    width = max(np.size(row[name]) for row in rows if name in row)
    values = np.full((len(seeds), len(steps), width), np.nan)
    index_of_step = {step: i for i, step in enumerate(steps)}
    index_of_seed = {seed: i for i, seed in enumerate(seeds)}
    for row in rows:
        if name in row:
            layer_values = np.atleast_1d(row[name])
            place = index_of_seed[row.get("seed", 0)], index_of_step[row["step"]]
            values[place][: layer_values.size] = layer_values
    return np.array(steps), values
