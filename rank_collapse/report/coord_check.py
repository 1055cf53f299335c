"""The figure of a coordinate check: quantities over depth, before training and after it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rank_collapse.report import figures


@figures.styled
def coordinates_figure(
    curves: Mapping[str, Mapping[str, Any]], depths: Sequence[int], meaning: Mapping[str, str]
) -> figures.Figure:
    """A panel for each quantity over depth: dotted at the first step, solid at the last; over seeds
    the geometric mean and a deviation of the logarithm.

    Args:
        curves: {label: {quantity: [depths, seeds, steps]}}, a colour for each label.
        depths: L.
        meaning: {quantity: what its axis says}.
    """
    names = list(dict.fromkeys(name for own in curves.values() for name in own))
    fig, axes = figures.panels(len(names), 4, width=2.9, height=2.4)
    for ax, name in zip(axes.flat, names, strict=False):
        for index, (label, own) in enumerate(curves.items()):
            for step, dashes, when in ((0, ":", "first step"), (-1, "-", "last step")):
                values = np.asarray(own[name])[..., step].T
                if np.isfinite(values).any():
                    text = f"{label} {when}".strip()
                    figures.log_band(ax, depths, values, text, index, linestyle=dashes)
        ax.set(xscale="log", yscale="log", xlabel="layers L", ylabel=meaning.get(name, name))
        ax.set_xticks(depths, labels=map(str, depths))
        ax.set_xticks([], minor=True)
    named = axes[0, 0].get_legend_handles_labels()
    fig.legend(*named, loc="outside lower center", ncols=6)
    return fig
