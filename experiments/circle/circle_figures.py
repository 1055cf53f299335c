"""Figures of run_circle: shares of seeds that fall together, numbers of steps, walks, distances."""

import textwrap
from collections.abc import Mapping

import numpy as np

from experiments.circle import walks
from experiments.lab import plots
from experiments.verdicts.share_intervals import wilson_interval
from rank_collapse.report import figures

IN_WORDS = {
    "base": "published network",
    "circle_skip": "published network, skip around recurrence",
    "mlp": "published network, MLP",
    "attention": "attention alone",
}
PARTS = {"mlp": "MLP"}  # of other variants

ByCase = Mapping[str, dict[str, np.ndarray]]  # {case: as `train_networks`}


def in_words(variant: str) -> str:
    """Puts a variant in words: "attention and MLP"."""
    parts = [PARTS.get(part, part) for part in variant.split("+")]
    return IN_WORDS.get(variant, " and ".join(parts))


def describe_network(variant: str, width: int) -> str:
    """Puts a variant and its width in words: "attention and MLP, width 32"."""
    return f"{in_words(variant)}, width {width}"


def panel_title(variant: str, width: int) -> str:
    """Writes `describe_network` in lines that a panel of the walks or of the distances holds."""
    return f"{textwrap.fill(in_words(variant), 24)}, width {width}"


@figures.styled
def shares_figure(results: ByCase):
    """A network moves two points (walkers) along a circle and reads its own output. The vertical
    axis is the share of seeds whose walkers fall together. The horizontal axis lists the networks,
    and each panel has one width of the networks. Bars are 95 % intervals. “Here” means our code,
    and “published code” is the program of the authors. An MLP does not change the share, so it does
    not keep walkers apart. The published network has a skip around its attention, and behaves like
    our network with such a skip."""
    measured = walks.fine_cases(results)
    variants = list(dict.fromkeys(variant for variant, _ in measured))
    widths = list(dict.fromkeys(width for _, width in measured))
    width = max(4.2, 0.75 * len(variants))  # of a panel: names stand side by side
    fig, axes = figures.figure(1, len(widths), width=width, height=3.1, sharey=True)
    for (variant, width), case in measured.items():
        i, ax, fell = variants.index(variant), axes[0, widths.index(width)], case["fell"]
        counts = {"here": (int(fell.sum()), len(fell))}
        if (variant, width) in walks.PUBLISHED_FELL:
            counts["published code"] = walks.PUBLISHED_FELL[variant, width], walks.PUBLISHED_SEEDS
        for index, (source, (count, total)) in enumerate(counts.items()):
            label = None if i else f"{source}, {total} seeds"
            interval = wilson_interval(count, total)
            plots.draw_interval(ax, i + 0.16 * index, count / total, interval, label, index)
        labels = [textwrap.fill(in_words(name), 11) for name in variants]
        ax.set_xticks(range(len(variants)), labels, fontsize=8)
        ax.set(title=f"width {width}", ylim=(-0.04, 1.04), xlim=(-0.5, len(variants) - 0.4))
    axes.flat[0].set_ylabel("share of seeds whose walkers fall together")
    fig.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return fig


def select_steps(
    cases: Mapping[tuple[str, int], Mapping[str, np.ndarray]],
) -> dict[tuple[str, int], np.ndarray]:
    """Selects the numbers of steps to collapse, predicted and measured, [2, k], for the k seeds
    that collapsed.

    A multiplier of 0, as in pure attention, predicts no number of steps, because the law is cubic.

    Args:
        cases: Measures of the seeds by (variant, width).
    """
    points = {}
    for key, case in cases.items():
        steps = np.stack([case["predicted_steps"], case["measured_steps"]])
        is_predicted = case["fell"] & np.isfinite(steps).all(axis=0) & (steps[0] >= 0.5)
        if is_predicted.any():
            points[key] = steps[:, is_predicted]
    return points


