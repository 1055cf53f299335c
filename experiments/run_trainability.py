"""Trainability: which residual designs train at which depth, and why deep Post-LN does not.

Liu et al., "Understanding the difficulty of training Transformers" (2020, table 1): Post-LN of 12
and 18 layers diverges on translation, Pre-LN and Admin train. Here an encoder learns to reverse
letters, token by token, at a size that allows many seeds, with and without warm-up. Every network
is also measured before and while it trains: residual ratio and token cosine by layer, and the
gradients of its matrices, for the same seeds.

    python -m experiments.run_trainability
    python -m experiments.run_trainability --depths=18 --warmup=0

A seed fails if its loss is not finite or its final accuracy does not exceed that of a guess.
Expected with 18 layers and no warm-up: Post-LN fails in 8 of 8 seeds, Pre-LN, Admin and DeepNorm
in none.
When started again, the run resumes after the last finished cell. With other cells of the same sizes
it trains only those that its folder lacks, and shows the requested ones.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

import rank_collapse as rc
from experiments.lab import cli, vocabulary
from experiments.lab.experiment import Experiment, Finding, Shown, name_figures, open_run
from experiments.lab.flags import Flags, check_names
from experiments.lab.folder import RunFolder
from experiments.lab.statements import make_row
from experiments.train import arguments, designs, letters
from experiments.train.designs import Cell, gradient
from experiments.verdicts import Comparison
from experiments.verdicts.statistics import seed_rows
from rank_collapse.report import figures
from rank_collapse.report.intervals import wilson_interval
from rank_collapse.report.wording import words

SOURCE = "Liu et al. 2020, table 1: WMT'14 English-German, encoder and decoder, with warm-up"

FAILED = "failed"
# WMT'14 English-German at 6, 12 and 18 layers, Liu et al. 2020, table 1.
PUBLISHED = {
    "post": {6: "BLEU 27.80", 12: FAILED, 18: FAILED},
    "pre": {6: "BLEU 27.27", 12: "BLEU 28.26", 18: "BLEU 28.38"},
    "admin": {6: "BLEU 27.90", 12: "BLEU 28.58", 18: "BLEU 29.03"},
}

# Flags that say which cells are asked for; what a cell gives does not depend on the others.
ASKED = ("depths", "designs", "warmup", "learning_rate", "batch_size")

FLAGS = letters.make_flags(ASKED)
vocabulary.define_alias(FLAGS, **arguments.PUBLISHED_NAMES)
define = cli.definer(FLAGS)
define("list", "designs", ["post", "pre", "admin", "deepnorm"], "Names of residual designs.")
vocabulary.define_numbers(FLAGS, "depths", [6, 12, 18, 36], "Layers.", lower_bound=1)
vocabulary.define_numbers(FLAGS, "warmup", [0, 100], "Steps of the warm-up.", lower_bound=0)

ByCell = dict[Cell, dict[str, Any]]


def cells_of(options: Flags) -> list[Cell]:
    """All cells of the flags, the shallow ones without warm-up first.

    Raises:
        ValueError: A design that there is not.
    """
    check_names(options, "designs", rc.network.DESIGNS)
    every = itertools.product(options.warmup, options.depths, options.designs)
    cells = (
        Cell(depth, design, options.learning_rate, warmup, options.batch_size)
        for warmup, depth, design in every
    )
    return list(dict.fromkeys(cells))


def columns_of(found: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the table has of each seed of a cell, [s] each."""
    columns = {
        "failed": found["failed"].astype(int),
        "diverged": designs.diverged(found).astype(int),
        "accuracy": found["accuracy"][:, -1],
        "training_loss": found["losses"][:, -1],
    }
    inside = {name: found[name] for name in ("residual_ratio", "token_cosine")}
    inside |= {f"gradient_{name}": gradient(found, name) for name in ("w_q", "w_k", "w_v")}
    for when, t in (("before", 0), ("after", -1)):
        columns |= {f"{name}_{when}": values[:, t, -1] for name, values in inside.items()}
    return columns


def rows_of(results: ByCell, cells: list[Cell]) -> list[dict[str, Any]]:
    """One row per cell and seed."""
    return [vars(cell) | row for cell, own in results.items() for row in seed_rows(columns_of(own))]


