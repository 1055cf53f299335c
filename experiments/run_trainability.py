"""Trainability: which residual designs train at which depth, and why deep Post-LN does not.

Liu et al., "Understanding the difficulty of training Transformers" (2020, table 1): Post-LN of 12
and 18 layers diverges on translation, Pre-LN and Admin train. Here an encoder learns to reverse
letters, token by token, at a size that seeds can be counted at. Three parts: designs by depth, with
and without warm-up; the border of Post-LN in skip gain, learning rate and warm-up; and batch sizes.
Every network is also measured before and while it trains: residual ratio and token cosine by layer,
and the gradients to its matrices, of the very seeds whose failures are counted.

    python -m experiments.run_trainability
    python -m experiments.run_trainability --parts=designs --depths=18 --warmup=0

A seed fails if its loss is not finite or its accuracy at the end is what a guess reaches. Expected
with 18 layers and no warm-up: Post-LN fails in 8 of 8 seeds, Pre-LN, Admin and DeepNorm in none.
The run goes on after the last finished cell when it is started again; asked for other cells of the
same sizes, it trains those that its folder lacks and shows those that are asked for.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.figure import Figure

import rank_collapse as rc
from experiments.shell import cli, vocabulary
from experiments.shell.experiment import Drawing, Experiment
from experiments.shell.flag_values import check_names
from experiments.shell.memory_budget import MemoryBudget
from experiments.trained import arguments
from experiments.trained.program import Training, of_models, results_of_cells
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.inputs import input_states
from rank_collapse.report import figures
from rank_collapse.report.claims import Row, of_mean
from rank_collapse.report.page import Comparison
from rank_collapse.report.shares import wilson_interval
from rank_collapse.runs.folder import RunFolder
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.recipe import Hyper, Recipe, config_of
from rank_collapse.training.tasks import examples, sequences
from rank_collapse.training.training import Model, batch_forward

SOURCE = "Liu et al. 2020, table 1: WMT'14 English-German, encoder and decoder, with warm-up"

# WMT'14 English-German BLEU at 6, 12 and 18 layers, Liu et al. 2020, table 1; None: diverged.
PUBLISHED = {
    "post": {6: 27.80, 12: None, 18: None},
    "pre": {6: 27.27, 12: 28.26, 18: 28.38},
    "admin": {6: 27.90, 12: 28.58, 18: 29.03},
}

PARTS = ("designs", "border", "batch")

# Flags that say which cells are asked for; what a cell gives does not depend on the others.
ASKED = (
    "parts", "depths", "designs", "warmup", "learning_rate", "batch_size", "border_depths",
    "border_gains", "border_rates", "batch_sizes", "batch_depth",
)  # fmt: skip

STEPS_PER_EPOCH = 25  # of which the training loss is the mean
LOOKS = 4  # at the networks while they train, besides the one before
MEASURES = ("token_cosine", "residual_ratio")
GRADIENTS = ("w_q", "w_k", "w_v", "w_o", "w_in", "w_out")
LOOKED_AT = 8  # examples whose hidden states are measured
FLOATS = {"skip_gain": 1.0, "branch_gain": 1.0, "init_gain": 1.0}

FLAGS = cli.make_flags("trainability", num_seeds=8, shows="failed")
define = cli.definer(FLAGS)
define("list", "parts", list(PARTS), f"What is trained, out of {', '.join(PARTS)}.")
define("list", "designs", ["post", "pre", "admin", "deepnorm"], "Names of residual designs.")
vocabulary.define(
    FLAGS, least={"num_tokens": 1, "n_eval_data": 8}, num_heads=4, d_model=48, d_ff=96,
    num_tokens=16, num_labels=10, n_eval_data=64, batch_size=32, learning_rate=1e-3,
    memory_gb=None,
)  # fmt: skip
vocabulary.alias(FLAGS, **arguments.PUBLISHED_NAMES)
define("enum", "task", "reverse", "What is learned, token by token.", sequences.TASKS)
define("integer", "n_steps", 300, "Training steps.", lower_bound=1)
define("integer", "grid_seeds", 4, "Seeds of each cell of border and batch.", lower_bound=1)
define("integer", "batch_depth", 18, "Layers of the networks of that part.", lower_bound=1)
for name, default, text in (
    ("depths", [6, 12, 18, 36], "Layers."),
    ("border_depths", [6, 12, 18], "Depths of the border."),
    ("batch_sizes", [8, 64], "Batch sizes compared."),
):
    vocabulary.numbers(FLAGS, name, default, text, lower_bound=1)
vocabulary.numbers(FLAGS, "warmup", [0, 100], "Steps of the warm-up.", lower_bound=0)
for name, default, text in (
    ("border_gains", [1.0, 1.5, 2.0, 3.0], "Skip gains of Post-LN there."),
    ("border_rates", [3e-4, 1e-3, 3e-3], "Learning rates."),
):
    vocabulary.numbers(FLAGS, name, default, text, kind=float, lower_bound=0.0)


@dataclass(frozen=True)
class Cell:
    """One combination of what is varied; each is run with several seeds.

    Attributes:
        part: Of the experiment.
        depth: Layers.
        design: Name of a residual design; "post" with another gain in the part "border".
        gain: Of all skips, in place of the design's; None for the design's own.
        learning_rate, warmup, batch_size: Of the training.
    """

    part: str
    depth: int
    design: str
    gain: float | None
    learning_rate: float
    warmup: int
    batch_size: int

    @property
    def name(self) -> str:
        """Of the cell's arrays."""
        gain = "" if self.gain is None else f" gain={self.gain:g}"
        return (
            f"{self.part} depth={self.depth} {self.design}{gain} rate={self.learning_rate:g} "
            f"warmup={self.warmup} batch={self.batch_size}"
        )


