"""The figures of run_architectures, from the arrays that its run folder holds."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.paper.architectures.results import NAMES, SAME, WITHIN, Results
from rank_collapse import pretrained
from rank_collapse.network.surgery import READINGS, VARIANTS
from rank_collapse.paths.chains import alpha_law
from rank_collapse.report import figures
from rank_collapse.report.figures import Axes, Figure
from rank_collapse.report.wording import words
from rank_collapse.theory.bounds import LEMMA_THRESHOLD

LENGTH = "path length k (attention layers passed)"
# {which lengths are left: (label, dashes)}
LEFT = {"up_to": ("lengths up to k", "-"), "without": ("all but k", ":")}


def figures_of(results: Sequence[Results]) -> dict[str, Callable[[], Figure]]:
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


def curve(
    ax: Axes,
    results: Results,
    name: str,
    text: str = "",
    dash: str = "-",
    of: Callable[[Any, str], Any] = lambda values, kind: values,
) -> None:
    """A measure, or what `of` makes of it, by layer or length, of each kind of weights."""
    for index, kind in enumerate(results.kinds):
        values = results.get(kind, name)
        if values is not None:
            label = f"{text}, {NAMES[kind]}" if text else NAMES[kind]
            shown = of(values, kind)
            figures.band(ax, np.arange(shown.shape[1]), shown, label, index, linestyle=dash)


def panels(
    results: Results, shown: Mapping[str, Sequence[tuple]], xlabel: str, **size: float
) -> tuple[Figure, Sequence[Axes]]:
    """A figure and its panels {label: arguments of `curve` for each of its curves}."""
    fig, axes = figures.figure(1, len(shown), **size)
    for ax, (label, curves) in zip(axes[0], shown.items(), strict=True):
        for arguments in curves:
            curve(ax, results, *arguments)
        by_layer(ax, xlabel, label)
    return fig, axes[0]


def rows_of_kinds(
    results: Results, name: str, columns: int, **size: float
) -> tuple[Figure, Iterator[tuple[str, Sequence[Axes]]]]:
    """A figure, and each kind of weights that has a measure with its row of panels."""
    kinds = [kind for kind in results.kinds if results.get(kind, name) is not None]
    fig, axes = figures.figure(len(kinds), columns, **size)
    return fig, zip(kinds, axes, strict=True)


def heat_map(ax: Axes, values: Any, title: str, xlabel: str, ylabel: str, **style: Any) -> None:
    """A matrix whose rows and columns are counted from `first` = 1, with its colours' scale."""
    first, (rows, columns) = style.pop("first", 1), values.shape
    span = (first - 0.5, first + columns - 0.5, first - 0.5, first + rows - 0.5)
    image = ax.imshow(values, origin="lower", extent=span, **style)
    ax.figure.colorbar(image, ax=ax)
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    ax.grid(False)
    figures.integer_ticks(ax)


# {what is drawn solid and dashed of each network: its name}
ALONE_AND_SKIPS = {"SAN": "attention alone", "SAN+skip": "with skips"}


def ratios(found: Results, variant: str) -> np.ndarray | None:
    """Residual ratio at initialisation [s, L+1] of a variant, mean over texts."""
    return found.by_seed("init", f"residuals/{variant}/published/residual_ratio")


def collapse_figure(results: Sequence[Results], setup: Any) -> Figure:
    """Residual ratio by layer at initialisation, mean and standard deviation over draws: attention
    alone (solid) and with skips (dashed)."""
    fig, ((ax,),) = figures.figure(1, 1)
    for index, found in enumerate(results):
        for (variant, text), dash in zip(ALONE_AND_SKIPS.items(), ("-", "--"), strict=True):
            values = ratios(found, variant)
            if values is not None:
                layers, label = np.arange(values.shape[1]), f"{words(found.model.label)}, {text}"
                figures.band(ax, layers, values, label, index, linestyle=dash)
    ax.set(xlabel="layer", ylabel="residual ratio ‖res(X)‖₁,∞ / ‖X‖₁,∞", ylim=(-0.03, 1.03))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