def values_of(cells: ByCell, field: str) -> list[Any]:
    """The values that a field of the cells has, in their order."""
    return list(dict.fromkeys(getattr(cell, field) for cell in cells))


def share_figure(cells, setup):
    """Share of seeds whose loss is not finite or whose network still guesses after training, with
    95 % intervals (Wilson)."""
    depths, names = values_of(cells, "depth"), values_of(cells, "design")
    fig, axes, own = figures.place_grid([(0, cell.warmup) for cell in cells], sharey=True)
    for ax, (cell, found) in zip(own, cells.items(), strict=True):
        place, index = names.index(cell.design), depths.index(cell.depth)
        fails, x = found["failed"], place + 0.13 * (index - (len(depths) - 1) / 2)
        ends = wilson_interval(int(fails.sum()), len(fails))
        label = None if place else f"{cell.depth} layers"
        figures.draw_interval(ax, x, fails.mean(), ends, label, index)
        ax.set_xticks(range(len(names)), map(words, names))
        limits = {"ylim": (-0.05, 1.05), "xlim": (-0.6, len(names) - 0.4)}
        ax.set(title=f"warm-up of {cell.warmup} steps", **limits)
    axes[0, 0].set_ylabel("share of seeds that fail")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


def loss_figure(cells, setup):
    """Training loss, mean and standard deviation over seeds; it stays where it begins where a
    network goes on guessing."""
    places = list(dict.fromkeys((cell.warmup, cell.depth) for cell in cells))
    size = {"width": 4.2, "height": 3.1} if len(places) == 1 else {"width": 3.0, "height": 2.6}
    places = [(cell.warmup, cell.depth) for cell in cells]
    fig, axes, own = figures.place_grid(places, **size, sharex=True, sharey=True)
    names = values_of(cells, "design")
    for ax, (cell, found) in zip(own, cells.items(), strict=True):
        steps = designs.STEPS_PER_EPOCH * (0.5 + np.arange(found["losses"].shape[1]))
        figures.band(ax, steps, found["losses"], cell.design, names.index(cell.design))
        ax.set_title(f"{cell.depth} layers, warm-up of {cell.warmup} steps", fontsize=9)
    figures.outer_labels(axes, "step", "training loss, nats a letter")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


def finding(cells, setup):
    """How many seeds of the deepest networks fail, and what is left of their tokens."""
    least = min(cell.warmup for cell in cells)
    deepest = max(cell.depth for cell in cells)
    said = []
    for cell, found in cells.items():
        if (cell.depth, cell.warmup) == (deepest, least) and cell.design in ("post", "pre"):
            left = float(np.median(columns_of(found)["residual_ratio_after"]))
            failed = f"{int(found['failed'].sum())} of {len(found['failed'])} seeds"
            ends = f"fails in {failed}, with a residual ratio of {left:.1g}"
            said.append(f"{words(cell.design)} {ends}")
    if not said:
        return None
    warm = f"with a warm-up of {least} steps" if least else "without warm-up"
    text = f"Trained {warm}, {deepest} layers of {'; '.join(said)} after training."
    return Finding("loss", text)


# {label: results → [s, t, L] or [s, t]}
BY_LAYER = {
    "residual ratio": lambda found: found["residual_ratio"][..., 1:],
    "gradient to $W_Q$": lambda found: gradient(found, "w_q"),
    "gradient to $W_V$": lambda found: gradient(found, "w_v"),
}


def inside_figure(cells, setup):
    """Residual ratio of the hidden states and gradient norms by layer, before training (solid, with
    bands over seeds) and after it (dashed, medians), of the same networks, with the shortest
    warm-up. A network that has learned has small gradients too, but tokens that differ."""
    least = min(cell.warmup for cell in cells)
    shown, names = [cell for cell in cells if cell.warmup == least], values_of(cells, "design")
    places = [(cell.depth, label) for cell in shown for label in BY_LAYER]
    fig, axes, own = figures.place_grid(places, width=3.5, height=2.6, sharey="col")
    every = itertools.product(shown, BY_LAYER.items())
    for ax, (cell, (label, measure)) in zip(own, every, strict=True):
        index, layers = names.index(cell.design), np.arange(1, cell.depth + 1)
        with np.errstate(divide="ignore"):
            values = np.log10(measure(cells[cell]))
        figures.band(ax, layers, values[:, 0], cell.design, index, marker="")
        ax.plot(layers, np.median(values[:, -1], axis=0), color=figures.color(index), ls="--", lw=1)
        figures.integer_ticks(ax)
        ax.set_ylabel(rf"$\log_{{10}}$ {label}")
        ax.set_title(f"{cell.depth} layers, warm-up {cell.warmup}; dashed: after", fontsize=9)
    figures.outer_labels(axes, "layer")
    axes[0, 0].legend()
    return fig


