"""The figures of run_trainability: who fails, how the loss falls, and why."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.trainability.cells import STEPS_PER_EPOCH, Cell
from experiments.trainability.results import failed, gradient, limit_of
from rank_collapse.report import figures
from rank_collapse.report.shares import wilson_interval


def figures_of(
    results: dict[Cell, Any], options: flags.FlagValues
) -> dict[str, Callable[[], Figure]]:
    """What draws each figure of the parts that were run, by name."""
    limit = limit_of(options)
    designs, border, batch = (
        {c: r for c, r in results.items() if c.part == part}
        for part in ("designs", "border", "batch")
    )
    draws = {}
    if designs:
        draws["failed"] = partial(share_figure, designs, limit, "depth", "layers")
        draws["losses"] = partial(loss_figure, designs)
        draws["why"] = partial(why_figure, designs)
        draws["during"] = partial(during_figure, designs)
    if border:
        draws["border"] = partial(border_figure, border, limit)
    if batch:
        draws["batch"] = partial(share_figure, batch, limit, "batch_size", "batch size")
    return draws


def _values(cells, field):
    return list(dict.fromkeys(getattr(c, field) for c in cells))


@figures.styled
def share_figure(cells: dict[Cell, Any], limit: float, field: str, label: str) -> Figure:
    """Share of seeds that failed, with Wilson's intervals, by depth or batch size."""
    warmups, designs = _values(cells, "warmup"), _values(cells, "design")
    places = sorted(_values(cells, field))
    fig, axes = figures.figure(1, len(warmups), sharey=True)
    for ax, warmup in zip(axes[0], warmups, strict=True):
        for index, design in enumerate(designs):
            for cell, found in cells.items():
                if (cell.warmup, cell.design) != (warmup, design):
                    continue
                fails = failed(found, limit)
                low, high = wilson_interval(int(fails.sum()), len(fails))
                share = fails.mean()
                x = places.index(getattr(cell, field)) + 0.13 * (index - (len(designs) - 1) / 2)
                ax.errorbar(
                    [x], [share], [[share - low], [high - share]], capsize=3, ls="none",
                    color=figures.color(index), marker=figures.MARKERS[index],
                    label=design if getattr(cell, field) == places[0] else None,
                )  # fmt: skip
        ax.set_xticks(range(len(places)), [str(p) for p in places])
        ax.set(xlabel=label, title=f"warm-up {warmup} steps", ylim=(-0.05, 1.05))
        ax.set_xlim(-0.6, len(places) - 0.4)
    axes[0, 0].set_ylabel("share of seeds that fail")
    axes[0, 0].legend()
    return fig


@figures.styled
def loss_figure(cells: dict[Cell, Any]) -> Figure:
    """Training loss by step: rows warm-ups, columns depths."""
    warmups, depths = _values(cells, "warmup"), sorted(_values(cells, "depth"))
    designs = _values(cells, "design")
    fig, axes = figures.figure(
        len(warmups), len(depths), width=3.0, height=2.6, sharex=True, sharey=True
    )
    for cell, found in cells.items():
        ax = axes[warmups.index(cell.warmup), depths.index(cell.depth)]
        steps = STEPS_PER_EPOCH * (0.5 + np.arange(found["losses"].shape[1]))
        figures.band(ax, steps, found["losses"], cell.design, designs.index(cell.design))
        ax.set_title(f"{cell.depth} layers, warm-up {cell.warmup}")
    for ax in axes[-1]:
        ax.set_xlabel("step")
    for ax in axes[:, 0]:
        ax.set(ylabel="training loss", ylim=(0, None))
    axes[0, 0].legend()
    return fig