@figures.styled
def residual_figure(results: Results) -> Figure:
    """Relative residual by layer, mean ± one standard deviation over weights and texts: linear axis
    (with the published curves) and, below, the logarithm of the residual, which goes on where
    floating point shows zero. Solid: as the published code has it; dotted: as
    the paper's text says, where these differ; dashed: of tokens as the next layer reads them."""
    logs, depth = results.has("log"), results.model.config.depth
    fig, axes = figures.figure(1 + logs, 4, width=2.9, height=2.5, sharey="row")
    published = pretrained.published_curves(results.model.settings, depth)
    names = ("residuals/{}/{}/residual_ratio", "log/{}/{}/log10_residual")
    layers, handles = np.arange(depth + 1), {}
    for variant, panels in zip(VARIANTS, axes.T, strict=True):
        for kind in (kind for kind in published if kind in results.kinds):
            style = {"ls": "-" if kind == "pretrained" else "--", "color": "#9A9A9A", "lw": 3}
            label = f"published, {NAMES[kind]}"
            panels[0].plot(layers, published[kind][variant], label=label, **style)
        for (index, kind), reading in itertools.product(enumerate(results.kinds), READINGS):
            text = reading == "text"
            style = {"linestyle": ":" if text else "-", "marker": "" if text else "o"}
            label = None if text else NAMES[kind]
            for ax, name in zip(panels, names, strict=False):
                values = results.get(kind, name.format(variant, reading))
                if values is not None:
                    figures.band(ax, layers, values, label, index, **style)
            read = results.get(kind, f"residuals/{variant}/{reading}/read_residual_ratio")
            if read is not None and not text:
                figures.band(panels[0], layers, read, None, index, linestyle="--", marker="")
        panels[0].set(title=words(variant), xlabel="layer")
        panels[-1].set_xlabel("layer")
        figures.integer_ticks(*panels)
        handles |= dict(zip(*panels[0].get_legend_handles_labels()[::-1], strict=True))
    if logs:
        floor = min(ax.dataLim.y0 for ax in axes[1, :2])
        for ax, variant in zip(axes[1], VARIANTS, strict=True):
            ax.set_yscale("symlog", linthresh=10)
            ax.set(ylim=(min(3 * floor, -10), 10), visible=variant in ("SAN", "SAN+MLP"))
        axes[1, 0].set_ylabel("log10 ‖res(X)‖₁,∞")
    top = max(np.nanmax(line.get_ydata(), initial=0) for ax in axes[0] for line in ax.lines)
    ratio = "residual ratio"  # of one token above 1
    axes[0, 0].set(ylim=(-0.03, max(1.05, top + 0.03)), ylabel=ratio)
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return fig


@figures.styled
def token_figure(results: Results) -> Figure:
    """Mean cosine between tokens and ranks by layer, of SAN and of the whole network."""
    labels = {"token_cosine": "mean token cosine", "effective_rank": "effective rank"}
    names, variants = labels | {"stable_rank": "stable rank"}, {"Transformer": "-", "SAN": "--"}
    shown = {
        label: [(f"residuals/{v}/published/{name}", v, dash) for v, dash in variants.items()]
        for name, label in names.items()
        if results.get(results.kinds[0], f"residuals/SAN/published/{name}") is not None
    }
    return panels(results, shown, "layer", width=3.4, height=2.6)[0]


@figures.styled
def length_figure(results: Results) -> Figure:
    """All paths of each length, summed exactly: their size beside the output's, how near to rank
    one they are, and what the output keeps without them."""
    sizes = [("lengths/size", "‖Cₖ‖/‖Y‖"), ("lengths/residual_size", "‖res Cₖ‖/‖res Y‖", "--")]
    shown = {
        "size beside the output": sizes,
        "residual ratio of the sum": [("lengths/residual_ratio",)],
        "cosine with the full output": [(f"lengths/cosine_{w}", *own) for w, own in LEFT.items()],
    }
    fig, axes = panels(results, shown, LENGTH, width=3.6, height=2.8)
    axes[0].set_yscale("log")
    return fig


