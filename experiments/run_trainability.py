"""Trainability: which residual designs train at which depth, and why deep Post-LN does not.

In Liu et al., "Understanding the difficulty of training Transformers" (2020, table 1), Post-LN with
12 and 18 layers diverges on translation, while Pre-LN and Admin train. Here an encoder learns to
reverse letters, token by token, with and without a warm-up; it is small enough for many seeds. The
experiment also measures each network before and during training: residual ratio and token cosine
by layer, and the gradients of its matrices.

    python -m experiments.run_trainability
    python -m experiments.run_trainability --depths=18 --warmup=0

A seed learns nothing if its loss is not finite, or if its final accuracy is not above a guess.
With 18 layers and no warm-up, expect most seeds of Post-LN to learn nothing, and all seeds of
Pre-LN, Admin and DeepNorm to learn.

A cell is one combination of design, depth and warm-up. If you start the command again, it resumes
after the last finished cell. If you ask for other cells with the same sizes, it trains only the
cells that its folder does not have, and shows the cells that you asked for.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

import rank_collapse as rc
from experiments.lab import (
    Experiment,
    Finding,
    Flags,
    Options,
    Run,
    RunFolder,
    check_names,
    cli,
    describe_figures,
    open_run,
    plots,
    shared_flags,
)
from experiments.train import arguments, design_cells
from experiments.train.design_cells import Cell, gradient_norms
from experiments.verdicts import Comparison, Row, TableRow, make_row, seed_rows
from experiments.verdicts.share_intervals import wilson_interval
from rank_collapse.checks import refuse_if
from rank_collapse.printed import format_count
from rank_collapse.report import figures
from rank_collapse.report.wording import power_of_ten, words

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

FLAGS = design_cells.make_flags(ASKED)
shared_flags.define_alias(FLAGS, **arguments.PUBLISHED_NAMES)
FLAGS.define("list", "designs", ["post", "pre", "admin", "deepnorm"], "Names of residual designs.")
shared_flags.define_numbers(FLAGS, "depths", [6, 12, 18, 36], "Layers.", lower_bound=1)
shared_flags.define_numbers(FLAGS, "warmup", [0, 100], "Steps of the warm-up.", lower_bound=0)

ByCell = dict[Cell, dict[str, np.ndarray]]


def make_cells(options: Options) -> list[Cell]:
    """Makes all cells (a network with its training) of the flags, each once, in the order of the
    flags' values: by warm-up, then by depth, then by design.

    Args:
        options: The flags.

    Raises:
        ValueError: An unknown design, or steps that are no whole number of epochs.
    """
    epoch = design_cells.STEPS_PER_EPOCH
    refuse_if(options.n_steps % epoch, f"n_steps={options.n_steps} is not a multiple of {epoch}")
    check_names(options, "designs", rc.network.DESIGNS)
    combinations = itertools.product(options.warmup, options.depths, options.designs)
    cells = (
        Cell(depth, design, options.learning_rate, warmup, options.batch_size)
        for warmup, depth, design in combinations
    )
    return list(dict.fromkeys(cells))


def measure(options: Options, cells: list[Cell], folder: RunFolder) -> ByCell:
    """Trains the network of every cell (design, depth and training settings), and measures it
    during training."""
    return design_cells.train_cells(options, make_cells, folder)


def seed_columns(results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Selects the columns of the table for each seed of a cell, [s] each.

    Args:
        results: Results of one cell.
    """
    ratios = results["residual_ratio"][:, :, -1]
    return {
        "failed": results["failed"].astype(int),
        "diverged": design_cells.has_diverged(results).astype(int),
        "accuracy": results["accuracy"][:, -1],
        "training_loss": results["losses"][:, -1],
        "residual_ratio_before": ratios[:, 0],
        "residual_ratio_after": ratios[:, -1],
    }


def make_rows(results: ByCell) -> Iterator[TableRow]:
    """Makes a row for each cell (design, depth and training settings) and seed."""
    for cell, cell_results in results.items():
        for row in seed_rows(seed_columns(cell_results)):
            yield vars(cell) | row


def distinct(cells: ByCell, field: str) -> list[int | str]:
    """Lists the values of a field of the cells, in their order."""
    return list(dict.fromkeys(getattr(cell, field) for cell in cells))


