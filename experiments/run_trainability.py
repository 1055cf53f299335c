"""Trainability: which residual designs train at which depth, and why deep Post-LN does not.

Liu et al., "Understanding the difficulty of training Transformers" (2020, table 1): Post-LN of 12
and 18 layers diverges on translation, Pre-LN and Admin train. Here an encoder learns to reverse
letters, token by token, at a size that allows many seeds. Three parts: designs by depth, with
and without warm-up; the border of Post-LN in skip gain, learning rate and warm-up; and batch sizes.
Every network is also measured before and while it trains: residual ratio and token cosine by layer,
and the gradients of its matrices, for the same seeds.

    python -m experiments.run_trainability
    python -m experiments.run_trainability --parts=designs --depths=18 --warmup=0

A seed fails if its loss is not finite or its final accuracy does not exceed that of a guess.
Expected with 18 layers and no warm-up: Post-LN fails in 8 of 8 seeds, Pre-LN, Admin and DeepNorm
in none.
When started again, the run resumes after the last finished cell. With other cells of the same sizes
it trains only those that its folder lacks, and shows the requested ones.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import rank_collapse as rc
from experiments import letters
from experiments.shell import cli, vocabulary
from experiments.shell.experiment import Drawing, Experiment, caption_of
from experiments.shell.options import Flags, check_names
from experiments.shell.statements import row_of
from experiments.trained import arguments, designs
from experiments.trained.designs import Cell, gradient
from rank_collapse.report import Comparison, figures
from rank_collapse.report.intervals import wilson_interval
from rank_collapse.report.statistics import by_seed

SOURCE = "Liu et al. 2020, table 1: WMT'14 English-German, encoder and decoder, with warm-up"

FAILED = "failed"
# WMT'14 English-German at 6, 12 and 18 layers, Liu et al. 2020, table 1.
PUBLISHED = {
    "post": {6: "BLEU 27.80", 12: FAILED, 18: FAILED},
    "pre": {6: "BLEU 27.27", 12: "BLEU 28.26", 18: "BLEU 28.38"},
    "admin": {6: "BLEU 27.90", 12: "BLEU 28.58", 18: "BLEU 29.03"},
}

PARTS = ("designs", "border", "batch")

# Flags that say which cells are asked for; what a cell gives does not depend on the others.
ASKED = (
    "parts",
    "depths",
    "designs",
    "warmup",
    "learning_rate",
    "batch_size",
    "border_depths",
    "border_gains",
    "border_rates",
    "batch_sizes",
    "batch_depth",
)

FLAGS = letters.make_flags()
vocabulary.alias(FLAGS, **arguments.PUBLISHED_NAMES)
define = cli.definer(FLAGS)
define("list", "parts", list(PARTS), f"Parts to train, out of {', '.join(PARTS)}.")
define("list", "designs", ["post", "pre", "admin", "deepnorm"], "Names of residual designs.")
define("integer", "batch_depth", 18, "Layers of the networks of part batch.", lower_bound=1)
for name, default, kind, least, text in (
    ("depths", [6, 12, 18, 36], int, 1, "Layers."),
    ("border_depths", [6, 12, 18], int, 1, "Depths of the border."),
    ("batch_sizes", [8, 64], int, 1, "Batch sizes compared."),
    ("warmup", [0, 100], int, 0, "Steps of the warm-up."),
    ("border_gains", [1.0, 1.5, 2.0, 3.0], float, 0.0, "Skip gains of Post-LN there."),
    ("border_rates", [3e-4, 1e-3, 3e-3], float, 0.0, "Learning rates."),
):
    vocabulary.numbers(FLAGS, name, default, text, kind=kind, lower_bound=least)

Results = dict[Cell, dict[str, Any]]


def cells_of(options: Flags) -> list[Cell]:
    """All cells of the flags; of the first part the shallow ones without warm-up first.

    Raises:
        ValueError: A part or a design that there is not.
    """
    check_names(options, "parts", PARTS)
    check_names(options, "designs", rc.DESIGNS)
    rate, batch, least = options.learning_rate, options.batch_size, min(options.warmup)
    cells = (
        [
            Cell("designs", depth, design, None, rate, warmup, batch)
            for warmup in options.warmup
            for depth, design in itertools.product(options.depths, options.designs)
        ]
        + [
            Cell("border", depth, "post", gain, own_rate, warmup, batch)
            for depth, warmup in itertools.product(options.border_depths, options.warmup)
            for own_rate, gain in itertools.product(options.border_rates, options.border_gains)
        ]
        + [
            Cell("batch", options.batch_depth, design, None, rate, least, size)
            for size, design in itertools.product(options.batch_sizes, options.designs)
        ]
    )
    return list(dict.fromkeys(cell for cell in cells if cell.part in options.parts))


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


def rows_of(results: Results, cells: list[Cell]) -> list[dict[str, Any]]:
    """One row per cell and seed."""
    return [vars(cell) | row for cell, own in results.items() for row in by_seed(columns_of(own))]


def of_part(part: str, results: Results) -> Results:
    """The cells of one part."""
    return {cell: own for cell, own in results.items() if cell.part == part}


def values_of(cells: Results, field: str) -> list[Any]:
    """The values that a field of the cells has, in their order."""
    return list(dict.fromkeys(getattr(cell, field) for cell in cells))


def share_figure(cells, setup, *, field, label):
    """Share of seeds that failed, with Wilson's intervals, by depth or batch size."""
    places, names = values_of(cells, field), values_of(cells, "design")
    fig, axes, own = figures.grid([(0, cell.warmup) for cell in cells], sharey=True)
    for ax, (cell, found) in zip(own, cells.items(), strict=True):
        index, place = names.index(cell.design), places.index(getattr(cell, field))
        fails, x = found["failed"], place + 0.13 * (index - (len(names) - 1) / 2)
        ends = wilson_interval(int(fails.sum()), len(fails))
        figures.interval(ax, x, fails.mean(), ends, None if place else cell.design, index)
        ax.set_xticks(range(len(places)), [str(p) for p in places])
        limits = {"ylim": (-0.05, 1.05), "xlim": (-0.6, len(places) - 0.4)}
        ax.set(xlabel=label, title=f"warm-up {cell.warmup} steps", **limits)
    axes[0, 0].set_ylabel("share of seeds that fail")
    axes[0, 0].legend()
    return fig


