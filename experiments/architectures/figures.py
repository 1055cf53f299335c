"""The figures of run_architectures, from the arrays that its run folder holds."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.architectures.results import NAMES, SAME, WITHIN, Results
from rank_collapse import pretrained
from rank_collapse.network.surgery import VARIANTS, variants_of
from rank_collapse.paths.chains import alpha_law
from rank_collapse.report import figures
from rank_collapse.report.figures import Axes, Figure
from rank_collapse.theory.bounds import LEMMA_THRESHOLD

LENGTH = "path length k (attention layers passed)"
# {which lengths are left: (label, dashes)}
LEFT = {"up_to": ("lengths up to k", "-"), "without": ("all but k", ":")}


def figures_of(results: list[Results]) -> dict[str, Callable[[], Figure]]:
    """What draws each figure of what was measured, by file name."""
    return {
        f"{name}_{slug(found.model.label)}": partial(draw, found)
        for found in results
        for name, (part, draw) in FIGURES.items()
        if found.has(part)
    }


def slug(label: str) -> str:
    """The label as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", label)


def by_layer(ax: Axes, xlabel: str, ylabel: str, **more: Any) -> None:
    """The labels of a panel of curves over layers or lengths."""
    ax.set(xlabel=xlabel, ylabel=ylabel, **more)
    figures.integer_ticks(ax)
    if ax.get_legend_handles_labels()[0]:  # below the axes, where it hides no curve
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4.5)


def curve(ax: Axes, results: Results, name: str, text: str = "", dash: str = "-") -> None:
    """A measure by layer or length, of each kind of weights that has it."""
    for index, kind in enumerate(results.kinds):
        values = results.get(kind, name)
        if values is not None:
            label = f"{text}, {NAMES[kind]}" if text else NAMES[kind]
            figures.band(ax, np.arange(values.shape[1]), values, label, index, linestyle=dash)


def heat_map(ax: Axes, values: Any, title: str, xlabel: str, ylabel: str, **style: Any) -> None:
    """A matrix whose rows and columns are counted from `first` = 1, with its colours' scale."""
    first, (rows, columns) = style.pop("first", 1), values.shape
    span = (first - 0.5, first + columns - 0.5, first - 0.5, first + rows - 0.5)
    image = ax.imshow(values, origin="lower", extent=span, **style)
    ax.figure.colorbar(image, ax=ax)
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    ax.grid(False)
    figures.integer_ticks(ax)


@figures.styled
def residual_figure(results: Results) -> Figure:
    """Relative residual by layer, mean ± one standard deviation over texts: linear axis (with the
    published curves) and, below, the logarithm of the residual, which goes on where floating point
    shows zero."""
    logs = results.has("log")
    fig, axes = figures.figure(2 if logs else 1, 4, width=2.9, height=2.5, sharey="row")
    model, depth = results.model, results.model.config.depth
    published = pretrained.published_curves(model.settings, depth)
    layers, pairs = np.arange(depth + 1), variants_of(model.family)
    parts = ("residuals/{}/{}/residual_ratio", "log/{}/{}/log10_residual")[: len(axes)]
    for column, variant in enumerate(VARIANTS):
        top = axes[0, column]
        for kind, curves in published.items():
            if kind in results.kinds:
                dash = "-" if kind == "pretrained" else "--"
                label = f"published, {NAMES[kind]}"
                top.plot(layers, curves[variant], dash, color="#9A9A9A", lw=3, label=label)
        for index, kind in enumerate(results.kinds):
            for reading_ in [r for v, r in pairs if v == variant]:
                text = reading_ == "text"
                style = {"linestyle": ":" if text else "-", "alpha": 0.75 if text else 1.0}
                label = NAMES[kind] + (" (as the text says)" if text else "")
                for ax, part in zip(axes[:, column], parts, strict=True):
                    values = results.get(kind, part.format(variant, reading_))
                    if values is not None:
                        figures.band(ax, layers, values, label, 2 * text + index, **style)
        top.set(title=variant, ylim=(-0.03, 1.05), xlabel="layer")
        axes[-1, column].set_xlabel("layer")
        for ax in axes[:, column]:
            figures.integer_ticks(ax)
    if logs:
        floor = min(ax.dataLim.y0 for ax in axes[1, :2])
        for ax, variant in zip(axes[1], VARIANTS, strict=True):
            ax.set_yscale("symlog", linthresh=10)
            ax.set_ylim(min(3 * floor, -10), 10)
            ax.set_visible(variant in ("SAN", "SAN+MLP"))
        axes[1, 0].set_ylabel("log10 ‖res(X)‖₁,∞")
    axes[0, 0].set_ylabel("‖res(X)‖₁,∞ / ‖X‖₁,∞")
    handles = {}
    for ax in axes[0]:
        handles |= dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return fig