@figures.styled
def loss_figure(cells: ByCell):
    """Training loss (vertical axis) by training step (horizontal axis). Each panel has one number
    of layers and one warm-up, and each line is one residual design. Lines are means over seeds, and
    bands are one standard deviation. The loss of a network that learns nothing stays at its first
    value."""
    places = [(cell.warmup, cell.depth) for cell in cells]
    size = {"width": 4.2, "height": 3.1} if len(set(places)) == 1 else {"width": 3.0, "height": 2.6}
    fig, axes, panels = plots.place_grid(places, **size, sharex=True, sharey=True)
    names = distinct(cells, "design")
    for ax, (cell, results) in zip(panels, cells.items(), strict=True):
        # A loss is the mean of an epoch: it stands at the middle of its steps.
        steps = design_cells.STEPS_PER_EPOCH * (0.5 + np.arange(results["losses"].shape[1]))
        figures.band(ax, steps, results["losses"], cell.design, names.index(cell.design))
        ax.set_title(
            f"{format_count(cell.depth, 'layer')}, warm-up of {format_count(cell.warmup, 'step')}",
            fontsize=9,
        )
    plots.outer_labels(axes, "step", "training loss, nats a letter")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


@figures.styled
def share_figure(cells: ByCell):
    """Share of seeds that learn nothing (vertical axis), for each residual design (horizontal axis)
    and each number of layers (colours). Each panel has one warm-up. A seed learns nothing if its
    loss is not finite, or if its network is no more accurate than a guess after training. Bars are
    95 % intervals (Wilson)."""
    depths, names = distinct(cells, "depth"), distinct(cells, "design")
    fig, axes, panels = plots.place_grid([(0, cell.warmup) for cell in cells], sharey=True)
    for ax, (cell, results) in zip(panels, cells.items(), strict=True):
        place, index = names.index(cell.design), depths.index(cell.depth)
        fails, x = results["failed"], place + 0.13 * (index - (len(depths) - 1) / 2)
        interval = wilson_interval(int(fails.sum()), len(fails))
        label = None if place else format_count(cell.depth, "layer")
        plots.draw_interval(ax, x, fails.mean(), interval, label, index)
        ax.set_xticks(range(len(names)), map(words, names))
        limits = {"ylim": (-0.05, 1.05), "xlim": (-0.6, len(names) - 0.4)}
        ax.set(title=f"warm-up of {format_count(cell.warmup, 'step')}", **limits)
    axes[0, 0].set_ylabel("share of seeds that learn nothing")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


# {label: results → [s, t, L] or [s, t]}
LAYER_MEASURES = {
    "residual ratio": lambda results: results["residual_ratio"][..., 1:],
    "gradient to $W_Q$": lambda results: gradient_norms(results, "w_q"),
    "gradient to $W_V$": lambda results: gradient_norms(results, "w_v"),
}


@figures.styled
def inside_figure(cells: ByCell):
    """Three numbers by layer (horizontal axes). The vertical axes are log10 of the residual ratio
    of the states, log10 of the norm of the gradient to W_Q (queries), and log10 of the norm of the
    gradient to W_V (values). The networks are the networks of the first figure with the shortest
    warm-up. Solid lines are means over seeds before training, and bands are one standard deviation.
    Dashed lines are medians over seeds after training."""
    shortest, names = min(cell.warmup for cell in cells), distinct(cells, "design")
    shown_cells = [cell for cell in cells if cell.warmup == shortest]
    places = [(cell.depth, label) for cell in shown_cells for label in LAYER_MEASURES]
    fig, axes, panels = plots.place_grid(places, width=3.5, height=2.6, sharey="col")
    combinations = itertools.product(shown_cells, LAYER_MEASURES.items())
    for ax, (cell, (label, measure)) in zip(panels, combinations, strict=True):
        index, layers = names.index(cell.design), np.arange(1, cell.depth + 1)
        with np.errstate(divide="ignore"):
            values = np.log10(measure(cells[cell]))
        figures.band(ax, layers, values[:, 0], cell.design, index, marker="")
        ax.plot(layers, np.median(values[:, -1], axis=0), color=figures.color(index), ls="--", lw=1)
        figures.integer_ticks(ax)
        ax.set_ylabel(rf"$\log_{{10}}$ {label}")
        ax.set_title(
            f"{format_count(cell.depth, 'layer')}, warm-up {cell.warmup}; dashed: after", fontsize=9
        )
    plots.outer_labels(axes, "layer")
    axes[0, 0].legend()
    return fig


def published_outcome(cell: Cell) -> str | None:
    """Returns the published outcome of this design and depth; None where the paper has none."""
    design = "admin" if cell.design.startswith("admin") else cell.design
    return PUBLISHED.get(design, {}).get(cell.depth)


