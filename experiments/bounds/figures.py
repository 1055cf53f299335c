"""The figures of check_bounds: how far the bounds lie above what happens, γ*, the construction."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from experiments.bounds.construction import predicted
from experiments.bounds.results import FREE, ROUNDING, WHAT, Draws, given, held, pooled
from rank_collapse.report import figures


def figures_of(
    draws: Draws, sizes: Sequence[int], built: dict[str, np.ndarray]
) -> dict[str, Callable[[], Figure]]:
    """What draws each figure."""
    return {
        "tightness": partial(tightness_figure, draws),
        "construction": partial(construction_figure, sizes, built),
    }


@figures.styled
def tightness_figure(draws: Draws) -> Figure:
    """Cumulative shares of tightness, dashed where no condition is needed, and γ* by heads."""
    flat = pooled(draws)
    fig, axes = figures.figure(1, 2)
    left, right = axes[0]
    for index, what in enumerate(WHAT):
        values = held(flat, what)
        if values.size:
            label = f"{what.replace('_', ' ')}s: {values.size}, {(values < 0).sum()} violations"
            left.ecdf(values, color=figures.color(index), label=label)
    for index, what in enumerate(FREE):
        values, name = given(flat, what), what.replace("_", " ")
        label = f"{name}s: {values.size}, {(values < -ROUNDING).sum()} violations"
        left.ecdf(values, color=figures.color(index), label=label, ls="--", lw=1)
    left.set_xscale("symlog", linthresh=10)  # weights that look at one key alone leave 1e-1000
    left.axvline(0, color="#555555", lw=0.9, ls="--")
    left.set(xlabel="log10 bound − log10 residual, at most", ylabel="share of draws")
    left.legend(loc="best", fontsize=6)
    right.hist(flat["gamma"][flat["head_ok"]], 60, color=figures.color(5))
    right.set(xlabel="γ*, the least factor that the lemma needs", ylabel="heads")
    return fig


@figures.styled
def construction_figure(sizes: Sequence[int], built: dict[str, np.ndarray]) -> Figure:
    """Residual over bound against n = d, with what is predicted; above 1 a bound is violated."""
    fig, axes = figures.figure(1, 1)
    ax, order = axes[0, 0], np.argsort(sizes)
    sizes = np.asarray(sizes)[order]
    for index, (name, label, line) in enumerate((
        ("mean_over_published", "around the mean / published", "o-"),
        ("least_over_published", "minimal residual, at least / published", "x--"),
        ("mean_over_bound", "around the mean / sums over heads", "s-"),
    )):  # fmt: skip
        ax.plot(
            sizes, np.asarray(built[name])[order], line, color=figures.color(index), label=label
        )
    ax.plot(sizes, predicted(sizes), ":", color="#333333", label="½(q + 1/q)/√32, q = (nd/2)^¼")
    ax.axhline(1, color="#555555", lw=0.9, ls="--")
    ax.set(xlabel="n = d", ylabel="residual / bound", xscale="log", yscale="log")
    ax.set_xticks([n for n in (8, 32, 64, 128, 256, 512) if sizes[0] <= n <= sizes[-1]])
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.xaxis.set_minor_formatter("")
    ax.legend(loc="best", fontsize=7)
    return fig