@figures.styled
def chain_figure(results: Results) -> Figure:
    """Chained attention: residual ratio of the product of attention matrices along random paths;
    the share α that each layer leaves to its skip; the size of all paths of a length that α
    predicts (contraction from single attention matrices) beside the exact one."""
    fig, ((products, shares, sizes),) = figures.figure(1, 3, width=3.6, height=2.8)
    for index, kind in enumerate(results.kinds):
        chain = results.get(kind, "chains/chain_residual")
        lengths = np.arange(1, chain.shape[1] + 1)
        for name, dash, text in (("residual", "-", "1pᵀ"), ("rank_one", ":", "best rank one")):
            values = results.get(kind, f"chains/chain_{name}")
            values = np.moveaxis(values, 1, 2).reshape(-1, len(lengths))
            values = np.maximum(values, np.finfo(values.dtype).tiny)
            label = f"{text}, {NAMES[kind]}"
            figures.quartiles(products, lengths, values, label, index, linestyle=dash, marker="")
        skip, branch = (results.get(kind, f"chains/{n}") for n in ("skip", "branch"))
        figures.band(shares, lengths, skip / (skip + branch), NAMES[kind], index)
        measured = results.get(kind, "lengths/log10_residual")
        if measured is not None:
            k = np.arange(measured.shape[1])
            figures.band(sizes, k, measured, f"exact, {NAMES[kind]}", index)
            known = (skip, branch, results.get(kind, "chains/initial"), chain[:, 0])
            law = alpha_law(*map(jnp.asarray, known), results.model.config.num_heads).by_layer
            sizes.plot(k, law, "--", color=figures.color(index), label="α's law")
    by_layer(products, "path length", "residual ratio of P_path", yscale="log")
    by_layer(shares, "layer", "α, the share of the skip", ylim=(0, 1))
    by_layer(sizes, "path length k", "log10 ‖res(Cₖ)‖₁,∞", ylim=(-12, None))
    return fig


@figures.styled
def bound_figure(results: Results) -> Figure:
    """Per layer and head: the largest spread of scores, which the theory wants below 1.256; γ* and
    β; and how many powers of ten the layer's bound lies above what happens."""
    of_whole, edge = "bounds/Transformer/published", np.log10(LEMMA_THRESHOLD)
    fig, rows = rows_of_kinds(results, f"{of_whole}/gamma", 4, width=3.1, height=2.5)
    for kind, (*maps, tightness) in rows:
        spread, gamma, beta = (
            results.get(kind, f"{of_whole}/{name}").astype(float)
            for name in ("log10_spread", "gamma", "beta")
        )
        reach = max(np.abs(spread.mean(axis=0) - edge).max(), 1e-3)
        around_edge = {"vmin": edge - reach, "vmax": edge + reach, "cmap": "PuOr_r"}
        gamma, beta = (np.log10(np.maximum(values, 1e-45)) for values in (gamma, beta))
        shown = (
            (spread, "log10 max spread of scores", around_edge),
            (gamma, "log10 γ*", {}),
            (beta, "log10 β", {}),
        )
        for ax, (values, title, limits) in zip(maps, shown, strict=True):
            where = ("head", f"layer ({NAMES[kind]})")
            heat_map(ax, values.mean(axis=0), title, *where, aspect="auto", **limits)
        for index, variant in enumerate(("Transformer", "SAN")):
            tight = results.get(kind, f"bounds/{variant}/published/layer_tightness")
            held = results.get(kind, f"bounds/{variant}/published/admissible").all(axis=2)
            label = f"{variant}: condition held in {held.mean():.0%}"
            figures.band(tightness, np.arange(1, tight.shape[1] + 1), tight, label, index)
        by_layer(tightness, "layer", "log10 bound − log10 residual")
    return fig