@figures.styled
def token_figure(results: Results) -> Figure:
    """Mean cosine between tokens and ranks by layer, of SAN and of the whole network."""
    labels = {"token_cosine": "mean token cosine", "effective_rank": "effective rank"}
    labels["stable_rank"] = "stable rank"
    known = results.names(results.kinds[0])
    present = [measure for measure in labels if f"residuals/SAN/published/{measure}" in known]
    fig, axes = figures.figure(1, len(present), width=3.4, height=2.6)
    for ax, measure in zip(axes[0], present, strict=True):
        for variant, dash in (("Transformer", "-"), ("SAN", "--")):
            curve(ax, results, f"residuals/{variant}/published/{measure}", variant, dash)
        by_layer(ax, "layer", labels[measure])
    return fig


@figures.styled
def length_figure(results: Results) -> Figure:
    """All paths of each length, summed exactly: their size beside the output's, how near to rank
    one they are, and what the output keeps without them."""
    fig, axes = figures.figure(1, 3, width=3.6, height=2.8)
    sizes, ratio, cosine = axes[0]
    curve(sizes, results, "lengths/size", "‖Cₖ‖/‖Y‖")
    curve(sizes, results, "lengths/residual_size", "‖res Cₖ‖/‖res Y‖", "--")
    curve(ratio, results, "lengths/residual_ratio")
    for which, (text, dash) in LEFT.items():
        curve(cosine, results, f"lengths/cosine_{which}", text, dash)
    labels = ("size beside the output", "residual ratio of the sum", "cosine with the full output")
    for ax, label in zip(axes[0], labels, strict=True):
        by_layer(ax, LENGTH, label)
    axes[0, 0].set_yscale("log")
    return fig


@figures.styled
def chain_figure(results: Results) -> Figure:
    """Chained attention: residual ratio of the product of attention matrices along random paths;
    the share α that each layer leaves to its skip; the size of all paths of a length that α
    predicts (contraction from single attention matrices) beside the exact one."""
    fig, axes = figures.figure(1, 3, width=3.6, height=2.8)
    for index, kind in enumerate(results.kinds):
        chain = results.get(kind, "chains/chain_residual")
        lengths = np.arange(1, chain.shape[1] + 1)
        for name, dash, text in (("residual", "-", "1pᵀ"), ("rank_one", ":", "best rank one")):
            values = results.get(kind, f"chains/chain_{name}")
            values = np.moveaxis(values, 1, 2).reshape(-1, len(lengths))
            median, low, high = np.percentile(
                np.maximum(values, np.finfo(values.dtype).tiny), [50, 25, 75], axis=0
            )
            style = {"color": figures.color(index), "linestyle": dash}
            axes[0, 0].plot(lengths, median, label=f"{text}, {NAMES[kind]}", **style)
            axes[0, 0].fill_between(lengths, low, high, color=style["color"], alpha=0.2, lw=0)
        skip, branch = (results.get(kind, f"chains/{n}") for n in ("skip", "branch"))
        figures.band(axes[0, 1], lengths, skip / (skip + branch), NAMES[kind], index)
        measured = results.get(kind, "lengths/log10_residual")
        if measured is not None:
            k = np.arange(measured.shape[1])
            figures.band(axes[0, 2], k, measured, f"exact, {NAMES[kind]}", index)
            given = (skip, branch, results.get(kind, "chains/initial"), chain[:, 0])
            law = alpha_law(*map(jnp.asarray, given), results.model.config.num_heads).by_layer
            axes[0, 2].plot(k, law, "--", color=figures.color(index), label="α's law")
    by_layer(axes[0, 0], "path length", "residual ratio of P_path", yscale="log")
    by_layer(axes[0, 1], "layer", "α, the share of the skip", ylim=(0, 1))
    by_layer(axes[0, 2], "path length k", "log10 ‖res(Cₖ)‖₁,∞", ylim=(-12, None))
    return fig