def loss_figure(cells, setup):
    """Training loss, mean and standard deviation over seeds."""
    places = [(cell.warmup, cell.depth) for cell in cells]
    fig, axes, own = figures.grid(places, width=3.0, height=2.6, sharex=True, sharey=True)
    names = values_of(cells, "design")
    for ax, (cell, found) in zip(own, cells.items(), strict=True):
        steps = designs.STEPS_PER_EPOCH * (0.5 + np.arange(found["losses"].shape[1]))
        figures.band(ax, steps, found["losses"], cell.design, names.index(cell.design))
        ax.set_title(f"{cell.depth} layers, warm-up {cell.warmup}")
    figures.outer_labels(axes, "step", "training loss")
    axes[0, 0].set_ylim(0, None)
    axes[0, 0].legend()
    return fig


# {label: results → [s, t, L] or [s, t]}
BY_LAYER = {
    "residual ratio": lambda found: found["residual_ratio"][..., 1:],
    "gradient to $W_Q$": lambda found: gradient(found, "w_q"),
    "gradient to $W_V$": lambda found: gradient(found, "w_v"),
}
BY_STEP = {
    "residual ratio, last layer": lambda found: found["residual_ratio"][..., -1],
    "gradient to $W_Q$, all layers": lambda found: np.sqrt(
        np.mean(gradient(found, "w_q") ** 2, axis=-1)
    ),
}