Results = dict[Cell, dict[str, Any]]


def make_measure(recipe: Recipe) -> Callable[[Model, Any, Hyper, Any], dict[str, Any]]:
    """measure(model, data, hyper, key) of one run.

    It returns, on examples that training does not see, "accuracy" and "loss" [], the mean over
    examples of `MEASURES` of the hidden states [L + 1], and "gradients" [len(GRADIENTS), L], the
    Frobenius norm of the loss's gradient to each matrix of each layer, all heads together.
    """

    def measure(model, data, hyper, _):
        config, held_out = config_of(recipe, hyper), data["eval"]

        def loss(model):
            logits = batch_forward(model, held_out, config)
            return examples.loss_metric(logits, held_out), logits

        (value, logits), gradient = jax.value_and_grad(loss, has_aux=True)(model)
        layers = gradient.network.layers
        matrices = {
            n: getattr(layers.attention, n) for n in GRADIENTS if hasattr(layers.attention, n)
        }
        matrices |= {n: getattr(layers.mlp, n) for n in GRADIENTS if n not in matrices}

        def profiles(inputs):
            states = input_states(model.network, inputs, config)
            hidden = rc.apply(model.network, states, config).hidden
            return rc.profile(hidden, measures=MEASURES)

        found = jax.vmap(profiles)(held_out.first(LOOKED_AT).inputs)
        return {
            "accuracy": examples.token_accuracy(logits, held_out),
            "loss": value,
            "gradients": jnp.stack([_norms(matrices[name]) for name in GRADIENTS]),
        } | {name: jnp.mean(found[name], axis=0) for name in MEASURES}

    return measure


def _norms(by_layer):
    """Frobenius norm of each layer's matrix, [L]."""
    return jnp.sqrt(jnp.sum(by_layer**2, axis=tuple(range(1, by_layer.ndim))))


def cells_of(options: flags.FlagValues) -> list[Cell]:
    """All cells of the flags; of the first part the shallow ones without warm-up first.

    Raises:
        ValueError: A part or a design that there is not.
    """
    check_names(options, "parts", PARTS)
    check_names(options, "designs", rc.DESIGNS)
    rate, batch = options.learning_rate, options.batch_size
    product, cells = itertools.product, []
    if "designs" in options.parts:
        for warmup, depth, design in product(options.warmup, options.depths, options.designs):
            cells.append(Cell("designs", depth, design, None, rate, warmup, batch))
    if "border" in options.parts:
        for depth, warmup, rate_, gain in product(
            options.border_depths, options.warmup, options.border_rates, options.border_gains
        ):
            cells.append(Cell("border", depth, "post", gain, rate_, warmup, batch))
    if "batch" in options.parts:
        warmup, depth = min(options.warmup), options.batch_depth
        for size, design in product(options.batch_sizes, options.designs):
            cells.append(Cell("batch", depth, design, None, rate, warmup, size))
    return list(dict.fromkeys(cells))


