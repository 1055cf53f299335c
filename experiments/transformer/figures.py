"""Figures of run_transformer, from the results of `training.results_of`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.trained.training import Setup, kept
from rank_collapse.report import figures
from rank_collapse.training.tasks import sequences

KINDS = {
    "encoder": ("encoder: self-attention", "source", "source"),
    "decoder": ("decoder: causal self-attention", "inputs", "inputs"),
    "cross": ("decoder: encoder-decoder attention", "inputs", "source"),
}
LABELS = {"source": "source token", "inputs": "target token read"}
MAX_LAYERS = 4  # of the attention figure: evenly spaced ones, the last among them


def figures_of(results: dict[str, Any], setup: Setup) -> dict[str, Callable[[], Figure]]:
    """What draws each figure, by name."""
    draw = {"curves": curve_figure, "attention": attention_figure, "residual": residual_figure}
    return {name: functools.partial(fn, results, setup) for name, fn in draw.items()}


@figures.styled
def curve_figure(results: dict[str, Any], setup: Setup) -> Figure:
    """Loss and held-out token accuracy after each epoch, and the sequences written exactly."""
    fig, axes = figures.figure(1, 2)
    seeds, curves = kept(results), results["curves"]
    epochs = np.arange(1, results["losses"].shape[1] + 1)
    losses = (("training", results["losses"]), ("held out", curves["loss"]))
    for index, (label, values) in enumerate(losses):
        figures.band(axes[0, 0], epochs, values[seeds], label=label, index=index, marker="")
    axes[0, 0].set(xlabel="epoch", ylabel="loss per token (nats)", yscale="log")
    figures.band(
        axes[0, 1], epochs, curves["accuracy"][seeds], label="tokens, teacher forced", index=1,
        marker="",
    )  # fmt: skip
    exact = results["exact"][seeds]
    axes[0, 1].errorbar(
        epochs[-1:], exact.mean(keepdims=True), exact.std(keepdims=True), capsize=2,
        label=f"sequences written exactly, at the end ({exact.mean():.2f})",
        color=figures.color(2), marker=figures.MARKERS[2], linestyle="",
    )  # fmt: skip
    axes[0, 1].set(xlabel="epoch", ylabel="share, held out", ylim=(0, 1.03))
    for ax in axes[0]:
        ax.legend()
    figures.integer_ticks(*axes[0])
    fig.suptitle(f"{setup.title}, {len(seeds)} seed{'s' * (len(seeds) != 1)}")
    return fig


@figures.styled
def attention_figure(results: dict[str, Any], setup: Setup) -> Figure:
    """Attention weights of the three kinds, mean over heads, by layer, on one held-out pair."""
    seed = int(kept(results)[0])
    shown = {name: values[seed] for name, values in results["shown"].items()}
    maps = {kind: results["attention"][kind][seed].mean(axis=1) for kind in KINDS}
    depth = len(maps["encoder"])
    count = min(depth, MAX_LAYERS)
    layers = np.unique(np.linspace(depth - 1, 0, count).round().astype(int))
    fig, axes = figures.figure(len(layers), len(KINDS), width=3.1, height=3.3)
    for row, layer in enumerate(layers):
        for ax, (kind, (title, queries, keys)) in zip(axes[row], KINDS.items(), strict=True):
            picture = ax.imshow(maps[kind][layer], vmin=0, vmax=1, cmap="Blues")
            ax.grid(visible=False)
            ax.set(xlabel=LABELS[keys], ylabel=LABELS[queries], title=f"layer {layer + 1}")
            ax.set_xticks(range(len(shown[keys])), named(shown[keys]), fontsize=7)
            ax.set_yticks(range(len(shown[queries])), named(shown[queries]), fontsize=7)
            if row == 0:
                ax.set_title(f"{title}\nlayer {layer + 1}")
    fig.colorbar(picture, ax=axes, shrink=0.6, label="attention weight, mean over heads")
    fig.suptitle(
        f"{setup.title}, seed {seed}: answer {' '.join(named(shown['labels']))}, "
        f"written {' '.join(named(shown['written']))}"
    )
    return fig


@figures.styled
def residual_figure(results: dict[str, Any], setup: Setup) -> Figure:
    """Residual of the tokens by layer of the trained encoder and decoder."""
    fig, axes = figures.figure(1, 1)
    seeds = kept(results)
    for index, (half, values) in enumerate(sorted(results["residual"].items(), reverse=True)):
        layers = np.arange(values.shape[1])
        figures.band(axes[0, 0], layers, values[seeds], label=half, index=index)
    axes[0, 0].set(
        xlabel="layer (0: input)", ylabel="‖res(X)‖ / ‖X‖, trained", ylim=(0, 1.03),
        title=setup.title,
    )  # fmt: skip
    axes[0, 0].legend()
    figures.integer_ticks(axes[0, 0])
    return fig


def named(ids: Sequence[int]) -> list[str]:
    """Tokens as short words: marks by symbols, the rest by number."""
    marks = {sequences.PAD: "·", sequences.BEGIN: "⊢", sequences.END: "⊣"}
    return [marks.get(int(i), str(int(i) - sequences.NUM_MARKS)) for i in ids]
