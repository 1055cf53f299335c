"""Figures of run_cures."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.cures.cases import MEASURES, SHARES, Cases, ends
from experiments.initial import FLOOR
from rank_collapse.report import figures
from rank_collapse.report.figures import Figure


def dots(cases: Cases, panels: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A panel for each label, in it a mark with its interval for each case, one row per cure.

    Args:
        cases: By name.
        panels: {label: {name: [mean, low, high]}}; None for what is not there.
    """
    names = list(dict.fromkeys(case.label for case in cases.values()))
    depths = sorted({case.depth for case in cases.values()})
    fig, axes = figures.figure(1, len(panels), width=2.5, height=1 + 0.22 * len(names), sharey=True)
    for ax, (label, found) in zip(axes.flat, panels.items(), strict=True):
        for name, case in cases.items():
            mean, low, high = found[name]
            index = depths.index(case.depth)
            marker, color = figures.MARKERS[index % len(figures.MARKERS)], figures.color(index)
            y = names.index(case.label) + 0.16 * (index - (len(depths) - 1) / 2)
            if low is not None:
                ax.plot([low, high], [y, y], color=color, lw=1, marker="")
            style = {"ls": "none", "marker": marker, "color": color, "label": f"L = {case.depth}"}
            ax.plot([np.nan if mean is None else mean], [y], **style)
        ax.set(xlabel=label)
        ax.locator_params(axis="x", nbins=4)
        ax.set_yticks(range(len(names)), names, fontsize=8)
        ax.grid(axis="y", lw=0.3)
    axes[0, 0].invert_yaxis()
    handles = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(depths))
    return fig


def cures_figure(results: Mapping[str, Any], setup: Any) -> Figure:
    """Each cure at initialisation, means over seeds with 95 % intervals, of shares within [0, 1];
    the entropy is of rows of |M| over their sums, path lengths are weighted by the size of the sum
    of all paths of a length. No mark: gradients of queries or values are 0, the residual of
    a seed is rounded away, or no sum of paths covers the network.
    """
    found = results["cases"].items()
    panels = {
        label: {name: ends(own[measure], share=measure in SHARES) for name, own in found}
        for measure, label in MEASURES.items()
    }
    return dots(setup.cases, panels)


def trained_figure(trained: Mapping[str, Any], setup: Any) -> Figure:
    """Each cure after training without warm-up: accuracy, mean over seeds with 95 % interval;
    share of seeds above what tokens by themselves tell, with Wilson's; seconds of a step of one
    seed.
    """
    shares = {"accuracy": "accuracy", "share of seeds that train": "trains"}
    panels = {
        label: {name: ends(found[measure], share=True) for name, found in trained.items()}
        for label, measure in shares.items()
    }
    seconds = {name: ends(found["step_seconds"])[0] for name, found in trained.items()}
    panels["seconds a step"] = {name: [mean, None, None] for name, mean in seconds.items()}
    return dots(setup.trained, panels)


def curves_figure(results: Mapping[str, Any], setup: Any) -> Figure:
    """The residual by layer of the deepest networks, geometric means and a standard deviation, to
    the first layer where float32 rounds it away."""
    cases = setup.cases
    deepest = max(case.depth for case in cases.values())
    kinds = list(dict.fromkeys(case.kind for case in cases.values()))
    fig, axes = figures.figure(1, len(kinds), width=5.2, height=3.8, sharey=True)
    for ax, kind in zip(axes.flat, kinds, strict=True):
        names = [n for n, c in cases.items() if c.kind == kind and c.depth == deepest]
        for index, name in enumerate(names):
            dashes = ("-", "--", ":")[index // len(figures.COLORS) % 3]
            curve = np.arange(deepest + 1), results["cases"][name]["kept"], cases[name].name
            figures.log_band(ax, *curve, index, marker="", ls=dashes)
        ax.set(xlabel="layer", yscale="log", title=f"{kind}s")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
    low = max(FLOOR, axes[0, 0].get_ylim()[0])
    axes[0, 0].set(ylabel="residual over that of the input", ylim=(low, None))
    return fig
