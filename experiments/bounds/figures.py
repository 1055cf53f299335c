"""The figure of check_bounds: how far the bounds lie above what happens, and γ*."""

from collections.abc import Callable
from functools import partial

from matplotlib.figure import Figure

from experiments.bounds.results import FREE, ROUNDING, WHAT, Draws, given, held, pooled
from rank_collapse.report import figures


def figures_of(draws: Draws) -> dict[str, Callable[[], Figure]]:
    """What draws the figure."""
    return {"tightness": partial(tightness_figure, draws)}


@figures.styled
def tightness_figure(draws: Draws) -> Figure:
    """Cumulative shares of tightness, dashed where no condition is needed, and γ* by heads."""
    flat = pooled(draws)
    fig, axes = figures.figure(1, 2)
    left, right = axes[0]
    for index, what in enumerate(WHAT):
        values = held(flat, what)
        if values.size:
            label = f"{what}s: {values.size}, {(values < 0).sum()} violations"
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