@figures.styled
def why_figure(cells: dict[Cell, Any]) -> Figure:
    """By layer, before (solid) and after training (dashed): residual, gradients of W_Q and W_V."""
    cells, depths, designs = _least_warmed(cells)
    fig, axes = figures.figure(len(depths), 3, width=3.4, height=2.6, sharey="col")
    labels = ("residual ratio", r"gradient to $W_Q$", r"gradient to $W_V$")
    for cell, found in cells.items():
        row, index = axes[depths.index(cell.depth)], designs.index(cell.design)
        layers = np.arange(1, cell.depth + 1)
        curves = (found["residual_ratio"][..., 1:], gradient(found, "w_q"), gradient(found, "w_v"))
        for ax, label, values in zip(row, labels, curves, strict=True):
            values = _log10(values)
            figures.band(ax, layers, values[:, 0], cell.design, index, marker="")
            after = np.median(values[:, -1], axis=0)
            ax.plot(layers, after, color=figures.color(index), ls="--", lw=1)
            ax.set_ylabel(rf"$\log_{{10}}$ {label}")
            figures.integer_ticks(ax)
        row[1].set_title(f"{cell.depth} layers, warm-up {cell.warmup}; dashed: after training")
    for ax in axes[-1]:
        ax.set_xlabel("layer")
    axes[0, 0].legend()
    return fig


@figures.styled
def during_figure(cells: dict[Cell, Any]) -> Figure:
    """Against the step: residual ratio of the last layer, and gradient to W_Q over all layers."""
    cells, depths, designs = _least_warmed(cells)
    fig, axes = figures.figure(len(depths), 2, width=3.6, height=2.6, sharex=True, sharey="col")
    for cell, found in cells.items():
        row, index = axes[depths.index(cell.depth)], designs.index(cell.design)
        looks = found["accuracy"].shape[1]
        steps = STEPS_PER_EPOCH * found["losses"].shape[1] * np.arange(looks) / (looks - 1)
        size = np.sqrt(np.mean(gradient(found, "w_q") ** 2, axis=-1))
        for ax, values in zip(row, (found["residual_ratio"][..., -1], size), strict=True):
            figures.band(ax, steps, _log10(values), cell.design, index)
            ax.set_title(f"{cell.depth} layers, warm-up {cell.warmup}")
        row[0].set_ylabel(r"$\log_{10}$ residual ratio, last layer")
        row[1].set_ylabel(r"$\log_{10}$ gradient to $W_Q$, all layers")
    for ax in axes[-1]:
        ax.set_xlabel("step")
    axes[0, 0].legend()
    return fig


def _least_warmed(cells):
    """The cells of the shortest warm-up, their depths and their designs."""
    warmup = min(_values(cells, "warmup"))
    kept = {c: r for c, r in cells.items() if c.warmup == warmup}
    return kept, sorted(_values(kept, "depth")), _values(kept, "design")


def _log10(values):
    with np.errstate(divide="ignore"):
        return np.log10(values)


@figures.styled
def border_figure(cells: dict[Cell, Any], limit: float) -> Figure:
    """Accuracy after training over skip gain and learning rate: rows warm-ups, columns depths."""
    fields = ("warmup", "depth", "learning_rate", "gain")
    warmups, depths, rates, gains = (sorted(_values(cells, f)) for f in fields)
    fig, axes = figures.figure(
        len(warmups), len(depths), width=3.2, height=2.3, sharex=True, sharey=True
    )
    for row, warmup in enumerate(warmups):
        for column, depth in enumerate(depths):
            ax, table = axes[row, column], np.full((len(rates), len(gains)), np.nan)
            for cell, found in cells.items():
                if (cell.warmup, cell.depth) == (warmup, depth):
                    place = rates.index(cell.learning_rate), gains.index(cell.gain)
                    table[place] = found["accuracy"][:, -1].mean()
                    fails = failed(found, limit)
                    ax.text(
                        place[1], place[0], f"{fails.sum()}/{len(fails)}", ha="center",
                        va="center", fontsize=8, color="white" if table[place] < 0.6 else "black",
                    )  # fmt: skip
            image = ax.imshow(table, origin="lower", aspect="auto", vmin=0, vmax=1)
            ax.grid(False)
            ax.set_xticks(range(len(gains)), [f"{g:g}" for g in gains])
            ax.set_yticks(range(len(rates)), [f"{r:g}" for r in rates])
            ax.set_title(f"{depth} layers, warm-up {warmup}", fontsize=8)
    for ax in axes[-1]:
        ax.set_xlabel("skip gain")
    for ax in axes[:, 0]:
        ax.set_ylabel("learning rate")
    fig.colorbar(image, ax=axes, label="accuracy; numbers: seeds that fail")
    return fig