def judge_claims(results: ByCell) -> Iterator[Row]:
    """Tests the accuracy of each design in the paper's table against the accuracy of Pre-LN after
    the same steps.

    The tests use the longest warm-up of the run, because the paper's networks have one.

    Args:
        results: Measurements of each cell.
    """
    longest = max(cell.warmup for cell in results)
    for cell in results:
        published_result, pre = published_outcome(cell), dataclasses.replace(cell, design="pre")
        if published_result and pre in results and cell.warmup == longest:
            accuracy, pre_accuracy = (
                results[c]["accuracy"][:, -1].astype(float) for c in (cell, pre)
            )
            setting = (
                f"{words(cell.design)}, {format_count(cell.depth, 'layer')}, warm-up {cell.warmup}"
            )
            key = "post behind" if published_result == FAILED else "others train"
            yield make_row(key, setting, accuracy if cell == pre else accuracy / pre_accuracy)


def compare_results(results: ByCell) -> Iterator[Comparison]:
    """Compares the number of failed seeds with the BLEU of networks of the same depth, and
    describes the failed seeds.

    Args:
        results: Measurements of each cell.
    """
    for cell, cell_results in results.items():
        columns, published_result = seed_columns(cell_results), published_outcome(cell)
        count, seeds = int(cell_results["failed"].sum()), len(cell_results["failed"])
        interval = "{:.2f} to {:.2f}".format(*wilson_interval(count, seeds))
        query_norms, value_norms = (gradient_norms(cell_results, name) for name in ("w_q", "w_v"))
        share = np.median(query_norms[:, 0] / value_norms[:, 0])
        note = f"{SOURCE}; " if published_result else ""
        note += f"last residual ratio {columns['residual_ratio_before'].mean():.1g} before training"
        note += f" and {np.nanmean(columns['residual_ratio_after']):.1g} after it; gradient of W_Q"
        yield Comparison(
            f"{words(cell.design)}, {format_count(cell.depth, 'layer')}, rate "
            f"{cell.learning_rate:g}, warm-up "
            f"{cell.warmup}, batch {cell.batch_size}: seeds that learn nothing",
            f"{count} of {seeds} ({interval}), accuracy {columns['accuracy'].mean():.3f}",
            published_result,
            f"{note} before it {share:.1g} of W_V's",
        )


NAMED = ("post", "pre", "admin")  # designs of the finding


def make_finding(cells: ByCell) -> Finding | None:
    """Reports how many seeds of the deepest networks fail, and the remaining residual of their
    tokens.

    Args:
        cells: Measurements of each cell.
    """
    shortest = min(cell.warmup for cell in cells)
    deepest = max(cell.depth for cell in cells)
    texts = []
    for cell, results in cells.items():
        if (cell.depth, cell.warmup) == (deepest, shortest) and cell.design in NAMED:
            remaining = float(np.median(seed_columns(results)["residual_ratio_after"]))
            failed = (
                f"{int(results['failed'].sum())} of {format_count(len(results['failed']), 'seed')}"
            )
            ratio = power_of_ten(math.log10(remaining)) if remaining else "0"
            outcome = f"learns nothing in {failed}, with a residual ratio of {ratio}"
            texts.append(f"{words(cell.design)} {outcome}")
    if not texts:
        return None
    warmup = (
        f"with a warm-up of {format_count(shortest, 'step')}" if shortest else "without warm-up"
    )
    text = (
        f"Trained {warmup}, {format_count(deepest, 'layer')} of {'; '.join(texts)} after training."
    )
    return Finding("loss", text)


EXPERIMENT = Experiment(
    order=130,
    title="Trainability of deep networks",
    brief="which residual designs train at which depth, and what happens inside the same networks",
    claim="Liu et al. 2020 (table 1) train Transformers with 12 and 18 layers to translate from "
    "English to German (WMT'14). With Post-LN, the training diverges. With Pre-LN and with Admin, "
    "the networks learn to translate. When the tokens have collapsed to rank one, the gradients of "
    "queries and keys vanish (Noci et al. 2022).",
    presets={
        "quick": "--depths=18 --designs=post,pre,admin --warmup=0 --num_seeds=3 "
        "--n_steps=100 --num_tokens=8 --num_labels=5 --d_model=16 --num_heads=2 --d_ff=32 "
        "--batch_size=16",
        "reported": "--seed=3000 --num_seeds=7 --depths=6,18 --designs=post,pre,admin --warmup=100",
        "tiny": "--num_seeds=2 --depths=2 --num_heads=2 --d_model=4 --d_ff=4 --num_tokens=3 "
        "--num_labels=4 --batch_size=3 --n_steps=25 --warmup=1 --designs=post,pre",
    },
    figures=describe_figures(loss_figure, share_figure, inside_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_cells) as run:
        for point in run.measure(measure):
            results = point.results
            point.save_table(make_rows(results))
            point.save_figure("loss", loss_figure, results)
            point.save_figure("share", share_figure, results)
            point.save_figure("inside", inside_figure, results)
            point.save_claims(judge_claims(results))
            point.save_comparisons(compare_results(results))
            point.save_finding(make_finding(results))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