@figures.styled
def steps_figure(results: ByCase):
    """How many steps the walkers need to approach each other from a distance of 1e-2 to a distance
    of 1e-6. Each marker is one seed whose walkers fell together. The vertical axis is the measured
    number of steps. The horizontal axis is the number of steps that the multiplier μ predicts. μ is
    the factor by which one step changes a small distance of the walkers near the point where they
    met. Seeds for which μ predicts less than half a step have no marker. On the grey line,
    measurement and prediction are equal."""
    points = select_steps(walks.fine_cases(results))
    if not points:
        return None
    variants = list(dict.fromkeys(variant for variant, _ in points))
    widths = list(dict.fromkeys(width for _, width in points))
    fig, ((ax,),) = figures.figure(1, 1, width=6.6, height=3.8)
    for (variant, width), (predicted, measured) in points.items():
        ax.plot(
            predicted,
            measured,
            ls="none",
            alpha=0.7,
            markersize=5,
            label=describe_network(variant, width),
            color=figures.color(variants.index(variant)),
            marker=figures.MARKERS[widths.index(width)],
        )
    steps = np.concatenate([*points.values()], axis=1)
    limits = [steps.min() / 1.2, steps.max() * 1.2]
    ax.plot(limits, limits, color="gray", linewidth=0.8, label="equal")
    ax.set(
        xscale="log",
        yscale="log",
        xlim=limits,
        ylim=limits,
        xlabel="steps predicted, ln(1e-4) / ln μ",
        ylabel="steps measured",
        title="From a distance of 1e-2 to 1e-6",
    )
    for axis in (ax.xaxis, ax.yaxis):  # 1, 2, 5, 10: those of a log axis overlap within a decade
        axis.get_major_locator().set_params(subs=(1, 2, 5))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside right upper")
    return fig


@figures.styled
def trajectories_figure(results: ByCase):
    """The two walkers of one seed in the plane of the circle, while the network reads its own
    output. Each panel is one network, and the grey ring is the circle. Each colour is one walker. A
    large dot marks the start of a walk, and a square marks its end. Each panel shows the first seed
    whose walkers fell together. If there is no such seed, it shows the first seed."""
    measured = walks.fine_cases(results)
    places = [(width, variant) for variant, width in measured]
    fig, axes, panels = plots.place_grid(places, width=2.8, height=2.9)
    angle = np.linspace(0, 2 * np.pi, 200)
    for ax, ((variant, width), case) in zip(panels, measured.items(), strict=True):
        fell = case["fell"]
        first = np.argmax(fell)
        ax.plot(
            walks.RADIUS * np.cos(angle),
            walks.RADIUS * np.sin(angle),
            color="lightgray",
            linewidth=4,
        )
        for walker, path in enumerate(case["trajectory"][first].swapaxes(0, 1)):
            color = figures.color(walker)
            line = {"marker": ".", "markersize": 3, "linewidth": 0.5}
            ax.plot(*path.T, color=color, label=f"sequence {walker + 1}", **line)
            for place, marker, text in ((0, "o", "start"), (-1, "s", "end")):
                shape = {"marker": marker, "markersize": 6, "linestyle": "none"}
                ax.plot(*path[place], color=color, label=text if walker else None, **shape)
        title = panel_title(variant, width)
        seed, count = case["seed"][first], f"{fell.sum()} of {len(fell)} fell"
        ax.set_title(f"{title}\nseed {seed}; {count}", fontsize=9)
        ax.set(xlim=(-0.56, 0.56), ylim=(-0.56, 0.56), xlabel="x", ylabel="y", aspect="equal")
    handles = axes.flat[0].get_legend_handles_labels()
    fig.legend(*handles, loc="outside lower center", ncols=4 if len(places) > 1 else 2)
    return fig


@figures.styled
def distance_figure(results: ByCase):
    """Distance of the two walkers (vertical axis) after each step (horizontal axis). Each panel is
    one network, and each line is one seed. Blue lines are seeds whose walkers fell together. Grey
    lines are seeds whose walkers stayed apart. Distances below 1e-9 are drawn at 1e-9. With
    attention alone, a distance below 0.1 falls below 1e-6 within about three steps. With a skip,
    each step multiplies the distance by about the same factor."""
    measured = walks.fine_cases(results)
    places = [(width, variant) for variant, width in measured]
    fig, axes, panels = plots.place_grid(places, width=2.8, height=2.2, sharex=True, sharey=True)
    for ax, ((variant, width), case) in zip(panels, measured.items(), strict=True):
        for has_fallen, index in ((False, 7), (True, 0)):
            lines = np.maximum(case["distance"][case["fell"] == has_fallen], 1e-9)
            ax.plot(lines.T, color=figures.color(index), linewidth=0.7, alpha=0.6)
        ax.set_title(panel_title(variant, width), fontsize=9)
        ax.set(yscale="log")
    plots.outer_labels(axes, "step", "distance of the walkers")
    return fig
