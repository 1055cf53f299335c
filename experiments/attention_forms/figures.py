"""The figures of run_attention_forms: forms against d_k at random, and after training."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.attention_forms.forms import FORMS
from experiments.attention_forms.results import differences, law_of
from rank_collapse.report import figures
from rank_collapse.report.intervals import mean_interval


def figures_of(results: dict[str, Any], options: flags.FlagValues) -> dict[str, Callable]:
    """What draws each figure, by name."""
    random = partial(random_figure, results["random"], options.num_tokens, options.saturation)
    return {"random": random, "trained": partial(trained_figure, results["trained"])}


@figures.styled
def random_figure(random: dict[str, Any], num_tokens: int, saturation: float) -> Figure:
    """Scores, weights and gradients of each form against d_k."""
    fig, axes = figures.figure(2, 3, width=3.9, height=3.0)
    panels = {
        "variance": "variance of the scores",
        "entropy": "entropy of a row, nats",
        "largest_weight": "largest weight of a row",
        "saturated": f"share of rows with a weight > {saturation:g}",
        "query_gradient": "gradient to a query, norm",
        "score_gradient": "gradient to the scores of a row",
    }
    for ax, (name, label) in zip(axes.flat, panels.items(), strict=True):
        for index, (form, found) in enumerate(random.items()):
            d_k = found["d_k"]
            figures.band(ax, d_k, found[name], FORMS[form].label, index)
            style = {"color": figures.color(index), "lw": 1}
            if name == "variance":
                ax.plot(d_k, [law_of(form, int(d)).total for d in d_k], ls=":", **style)
            if name.endswith("gradient"):
                typical = np.median(found[f"median_{name}"], axis=0)
                ax.plot(d_k, typical, ls="--", **style)
        ax.set(xlabel=r"width of queries and keys $d_k$", ylabel=label)
        ax.set_xscale("log", base=2)
        if name == "variance" or name.endswith("gradient"):
            ax.set_yscale("log")
        if name == "saturated":
            ax.set_ylim(-0.02, 1.02)
        if name.endswith("gradient"):
            ax.set_title("root mean square; dashed: median row", fontsize=8)
    axes[0, 0].set_title("dotted: closed form", fontsize=8)
    axes[0, 1].axhline(np.log(num_tokens), color="#555555", lw=0.9, ls="--")
    axes[0, 1].set_title(f"dashed: uniform, log {num_tokens}", fontsize=8)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return fig


@figures.styled
def trained_figure(trained: dict[int, Any]) -> Figure:
    """Accuracy of every seed by form, and paired differences with 95 % intervals."""
    fig, axes = figures.figure(1, 2, width=4.4)
    accuracy, ahead = axes[0]
    widths = list(trained)
    for index, form in enumerate(FORMS):
        style = {"color": figures.color(index), "marker": figures.MARKERS[index]}
        label = FORMS[form].label
        for i, d_k in enumerate(widths):
            values = trained[d_k][form]["accuracy"]
            x = i + 0.18 * (index - 1.5)
            accuracy.plot(
                np.full(len(values), x), values, ls="none", alpha=0.6, label=None if i else label,
                **style,
            )  # fmt: skip
            accuracy.plot([x - 0.07, x + 0.07], 2 * [np.mean(values)], color="black", lw=1.2)
            if form == "dot":
                continue
            gained = differences(trained[d_k], form, "dot")
            low, high = mean_interval(gained.tolist())
            mean = gained.mean()
            errors = [[mean - low], [high - mean]] if np.isfinite(low) else None
            ahead.errorbar(
                [i + 0.18 * (index - 2)], [mean], errors, capsize=3, ls="none",
                label=None if i else label, **style,
            )  # fmt: skip
    ahead.axhline(0, color="#555555", lw=0.9, ls="--")
    accuracy.set(ylabel="accuracy of letters after training")
    ahead.set(ylabel="accuracy less that of dot products")
    for ax in (accuracy, ahead):
        ax.set_xticks(range(len(widths)), [str(d) for d in widths])
        ax.set(xlabel=r"width of queries and keys $d_k$", xlim=(-0.6, len(widths) - 0.4))
        ax.legend()
    return fig