def published(cell: Cell) -> str | None:
    """What the paper has of this design and depth; None where it has nothing."""
    design = "admin" if cell.design.startswith("admin") else cell.design
    return PUBLISHED.get(design, {}).get(cell.depth)


def claims(results, cells):
    """What each design of the paper's table has of what Pre-LN has after the same steps, with the
    longest warm-up of the run: the paper's networks have one."""
    longest = max(cell.warmup for cell in results)
    for cell in results:
        known, pre = published(cell), dataclasses.replace(cell, design="pre")
        if known and pre in results and cell.warmup == longest:
            accuracy, of_pre = (results[c]["accuracy"][:, -1].astype(float) for c in (cell, pre))
            where = f"{cell.design}, {cell.depth} layers, warm-up {cell.warmup}"
            key = "post fails" if known == FAILED else "others train"
            yield make_row(key, where, accuracy if cell == pre else accuracy / of_pre)


def compare(results, cells):
    """Seeds that failed, beside the BLEU of networks as deep that trained or did not, and what
    their networks were like."""
    for cell, found in results.items():
        columns, known = columns_of(found), published(cell)
        count, seeds = int(found["failed"].sum()), len(found["failed"])
        ends = "{:.2f} to {:.2f}".format(*wilson_interval(count, seeds))
        share = np.median(gradient(found, "w_q")[:, 0] / gradient(found, "w_v")[:, 0])
        yield Comparison(
            f"{cell.design}, {cell.depth} layers, rate {cell.learning_rate:g}, warm-up "
            f"{cell.warmup}, batch {cell.batch_size}: seeds that fail",
            f"{count} of {seeds} ({ends}), accuracy {columns['accuracy'].mean():.3f}",
            known,
            f"{SOURCE}; "
            * bool(known)
            + f"last residual ratio {columns['residual_ratio_before'].mean():.1g} before training "
            f"and {np.nanmean(columns['residual_ratio_after']):.1g} after it; gradient of W_Q "
            f"before it {share:.1g} of W_V's",
        )


EXPERIMENT = Experiment(
    order=130,
    title="Trainability of deep networks",
    brief="which residual designs train at which depth, with what happens inside the same networks",
    claim="Liu et al. 2020, table 1: Post-LN Transformers of 12 and 18 layers diverge on WMT'14 "
    "English-German, Pre-LN and Admin train. Noci et al. 2022: tokens that have collapsed to rank "
    "one take the gradients from queries and keys.",
    presets={
        "quick": "--depths=18 --designs=post,pre --warmup=0 --num_seeds=3 "
        "--n_steps=100 --num_tokens=8 --num_labels=5 --d_model=16 --num_heads=2 --d_ff=32 "
        "--batch_size=16",
        "paper": "",
        "tiny": "--num_seeds=2 --depths=2 --num_heads=2 --d_model=4 --d_ff=4 --num_tokens=3 "
        "--num_labels=4 --batch_size=3 --n_steps=2 --warmup=1 --designs=post,pre",
    },
)
FIGURES = name_figures(loss_figure, share_figure, inside_figure)


def measure(options: Flags, cells: list[Cell], run: RunFolder) -> ByCell:
    """Trains every cell, and measures its networks while they train."""
    return designs.train_cells(options, cells_of, run)


def main(options: Flags) -> Shown:
    """Measures what the run lacks, and shows it."""
    with open_run(options, cells_of) as run:
        points = run.measure(measure)
        return run.publish(
            points,
            table=rows_of,
            figures=FIGURES,
            claims=claims,
            compare=compare,
            finding=finding,
        )


if __name__ == "__main__":
    cli.run(main, FLAGS)
