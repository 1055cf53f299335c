"""The figure of check_bounds: how far the bounds lie above what happens, and γ*."""

from collections.abc import Callable
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from experiments.bounds.results import WHAT, Draws, held, pooled
from rank_collapse.report import figures


def figures_of(draws: Draws) -> dict[str, Callable[[], Figure]]:
    """What draws the figure."""
    return {"tightness": partial(tightness_figure, draws)}


@figures.styled
def tightness_figure(draws: Draws) -> Figure:
    """Histograms over all draws where the lemma's condition holds."""
    flat = pooled(draws)
    fig, axes = figures.figure(1, 2)
    left, right = axes[0]
    found = {what: held(flat, what) for what in WHAT if held(flat, what).size}
    edges = np.linspace(min(0, *map(np.min, found.values())), TIGHTEST, 60) if found else 60
    for index, (what, values) in enumerate(found.items()):
        style = {"color": figures.color(index), "histtype": "step", "linewidth": 1.4}
        weights = np.full(values.size, 1 / values.size)
        label = f"{what}s: {values.size}, {(values < 0).sum()} below 0"
        left.hist(np.minimum(values, TIGHTEST), edges, weights=weights, label=label, **style)
    left.axvline(0, color="#555555", lw=0.9, ls="--")
    left.set(xlabel="log10 bound − log10 residual", ylabel="share of draws")
    left.legend(title="violated left of the line", title_fontsize=8)
    right.hist(flat["gamma"][flat["head_ok"]], 60, color=figures.color(5))
    right.set(xlabel="γ*, the least factor that the lemma needs", ylabel="heads")
    return fig


TIGHTEST = 8.0  # powers of ten; the last bin holds what lies beyond