def inside_figure(cells, setup, *, by_step):
    """Residuals and gradients of the shortest warm-up, rows depths: by step, or by layer before
    (solid) and after training (dashed)."""
    least = min(cell.warmup for cell in cells)
    shown, names = [cell for cell in cells if cell.warmup == least], values_of(cells, "design")
    measures, note = (BY_STEP, "") if by_step else (BY_LAYER, "; dashed: after training")
    places = [(cell.depth, label) for cell in shown for label in measures]
    fig, axes, own = figures.grid(places, width=3.5, height=2.6, sharex=by_step, sharey="col")
    every = itertools.product(shown, measures.items())
    for ax, (cell, (label, measure)) in zip(own, every, strict=True):
        index, found = names.index(cell.design), cells[cell]
        with np.errstate(divide="ignore"):
            values = np.log10(measure(found))
        if by_step:
            figures.band(ax, designs.steps_of(found), values, cell.design, index)
        else:
            layers = np.arange(1, cell.depth + 1)
            figures.band(ax, layers, values[:, 0], cell.design, index, marker="")
            after = np.median(values[:, -1], axis=0)
            ax.plot(layers, after, color=figures.color(index), ls="--", lw=1)
            figures.integer_ticks(ax)
        ax.set_ylabel(rf"$\log_{{10}}$ {label}")
        ax.set_title(f"{cell.depth} layers, warm-up {cell.warmup}{note}", fontsize=9)
    figures.outer_labels(axes, "step" if by_step else "layer")
    axes[0, 0].legend()
    return fig


def border_figure(cells, setup):
    """Accuracy of Post-LN by gain of all skips, learning rate and warm-up."""
    rates, gains = (sorted(values_of(cells, field)) for field in ("learning_rate", "gain"))
    places = [(cell.warmup, cell.depth) for cell in cells]
    fig, axes, own = figures.grid(places, width=3.2, height=2.3, sharex=True, sharey=True)
    tables = {ax: np.full((len(rates), len(gains)), np.nan) for ax in axes.flat}
    for ax, (cell, found) in zip(own, cells.items(), strict=True):
        y, x = rates.index(cell.learning_rate), gains.index(cell.gain)
        tables[ax][y, x] = accuracy = found["accuracy"][:, -1].mean()
        ax.text(
            x,
            y,
            f"{found['failed'].sum()}/{len(found['failed'])}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if accuracy < 0.6 else "black",
        )
        ax.set_title(f"{cell.depth} layers, warm-up {cell.warmup}", fontsize=8)
    for ax, table in tables.items():
        image = ax.imshow(table, origin="lower", aspect="auto", vmin=0, vmax=1)
        ax.grid(False)
        ax.set_xticks(range(len(gains)), [f"{g:g}" for g in gains])
        ax.set_yticks(range(len(rates)), [f"{r:g}" for r in rates])
    figures.outer_labels(axes, "skip gain", "learning rate")
    fig.colorbar(image, ax=axes, label="accuracy; numbers: seeds that fail")
    return fig


def published(cell: Cell) -> str | None:
    """What the paper has of this design and depth; None where it has nothing."""
    design = "admin" if cell.design.startswith("admin") else cell.design
    return PUBLISHED.get(design, {}).get(cell.depth) if cell.part == "designs" else None


def claims(results, cells):
    """What each design of the paper's table has of what Pre-LN has after the same steps, with the
    longest warm-up of the run: the paper's networks have one."""
    own = of_part("designs", results)
    longest = max((cell.warmup for cell in own), default=0)
    for cell in own:
        known, pre = published(cell), dataclasses.replace(cell, design="pre")
        if known and pre in own and cell.warmup == longest:
            accuracy, of_pre = (own[c]["accuracy"][:, -1].astype(float) for c in (cell, pre))
            where = f"{cell.design}, {cell.depth} layers, warm-up {cell.warmup}"
            key = "post fails" if known == FAILED else "others train"
            yield row_of(key, where, accuracy if cell == pre else accuracy / of_pre)