def train_cells(options: flags.FlagValues, run: RunFolder) -> dict[Cell, dict[str, Any]]:
    """{cell: its results} of all cells; see `results_of_cells`."""
    mesh, cells = cli.mesh(options), cells_of(options)

    @functools.cache  # cells that differ in floats alone share a program
    def program_of(config, batch_size, profiled):
        recipe = Recipe(
            config=config, num_outputs=options.num_labels, batch_size=batch_size,
            num_epochs=max(1, options.n_steps // STEPS_PER_EPOCH), shuffle=True, unroll=1,
        )  # fmt: skip
        make_data = functools.partial(data_of, options, batch_size)
        looks = -(-recipe.num_epochs // LOOKS)
        ensemble = Ensemble(recipe, make_data, mesh=mesh, epochs_per_chunk=looks)
        gains = of_models(ensemble, functools.partial(admin_gains, recipe)) if profiled else None
        return Training(
            ensemble, of_models(ensemble, make_measure(recipe)), run, prepared=gains, along=True
        )

    groups: dict[Any, dict[str, Hyper]] = {}
    for cell in cells:
        config, floats = split(network_of(options, cell))
        hyper = Hyper(cell.learning_rate, dropout=None, warmup=cell.warmup, network=floats)
        key = config, cell.batch_size, cell.design == "admin", cell.part
        groups.setdefault(key, {})[cell.name] = hyper
    found = {}
    with MemoryBudget(options, mesh, run.log) as budget:
        for (*key, part), group in groups.items():
            seeds = options.num_seeds if part == "designs" else options.grid_seeds
            found |= results_of_cells(
                functools.partial(program_of, *key), group, seed_keys(options.seed, seeds),
                run=run, budget=budget, most=max(options.num_seeds, seeds),
            )  # fmt: skip
    return {cell: found[cell.name] for cell in cells}


def admin_gains(recipe: Recipe, model: Any, data: Any, hyper: Hyper, _: Any = None) -> Hyper:
    """Admin's ω, profiled on the first batch of each seed's own initial network."""
    config = recipe.config.replace(**hyper.network | {"skip_gain": 1.0})
    batch = data["train"].inputs[: recipe.batch_size]
    gains = rc.admin_profile(model.network, batch, config).skip_gain
    return hyper.replace(network=hyper.network | {"skip_gain": gains})


def network_of(options: flags.FlagValues, cell: Cell) -> rc.TransformerConfig:
    """The network of a cell: an encoder that answers token by token."""
    d = options.d_model
    embedding = EmbeddingConfig(
        vocab_size=options.num_labels, d_embed=d, positions="learned",
        num_positions=options.num_tokens, projection="before_norm",
    )  # fmt: skip
    config = rc.design(
        rc.transformer(
            cell.depth, options.num_heads, d, d_ff=options.d_ff, mlp="relu", embedding=embedding
        ),
        cell.design,
    )
    return config if cell.gain is None else config.replace(skip_gain=cell.gain)


def split(config: rc.TransformerConfig) -> tuple[rc.TransformerConfig, dict[str, Any]]:
    """(what is compiled in, the floats that differ between runs)."""
    return config.replace(**FLOATS), {name: getattr(config, name) for name in FLOATS}


def data_of(options: flags.FlagValues, batch_size: int, key: Any) -> dict[str, Any]:
    """Training data of one seed, an epoch of `STEPS_PER_EPOCH` batches, and data of its own."""
    key_train, key_eval = jax.random.split(key)
    make: Callable = functools.partial(
        sequences.make_examples,
        seq_len=options.num_tokens, num_letters=options.num_labels, task=options.task,
    )  # fmt: skip
    return {
        "train": make(key_train, STEPS_PER_EPOCH * batch_size),
        "eval": make(key_eval, options.n_eval_data),
    }


def guess_limit(tokens: int, letters: int) -> float:
    """Accuracy below which a guess cannot be distinguished from what is learned.

    1/c + 2.58 √((1/c)(1 − 1/c)/tokens): one guess of 200 lies above it.
    """
    share = 1 / letters
    return share + 2.58 * math.sqrt(share * (1 - share) / tokens)


def limit_of(options: flags.FlagValues) -> float:
    """`guess_limit` of the evaluation."""
    return guess_limit(options.n_eval_data * options.num_tokens, options.num_labels)


def failed(found: dict[str, Any], limit: float) -> np.ndarray:
    """Which seeds diverged (a loss that is not finite) or still guess at the end, [s]."""
    return ~np.isfinite(found["losses"]).all(axis=1) | ~(found["accuracy"][:, -1] > limit)


def gradient(found: dict[str, Any], matrix: str) -> np.ndarray:
    """Norm of the loss's gradient to one matrix, [s, t, L]."""
    return found["gradients"][:, :, GRADIENTS.index(matrix)]


def rows_of(results: Results, options: flags.FlagValues) -> list[dict[str, Any]]:
    """One row per cell and seed."""
    rows = []
    for cell, found in results.items():
        fails = failed(found, limit_of(options))
        for seed in range(len(fails)):
            row = asdict(cell) | {"seed": seed, "failed": int(fails[seed])}
            row["diverged"] = int(not np.isfinite(found["losses"][seed]).all())
            row["accuracy"] = float(found["accuracy"][seed, -1])
            row["training_loss"] = float(found["losses"][seed, -1])
            for when, t in (("before", 0), ("after", -1)):
                for name in ("residual_ratio", "token_cosine"):
                    row[f"{name}_{when}"] = float(found[name][seed, t, -1])
                for name in ("w_q", "w_k", "w_v"):
                    row[f"gradient_{name}_{when}"] = float(gradient(found, name)[seed, t, -1])
            rows.append(row)
    return rows


def summary_of(results: Results, options: flags.FlagValues) -> dict[str, Any]:
    """Per cell: how many seeds failed, with the interval, and what their networks were like."""
    limit, cells = limit_of(options), []
    for cell, found in results.items():
        fails = failed(found, limit)
        cells.append(
            asdict(cell)
            | {
                "seeds": len(fails),
                "failed": int(fails.sum()),
                "diverged": int((~np.isfinite(found["losses"]).all(axis=1)).sum()),
                "interval": list(wilson_interval(int(fails.sum()), len(fails))),
                "accuracy": float(np.mean(found["accuracy"][:, -1])),
                "accuracy_by_seed": found["accuracy"][:, -1].tolist(),
                "training_loss": float(np.nanmean(found["losses"][:, -1])),
                "residual_ratio_before": float(found["residual_ratio"][:, 0, -1].mean()),
                "residual_ratio_after": float(np.nanmean(found["residual_ratio"][:, -1, -1])),
                "token_cosine_before": float(found["token_cosine"][:, 0, -1].mean()),
                "query_over_value_gradient_before": float(
                    np.median(gradient(found, "w_q")[:, 0] / gradient(found, "w_v")[:, 0])
                ),
                "seconds": float(found["seconds"]["all"]),
            }
        )
    return {
        "cells": cells,
        "guess_limit": limit,
        "baseline": 1 / options.num_labels,
        "steps": options.n_steps,
        "task": f"{options.task}, {options.num_tokens} of {options.num_labels} letters",
    }


def title_of(cell: dict[str, Any]) -> str:
    """A cell of the summary in words."""
    gain = "" if cell["gain"] is None else f", gain {cell['gain']:g}"
    return (
        f"{cell['design']}{gain}, {cell['depth']} layers, rate {cell['learning_rate']:g}, "
        f"warm-up {cell['warmup']}, batch {cell['batch_size']}"
    )


def _values(cells, field):
    return list(dict.fromkeys(getattr(c, field) for c in cells))


@figures.styled
def share_figure(cells: Results, options: flags.FlagValues, *, field: str, label: str) -> Figure:
    """Share of seeds that failed, with Wilson's intervals, by depth or batch size."""
    warmups, designs = _values(cells, "warmup"), _values(cells, "design")
    places = sorted(_values(cells, field))
    fig, axes = figures.figure(1, len(warmups), sharey=True)
    for ax, warmup in zip(axes[0], warmups, strict=True):
        for index, design in enumerate(designs):
            for cell, found in cells.items():
                if (cell.warmup, cell.design) != (warmup, design):
                    continue
                fails = failed(found, limit_of(options))
                x = places.index(getattr(cell, field)) + 0.13 * (index - (len(designs) - 1) / 2)
                ends = wilson_interval(int(fails.sum()), len(fails))
                first = getattr(cell, field) == places[0]
                figures.interval(ax, x, fails.mean(), ends, design if first else None, index)
        ax.set_xticks(range(len(places)), [str(p) for p in places])
        ax.set(xlabel=label, title=f"warm-up {warmup} steps", ylim=(-0.05, 1.05))
        ax.set_xlim(-0.6, len(places) - 0.4)
    axes[0, 0].set_ylabel("share of seeds that fail")
    axes[0, 0].legend()
    return fig


@figures.styled
def loss_figure(cells: Results, options: flags.FlagValues) -> Figure:
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
    figures.outer_labels(axes, "step", "training loss")
    axes[0, 0].set_ylim(0, None)
    axes[0, 0].legend()
    return fig


@figures.styled
def why_figure(cells: Results, options: flags.FlagValues) -> Figure:
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
    figures.outer_labels(axes, "layer")
    axes[0, 0].legend()
    return fig


@figures.styled
def during_figure(cells: Results, options: flags.FlagValues) -> Figure:
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
    figures.outer_labels(axes, "step")
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
def border_figure(cells: Results, options: flags.FlagValues) -> Figure:
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
                    fails = failed(found, limit_of(options))
                    ax.text(
                        place[1], place[0], f"{fails.sum()}/{len(fails)}", ha="center",
                        va="center", fontsize=8, color="white" if table[place] < 0.6 else "black",
                    )  # fmt: skip
            image = ax.imshow(table, origin="lower", aspect="auto", vmin=0, vmax=1)
            ax.grid(False)
            ax.set_xticks(range(len(gains)), [f"{g:g}" for g in gains])
            ax.set_yticks(range(len(rates)), [f"{r:g}" for r in rates])
            ax.set_title(f"{depth} layers, warm-up {warmup}", fontsize=8)
    figures.outer_labels(axes, "skip gain", "learning rate")
    fig.colorbar(image, ax=axes, label="accuracy; numbers: seeds that fail")
    return fig


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Seeds that failed, beside the BLEU of networks as deep that trained or did not."""
    rows = []
    for cell in summary["cells"]:
        low, high = cell["interval"]
        known, bleu = published(cell)
        rows.append(
            Comparison(
                f"{cell['part']}: {title_of(cell)}: seeds that fail",
                f"{cell['failed']} of {cell['seeds']} ({low:.2f} to {high:.2f}), accuracy "
                f"{cell['accuracy']:.3f}",
                (f"BLEU {bleu}" if bleu else "failed") if known else None,
                SOURCE if known else "",
            )
        )  # fmt: skip
    return rows


def claims(summary: dict[str, Any]) -> list[Row]:
    """What each design of the paper's table has of what Pre-LN has after the same steps."""
    cells, found = [c for c in summary["cells"] if c["part"] == "designs"], []
    same = ("depth", "warmup", "learning_rate", "batch_size")
    for cell in cells:
        known, bleu = published(cell)
        pre = [c for c in cells if c["design"] == "pre" and all(c[k] == cell[k] for k in same)]
        if not known or not pre:
            continue
        accuracy = np.array(cell["accuracy_by_seed"])
        if cell["design"] != "pre":
            accuracy = accuracy / np.array(pre[0]["accuracy_by_seed"])
        key = "others train" if bleu else "post fails"
        where = f"{cell['design']}, {cell['depth']} layers, warm-up {cell['warmup']}"
        found.append(of_mean(key, where, accuracy))
    return found


def published(cell: dict[str, Any]) -> tuple[bool, float | None]:
    """(whether the paper trained this design and depth, its BLEU or None where it failed)."""
    table = PUBLISHED.get("admin" if cell["design"].startswith("admin") else cell["design"], {})
    known = cell["part"] == "designs" and cell["depth"] in table
    return known, table.get(cell["depth"]) if known else None


def reading(summary: dict[str, Any]) -> str:
    """Who fails where, and what their networks had been like."""
    cells = [c for c in summary["cells"] if c["part"] == "designs"]
    if not cells:
        return "Only the grids were run."
    warmup = min(c["warmup"] for c in cells)
    deepest = max(c["depth"] for c in cells)
    at = [c for c in cells if (c["depth"], c["warmup"]) == (deepest, warmup)]
    said = "; ".join(
        f"{c['design']} fails in {c['failed']} of {c['seeds']} seeds (last residual ratio "
        f"{c['residual_ratio_before']:.1g} before training and {c['residual_ratio_after']:.1g} "
        f"after it; gradient of W_Q before it {c['query_over_value_gradient_before']:.1g} of W_V's)"
        for c in at
    )
    return f"With {deepest} layers and {warmup or 'no'} steps of warm-up: {said}."


def part_of(name: str) -> Callable[[Results], Results]:
    """results → those of the cells of one part."""
    return lambda results: {cell: own for cell, own in results.items() if cell.part == name}


DESIGNS, BORDER, BATCH = (part_of(name) for name in PARTS)
EXPERIMENT = Experiment(
    about=__doc__,
    name="trainability",
    order=130,
    brief="which residual designs train at which depth, with what happens inside the same "
    "networks; the border of Post-LN in gain, rate and warm-up; batch sizes",
    title="Trainability of deep networks",
    claim="Liu et al. 2020, table 1: Post-LN Transformers of 12 and 18 layers diverge on WMT'14 "
    "English-German, Pre-LN and Admin train. Noci et al. 2022: tokens that have collapsed to rank "
    "one take the gradients from queries and keys.",
    flags=FLAGS,
    presets={
        "quick": ("--parts=designs", "--depths=18", "--designs=post,depth_scaled", "--warmup=0",
                  "--num_seeds=4", "--n_steps=100", "--num_tokens=8", "--num_labels=5",
                  "--d_model=24", "--num_heads=2", "--d_ff=48", "--batch_size=16"),
        "paper": (),
        "tiny": ("--num_seeds=2", "--depths=2", "--border_depths=2", "--batch_depth=2",
                 "--num_heads=2", "--d_model=4", "--d_ff=4", "--num_tokens=3", "--num_labels=4",
                 "--batch_size=3", "--batch_sizes=2", "--n_steps=2", "--grid_seeds=1",
                 "--warmup=1", "--designs=post,pre"),
    },
    execution=ASKED,
    measure=lambda options, setup, run: train_cells(options, run),
    table=rows_of,
    summary=summary_of,
    parts=lambda results: [cell.name for cell in results],
    figures={
        "failed": Drawing.of_part(
            DESIGNS,
            functools.partial(share_figure, field="depth", label="layers"),
            "Share of seeds whose loss is not finite or whose network still guesses after "
            "training, with 95 % intervals (Wilson).",
        ),
        "losses": Drawing.of_part(
            DESIGNS, loss_figure, "Training loss, mean and standard deviation over seeds."
        ),
        "why": Drawing.of_part(
            DESIGNS, why_figure,
            "Residual ratio of the hidden states and gradient norms by layer, before training "
            "(solid, with bands over seeds) and after it (dashed, medians), of the same networks. "
            "A network that has learned has small gradients too, but tokens that differ.",
        ),
        "during": Drawing.of_part(
            DESIGNS, during_figure,
            "The last layer's residual ratio and the root mean square over layers of the gradient "
            "to W_Q, while the same networks train.",
        ),
        "batch": Drawing.of_part(
            BATCH,
            functools.partial(share_figure, field="batch_size", label="batch size"),
            "The same share by batch size.",
        ),
        "border": Drawing.of_part(
            BORDER, border_figure,
            "Accuracy of Post-LN by gain of all skips, learning rate and warm-up.",
        ),
    },
    claims=claims,
    compare=compare,
    reading=reading,
)  # fmt: skip
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