@figures.styled
def bound_figure(results: Results) -> Figure:
    """Per layer and head: the largest spread of scores, which the theory wants below 1.256; γ* and
    β; and how many powers of ten the layer's bound lies above what happens."""
    kinds = results.kinds
    fig, axes = figures.figure(len(kinds), 4, width=3.1, height=2.5)
    panels = {"log10_spread": "log10 max spread of scores", "gamma": "log10 γ*", "beta": "log10 β"}
    for row, kind in enumerate(kinds):
        for ax, (name, title) in zip(axes[row], panels.items(), strict=False):
            values = results.get(kind, f"bounds/Transformer/published/{name}").astype(float)
            limits = {}
            if name != "log10_spread":
                values = np.log10(np.maximum(values, 1e-45))
            else:
                edge = np.log10(LEMMA_THRESHOLD)
                reach = max(np.abs(values.mean(axis=0) - edge).max(), 1e-3)
                limits = {"vmin": edge - reach, "vmax": edge + reach, "cmap": "PuOr_r"}
            limits["aspect"] = "auto"
            heat_map(ax, values.mean(axis=0), title, "head", f"layer ({NAMES[kind]})", **limits)
        for index, variant in enumerate(("Transformer", "SAN")):
            tight = results.get(kind, f"bounds/{variant}/published/layer_tightness")
            held = results.get(kind, f"bounds/{variant}/published/admissible").all(axis=2)
            layers = np.arange(1, tight.shape[1] + 1)
            label = f"{variant}: condition held in {held.mean():.0%}"
            figures.band(axes[row, 3], layers, tight, label, index)
        by_layer(axes[row, 3], "layer", "log10 bound − log10 residual")
    return fig


@figures.styled
def next_token_figure(results: Results) -> Figure:
    """Next tokens from some of the paths alone, read out by the language-model head: loss and share
    of positions with the whole network's next token, of lengths up to k and of all but k (grey:
    within 1 % of the loss, 99 % of positions); the output and the loss's gradient at the input,
    split by path length (‖C_k‖ and ‖G_k‖ over their sums)."""
    fig, axes = figures.figure(1, 3, width=3.6, height=2.8)
    for index, kind in enumerate(results.kinds):
        loss = results.get(kind, "next_token/loss")
        if loss is None:
            continue
        for which, (text, dash) in LEFT.items():
            change = results.get(kind, f"next_token/loss_{which}") / loss[:, None]
            k, label = np.arange(change.shape[1]), f"{text}, {NAMES[kind]}"
            figures.band(axes[0, 0], k, change, label, index, linestyle=dash)
        size = results.get(kind, "lengths/size")
        if size is not None:
            size = size / size.sum(axis=1, keepdims=True)
            label = f"output, {NAMES[kind]}"
            figures.band(axes[0, 2], k, size, label, index, linestyle="--")
    for which, (text, dash) in LEFT.items():
        curve(axes[0, 1], results, f"next_token/same_{which}", text, dash)
    curve(axes[0, 2], results, "gradients/gradient_share", "gradient")
    axes[0, 0].axhspan(1 - WITHIN, 1 + WITHIN, color="#BBBBBB", alpha=0.5)
    axes[0, 1].axhline(SAME, color="#9A9A9A", lw=1)
    axes[0, 0].set(yscale="log")
    labels = ("loss over the whole network's", "share of same next tokens", "share of the norms")
    for ax, label in zip(axes[0], labels, strict=True):
        by_layer(ax, LENGTH, label)
    return fig