def compare(results, cells):
    """Seeds that failed, beside the BLEU of networks as deep that trained or did not, and what
    their networks were like."""
    for cell, found in results.items():
        columns, known = columns_of(found), published(cell)
        count, seeds = int(found["failed"].sum()), len(found["failed"])
        ends = "{:.2f} to {:.2f}".format(*wilson_interval(count, seeds))
        share = np.median(gradient(found, "w_q")[:, 0] / gradient(found, "w_v")[:, 0])
        gain = "" if cell.gain is None else f", gain {cell.gain:g}"
        yield Comparison(
            f"{cell.part}: {cell.design}{gain}, {cell.depth} layers, rate "
            f"{cell.learning_rate:g}, warm-up {cell.warmup}, batch {cell.batch_size}: "
            "seeds that fail",
            f"{count} of {seeds} ({ends}), accuracy {columns['accuracy'].mean():.3f}",
            known,
            f"{SOURCE}; "
            * bool(known)
            + f"last residual ratio {columns['residual_ratio_before'].mean():.1g} before training "
            f"and {np.nanmean(columns['residual_ratio_after']):.1g} after it; gradient of W_Q "
            f"before it {share:.1g} of W_V's",
        )


def drawn(part: str, draw: Callable, caption: str = "") -> Drawing:
    """A figure of the cells of one part, where there are any."""
    return Drawing.of_part(functools.partial(of_part, part), draw, caption or caption_of(draw))


EXPERIMENT = Experiment(
    about=__doc__,
    flags=FLAGS,
    order=130,
    brief="which residual designs train at which depth, with what happens inside the same "
    "networks; the border of Post-LN in gain, rate and warm-up; batch sizes",
    title="Trainability of deep networks",
    claim="Liu et al. 2020, table 1: Post-LN Transformers of 12 and 18 layers diverge on WMT'14 "
    "English-German, Pre-LN and Admin train. Noci et al. 2022: tokens that have collapsed to rank "
    "one take the gradients from queries and keys.",
    presets={
        "quick": "--parts=designs --depths=18 --designs=post,depth_scaled --warmup=0 --num_seeds=3 "
        "--n_steps=100 --num_tokens=8 --num_labels=5 --d_model=16 --num_heads=2 --d_ff=32 "
        "--batch_size=16",
        "paper": "",
        "tiny": "--num_seeds=2 --depths=2 --border_depths=2 --batch_depth=2 --num_heads=2 "
        "--d_model=4 --d_ff=4 --num_tokens=3 --num_labels=4 --batch_size=3 --batch_sizes=2 "
        "--n_steps=2 --grid_seeds=1 --warmup=1 --designs=post,pre",
    },
    execution=ASKED,
    setup=cells_of,
    measure=lambda options, cells, run: designs.train_cells(options, cells_of, run),
    table=rows_of,
    claims=claims,
    compare=compare,
    figures={
        "failed": drawn(
            "designs",
            functools.partial(share_figure, field="depth", label="layers"),
            "Share of seeds whose loss is not finite or whose network still guesses after "
            "training, with 95 % intervals (Wilson).",
        ),
        "losses": drawn("designs", loss_figure),
        "why": drawn(
            "designs",
            functools.partial(inside_figure, by_step=False),
            "Residual ratio of the hidden states and gradient norms by layer, before training "
            "(solid, with bands over seeds) and after it (dashed, medians), of the same networks. "
            "A network that has learned has small gradients too, but tokens that differ.",
        ),
        "during": drawn(
            "designs",
            functools.partial(inside_figure, by_step=True),
            "The last layer's residual ratio and the root mean square over layers of the gradient "
            "to W_Q, while the same networks train.",
        ),
        "batch": drawn(
            "batch",
            functools.partial(share_figure, field="batch_size", label="batch size"),
            "The same share by batch size.",
        ),
        "border": drawn("border", border_figure),
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