@figures.styled
def next_token_figure(results: Results) -> Figure:
    """Next tokens from some of the paths alone, read out by the language-model head: loss and share
    of positions with the whole network's next token, of lengths up to k and of all but k (grey:
    within 1 % of the loss, 99 % of positions); the output and the loss's gradient at the input,
    split by path length (‖C_k‖ and ‖G_k‖ over their sums)."""

    def beside_whole(loss, kind):
        return loss / results.get(kind, "next_token/loss")[:, None]

    losses, same = (
        [(f"next_token/{name}_{which}", *own, *of) for which, own in LEFT.items()]
        for name, of in (("loss", [beside_whole]), ("same", []))
    )
    output = ("lengths/size", "output", "--", lambda a, kind: a / a.sum(axis=1, keepdims=True))
    shown = {
        "loss over the whole network's": losses,
        "share of same next tokens": same,
        "share of the norms": [output, ("gradients/gradient_share", "gradient")],
    }
    fig, axes = panels(results, shown, LENGTH, width=3.6, height=2.8)
    axes[0].axhspan(1 - WITHIN, 1 + WITHIN, color="#BBBBBB", alpha=0.5)
    axes[0].set(yscale="log")
    axes[1].axhline(SAME, color="#9A9A9A", lw=1)
    return fig


@figures.styled
def layer_figure(results: Results) -> Figure:
    """Angle between the tokens of any two layers (0: the same direction, 0.5: at right angles); how
    far each layer turns them, and the output without it; each branch beside the stream that it
    joins."""
    fig, rows = rows_of_kinds(results, "layers/angle", 3, width=3.4, height=2.7)
    for kind, (angles, influences, branches) in rows:
        angle = results.get(kind, "layers/angle").mean(axis=0)
        limits = {"vmin": 0, "vmax": max(0.5, angle.max()), "first": 0}
        heat_map(angles, angle, "angle / π", "layer", f"layer ({NAMES[kind]})", **limits)
        lost = results.get(kind, "removal/cosine")
        curves = (
            (
                influences,
                results.get(kind, "layers/block_influence"),
                "1 − cos to the layer before",
            ),
            (influences, None if lost is None else 1 - lost, "1 − cos of the output without it"),
            (branches, results.get(kind, "layers/attention_ratio"), "attention"),
            (branches, results.get(kind, "layers/mlp_ratio"), "mlp"),
        )
        for index, (ax, values, label) in enumerate(curves):
            if values is not None:
                figures.band(ax, np.arange(1, len(angle)), values, label, index % 2)
        by_layer(influences, "layer", "influence", yscale="log")
        by_layer(branches, "layer", "‖branch‖ / ‖stream‖", yscale="log")
    return fig


@figures.styled
def removal_figure(results: Results) -> Figure:
    """One layer left out: how much what later layers add changes (‖Δ' − Δ‖/‖Δ‖), and the loss, or
    the output where there is no language-model head."""
    fig, rows = rows_of_kinds(results, "removal/later", 2, width=3.8, height=2.9)
    for index, (kind, (changes, losses)) in enumerate(rows):
        later = results.get(kind, "removal/later").mean(axis=0)
        shown = np.ma.masked_where(np.tril(np.ones_like(later)) > 0, later)
        title, where = "relative change of what it adds", f"layer left out ({NAMES[kind]})"
        limits = {"vmin": 0, "vmax": min(1, shown.max())}
        heat_map(changes, shown, title, "later layer", where, **limits)
        loss = results.get(kind, "removal/loss_without")
        if loss is None:
            change, label = results.get(kind, "removal/error"), "‖Y − Y without‖ / ‖Y‖"
        else:
            change = loss - results.get(kind, "removal/loss")[:, None]
            label = "loss without the layer − loss, nats"
        figures.band(losses, np.arange(1, len(later) + 1), change, NAMES[kind], index)
        by_layer(losses, "layer left out", label)
    return fig


@figures.styled
def attention_figure(results: Results) -> Figure:
    """Every head: entropy of its rows, its largest weight, and the mean weight of the first token
    (an attention sink where it is large)."""
    fig, rows = rows_of_kinds(results, "attention/entropy", 3, width=3.3, height=2.6)
    panels = (("entropy", "entropy, nats", None), ("largest_weight", "largest weight", 1.0))
    panels += (("first_column", "mean weight of the first token", 1.0),)
    for kind, axes in rows:
        for ax, (name, title, top) in zip(axes, panels, strict=True):
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
