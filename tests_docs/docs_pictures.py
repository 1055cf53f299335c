"""Draws the small pictures of docs/: `python -m tests_docs.docs_pictures`."""

import re

import jax
import numpy as np

import rank_collapse as rc
from rank_collapse.report import figures
from tests.support.folders import REPOSITORY

BLOCK = r"<!-- test: {} -->\n```python\n(.*?)```"
SEEN = 1e-7  # float32 shows no smaller residual


def draw_ratios(ax, curves):
    """Draws {label: residual ratio by layer} as curves."""
    for index, (label, curve) in enumerate(curves.items()):
        curve = np.asarray(curve)
        visible = np.where(curve > SEEN, curve, np.nan)
        figures.band(ax, np.arange(len(curve)), visible[None], label, index)
    ax.set(yscale="log", xlabel="layer", ylabel="‖res(X)‖₁,∞ / ‖X‖₁,∞")
    ax.legend()
    figures.integer_ticks(ax)


@figures.styled
def draw_collapse():
    """Draws log10 of the residual by layer of four variants; float32 is dotted."""
    fig, axes = figures.figure(width=4.6, height=3.4)
    ax, x = axes[0, 0], jax.random.normal(jax.random.key(1), (32, 64))
    for index, (name, network, shift) in enumerate(
        (
            ("attention alone", rc.san, 4),
            ("attention and MLPs", rc.san_mlp, -8),
            ("attention with skips", rc.san_skip, 4),
            ("Transformer", rc.transformer, -10),
        )
    ):
        config = network(depth=12, num_heads=4, d_model=64)
        params = rc.init(jax.random.key(0), config)
        profile = np.asarray(rc.log_residual_profile(params, x, config))
        hidden = rc.apply(params, x, config).hidden
        plain = np.asarray(rc.composite_norm(rc.residual(hidden)))
        plain = np.log10(np.where(plain > 0, plain, np.nan))
        style = {"color": figures.color(index), "marker": figures.MARKERS[index]}
        ax.plot(profile, **style)
        ax.plot(plain, ls=":", color=style["color"])
        ax.annotate(
            name,
            (12, profile[-1]),
            (7, shift),
            textcoords="offset points",
            color=style["color"],
            fontsize=10,
            annotation_clip=False,
        )
    ax.set_yscale("symlog", linthresh=10)
    ax.set(xlabel="layer", ylabel="log10 of the residual")
    figures.integer_ticks(ax)
    return fig


@figures.styled
def draw_skip_gain(gains, curves):
    """Draws the residual ratio by layer, a curve for each gain of the skip."""
    fig, axes = figures.figure(width=6.5, height=3.2)
    names = (f"skip gain {gain:g}" for gain in gains)
    draw_ratios(axes[0, 0], dict(zip(names, curves, strict=True)))
    return fig


@figures.styled
def draw_residual():
    """Draws six tokens with their mean, and residual ratios by layer with skips and without."""
    fig, axes = figures.figure(columns=2, width=3.8, height=3.0)
    tokens, ax = np.random.default_rng(3).normal((2, 1), size=(6, 2)), axes[0, 0]
    mean = tokens.mean(axis=0)
    for token in tokens:
        ax.plot(*zip(mean, token, strict=True), color="0.6", lw=1)
    ax.plot(*tokens.T, "o", label="tokens")
    ax.plot(*mean, "s", color="black", label="mean token")
    ax.set(xlabel="first feature", ylabel="second feature", aspect="equal")
    ax.legend()
    x = jax.random.normal(jax.random.key(1), (32, 64))
    curves = {}
    for name, network in (("no skips", rc.san), ("skips", rc.san_skip)):
        config = network(depth=8, num_heads=4, d_model=64)
        trace = rc.apply(rc.init(jax.random.key(0), config), x, config)
        curves[name] = rc.profile(trace.hidden)["residual_ratio"]
    draw_ratios(axes[0, 1], curves)
    return fig


@figures.styled
def draw_paths():
    """Draws how far sums of short paths are from the whole output, frozen and truncated."""
    config = rc.transformer(depth=6, num_heads=2, d_model=32)
    params = rc.init(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (16, 32))
    frozen = rc.path_contributions(params, x, config)
    lengths = np.arange(7)
    cut = rc.truncated(params, x, config, length=lengths)
    fig, axes = figures.figure(width=5.5, height=3.0)
    ax = axes[0, 0]
    ends = {
        "frozen paths up to K": frozen.up_to(),
        "network truncated at K": cut.by_length.sum(axis=1) + cut.offset,
    }
    for index, (name, outputs) in enumerate(ends.items()):
        error = np.asarray([np.linalg.norm(f - frozen.total) for f in outputs])
        error = error / np.linalg.norm(frozen.total)
        figures.band(ax, lengths, np.where(error > 1e-6, error, np.nan)[None], name, index)
    ax.set(yscale="log", xlabel="K", ylabel="distance to the output, relative")
    ax.legend()
    figures.integer_ticks(ax)
    return fig


@figures.styled
def draw_seeds(mlp, transformer, equinox):
    """Draws results of sweeps by step: the mean over seeds, and one standard deviation."""
    fig, axes = figures.figure(columns=3, width=3.2, height=2.8)
    for ax, result, metric, axis, title in (
        (axes[0, 0], mlp, "loss", "learning_rate", "MLP, optax"),
        (axes[0, 1], transformer, "loss", "rate", "Transformer on bytes, Flax NNX"),
        (axes[0, 2], equinox, "accuracy", "width", "MLP, Equinox"),
    ):
        smooth = result.metrics[metric].coarsen(step=10).mean()
        for index, value in enumerate(smooth[axis].values):
            label = f"{axis.replace('_', ' ')} {value:g}"
            runs = smooth.sel({axis: value})
            figures.band(ax, runs["step"], runs.values, label, index, markevery=5)
        ax.set(xlabel="step", ylabel=metric, title=title)
        ax.legend()
    return fig


def run_block(page, name):
    """Runs a marked block of a page; returns the names that it defines."""
    scope = {}
    text = (REPOSITORY / "docs" / f"{page}.md").read_text("utf-8")
    exec(re.search(BLOCK.format(name), text, re.DOTALL)[1], scope)
    return scope


if __name__ == "__main__":
    scope = run_block("networks", "sweep")
    results = (run_block("seeds", f"{n} seeds")["result"] for n in ("optax", "nnx", "equinox"))
    pictures = {
        "seeds": draw_seeds(*results),
        "skip_gain": draw_skip_gain(scope["gains"], scope["curves"]),
        "rank_collapse": draw_collapse(),
        "concept_residual": draw_residual(),
        "concept_paths": draw_paths(),
    }
    for name, fig in pictures.items():
        fig.savefig(REPOSITORY / "docs" / f"{name}.png", dpi=150, bbox_inches="tight")
