"""The cells of the trainability experiment: networks by depth, and the floats that are swept."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from absl import flags

import rank_collapse as rc
from experiments.shell import cli
from experiments.shell.flag_values import check_names
from experiments.shell.room import Room
from experiments.trainability.measure import make_measure
from experiments.trained.cells import Program, results_of_cells
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training.recipe import Hyper, Recipe
from rank_collapse.training.tasks import sequences

PARTS = ("designs", "border", "batch")
# Flags that say which cells are asked for; what a cell gives does not depend on the others.
ASKED = (
    "parts", "depths", "designs", "warmup", "learning_rate", "batch_sz", "border_depths",
    "border_gains", "border_rates", "batch_sizes", "batch_depth",
)  # fmt: skip
STEPS_PER_EPOCH = 25  # of which the training loss is the mean
LOOKS = 4  # at the networks while they train, besides the one before


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


def cells_of(options: flags.FlagValues) -> list[Cell]:
    """All cells of the flags; of the first part the shallow ones without warm-up first.

    Raises:
        ValueError: A part or a design that there is not.
    """
    check_names(options, "parts", PARTS)
    check_names(options, "designs", rc.DESIGNS)
    rate, batch = options.learning_rate, options.batch_sz
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


def train_cells(
    options: flags.FlagValues, run: RunFolder, *, make_measure: Callable = make_measure
) -> dict[Cell, dict[str, Any]]:
    """{cell: its results} of all cells; see `results_of_cells`.

    Args:
        options: The flags.
        run: The run folder.
        make_measure: recipe → what is measured of each run, as `measure.make_measure`.
    """
    mesh, cells = cli.mesh(options), cells_of(options)

    @functools.cache  # cells that differ in floats alone share a program
    def program_of(config, batch_size, profiled):
        recipe = Recipe(
            config=config, num_outputs=options.num_labels, batch_size=batch_size,
            num_epochs=max(1, options.n_steps // STEPS_PER_EPOCH), shuffle=True, unroll=1,
        )  # fmt: skip
        make_data = functools.partial(data_of, options, batch_size)
        return Program(
            recipe, make_data, make_measure(recipe), mesh=mesh, looks=LOOKS, along=True,
            prepare=functools.partial(admin_gains, recipe) if profiled else None,
        )  # fmt: skip

    groups: dict[Any, dict[str, Hyper]] = {}
    for cell in cells:
        config, floats = split(config_of(options, cell))
        hyper = Hyper(cell.learning_rate, dropout=None, warmup=cell.warmup, network=floats)
        key = config, cell.batch_size, cell.design == "admin", cell.part
        groups.setdefault(key, {})[cell.name] = hyper
    found = {}
    with Room(options, mesh, run.log) as room:
        for cell in cells:  # in their order, although a program serves several
            if cell.name in found:
                continue
            key = next(k for k, group in groups.items() if cell.name in group)
            *program, part = key
            seeds = options.num_seeds if part == "designs" else options.grid_seeds
            together = max(1, options.num_seeds // seeds)
            names = list(groups[key])
            first = names.index(cell.name)
            few = {name: groups[key][name] for name in names[first : first + together]}
            found |= results_of_cells(
                options, run, program_of(*program), few,
                room=room, num_seeds=seeds, together=together,
            )  # fmt: skip
    return {cell: found[cell.name] for cell in cells}


def admin_gains(recipe: Recipe, model: Any, data: Any, hyper: Hyper) -> Hyper:
    """Admin's ω, profiled on the first batch of each seed's own initial network."""
    config = recipe.config.replace(**hyper.network | {"skip_gain": 1.0})
    batch = data["train"].inputs[: recipe.batch_size]
    gains = rc.admin_profile(model.network, batch, config).skip_gain
    return hyper.replace(network=hyper.network | {"skip_gain": gains})


def config_of(options: flags.FlagValues, cell: Cell) -> rc.TransformerConfig:
    """The network of a cell: an encoder that answers token by token."""
    d = options.hidden_dim
    embedding = EmbeddingConfig(
        vocab_size=options.num_labels, d_embed=d, positions="learned",
        num_positions=options.seq_len, projection="before_norm",
    )  # fmt: skip
    config = rc.design(
        rc.transformer(
            cell.depth, options.width, d, d_ff=options.d_ff, mlp="relu", embedding=embedding
        ),
        cell.design,
    )
    return config if cell.gain is None else config.replace(skip_gain=cell.gain)


FLOATS = {"skip_gain": 1.0, "branch_gain": 1.0, "init_gain": 1.0}


def split(config: rc.TransformerConfig) -> tuple[rc.TransformerConfig, dict[str, Any]]:
    """(what is compiled in, the floats that differ between runs)."""
    return config.replace(**FLOATS), {name: getattr(config, name) for name in FLOATS}


def data_of(options: flags.FlagValues, batch_size: int, key: Any) -> dict[str, Any]:
    """Training data of one seed, an epoch of `STEPS_PER_EPOCH` batches, and data of its own."""
    key_train, key_eval = jax.random.split(key)
    make: Callable = functools.partial(
        sequences.make_examples,
        seq_len=options.seq_len, num_letters=options.num_labels, task=options.task,
    )  # fmt: skip
    return {
        "train": make(key_train, STEPS_PER_EPOCH * batch_size),
        "eval": make(key_eval, options.n_eval_data),
    }