@figures.styled
def layer_figure(results: Results) -> Figure:
    """Angle between the tokens of any two layers (0: the same direction, 0.5: at right angles); how
    far each layer turns them, and the output without it; each branch beside the stream that it
    joins."""
    kinds = [k for k in results.kinds if results.get(k, "layers/angle") is not None]
    fig, axes = figures.figure(len(kinds), 3, width=3.4, height=2.7)
    for row, kind in enumerate(kinds):
        angle = results.get(kind, "layers/angle").mean(axis=0)
        limits = {"vmin": 0, "vmax": max(0.5, angle.max()), "first": 0}
        heat_map(axes[row, 0], angle, "angle / π", "layer", f"layer ({NAMES[kind]})", **limits)
        layers = np.arange(1, angle.shape[0])
        influence = results.get(kind, "layers/block_influence")
        figures.band(axes[row, 1], layers, influence, "1 − cos to the layer before", 0)
        lost = results.get(kind, "removal/cosine")
        if lost is not None:
            figures.band(axes[row, 1], layers, 1 - lost, "1 − cos of the output without it", 1)
        for index, name in enumerate(("attention", "mlp")):
            ratio = results.get(kind, f"layers/{name}_ratio")
            if ratio is not None:
                figures.band(axes[row, 2], layers, ratio, name, index)
        by_layer(axes[row, 1], "layer", "influence", yscale="log")
        by_layer(axes[row, 2], "layer", "‖branch‖ / ‖stream‖", yscale="log")
    return fig


@figures.styled
def removal_figure(results: Results) -> Figure:
    """One layer left out: how much what later layers add changes (‖Δ' − Δ‖/‖Δ‖), and the loss, or
    the output where there is no language-model head."""
    kinds = [k for k in results.kinds if results.get(k, "removal/later") is not None]
    fig, axes = figures.figure(len(kinds), 2, width=3.8, height=2.9)
    for row, kind in enumerate(kinds):
        later = results.get(kind, "removal/later").mean(axis=0)
        shown = np.ma.masked_where(np.tril(np.ones_like(later)) > 0, later)
        heat_map(
            axes[row, 0],
            shown,
            "relative change of what it adds",
            "later layer",
            f"layer left out ({NAMES[kind]})",
            vmin=0,
            vmax=min(1, shown.max()),
        )
        layers = np.arange(1, len(later) + 1)
        loss = results.get(kind, "removal/loss_without")
        if loss is None:
            change, label = results.get(kind, "removal/error"), "‖Y − Y without‖ / ‖Y‖"
        else:
            change = loss - results.get(kind, "removal/loss")[:, None]
            label = "loss without the layer − loss, nats"
        figures.band(axes[row, 1], layers, change, NAMES[kind], row)
        by_layer(axes[row, 1], "layer left out", label)
    return fig


@figures.styled
def attention_figure(results: Results) -> Figure:
    """Every head: entropy of its rows, its largest weight, and the mean weight of the first token
    (an attention sink where it is large)."""
    kinds = [k for k in results.kinds if results.get(k, "attention/entropy") is not None]
    fig, axes = figures.figure(len(kinds), 3, width=3.3, height=2.6)
    panels = (("entropy", "entropy, nats", None), ("largest_weight", "largest weight", 1.0))
    panels += (("first_column", "mean weight of the first token", 1.0),)
    for row, kind in enumerate(kinds):
        for ax, (name, title, top) in zip(axes[row], panels, strict=True):
            values = results.get(kind, f"attention/{name}").mean(axis=0)
            limits = {"vmin": 0, "vmax": top, "aspect": "auto"}
            heat_map(ax, values, title, "head", f"layer ({NAMES[kind]})", **limits)
    return fig


# Name: (part it shows, what draws it).
FIGURES = {
    "residuals": ("residuals", residual_figure),
    "tokens": ("residuals", token_figure),
    "lengths": ("lengths", length_figure),
    "chains": ("chains", chain_figure),
    "bounds": ("bounds", bound_figure),
    "next_token": ("next_token", next_token_figure),
    "layers": ("layers", layer_figure),
    "removal": ("removal", removal_figure),
    "attention": ("attention", attention_figure),
}
