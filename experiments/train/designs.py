"""Encoders of a residual design at a depth that learn letters: their cells, training, measures."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.lab.executor import Executor
from experiments.lab.flags import Flags
from experiments.lab.folder import RunFolder
from experiments.train.training import Training, nested
from rank_collapse.network.inputs import input_states
from rank_collapse.network.measured import updates
from rank_collapse.runs.seeds import seed_keys
from rank_collapse.training import Ensemble, Hyper, Model, Recipe
from rank_collapse.training.recipe import run_config
from rank_collapse.training.tasks import examples, sequences
from rank_collapse.training.training import batch_forward

STEPS_PER_EPOCH = 25  # of which the training loss is the mean
LOOKS = 4  # at the networks while they train, besides the one before
MEASURES = ("token_cosine", "residual_ratio")
GRADIENTS = ("w_q", "w_k", "w_v", "w_o", "w_in", "w_out")
LOOKED_AT = 8  # examples whose hidden states are measured
FLOATS = {"skip_gain": 1.0, "branch_gain": 1.0, "init_gain": 1.0}


@dataclass(frozen=True)
class Cell:
    """One combination of what is varied; each is run with several seeds."""

    depth: int
    design: str  # Name of a residual design
    learning_rate: float
    warmup: int
    batch_size: int

    @property
    def name(self) -> str:
        """Of the cell's arrays."""
        return (
            f"designs depth={self.depth} {self.design} rate={self.learning_rate:g} "
            f"warmup={self.warmup} batch={self.batch_size}"
        )


def make_measure(recipe: Recipe) -> Callable[[Model, Any, Hyper, Any], dict[str, Any]]:
    """measure(model, data, hyper, key) of one run.

    It returns, on examples that training does not see, "accuracy" and "loss" [], the mean over
    examples of `MEASURES` of the hidden states [L + 1], and "gradients" [len(GRADIENTS), L], the
    Frobenius norm of the loss's gradient to each matrix of each layer, all heads together.
    """

    def measure(model, data, hyper, _):
        config, held_out = run_config(recipe, hyper), data["eval"]

        def loss(model):
            logits = batch_forward(model, held_out, config)
            return examples.loss_metric(logits, held_out), logits

        (value, logits), gradient = jax.value_and_grad(loss, has_aux=True)(model)
        norms = updates.compute_matrix_norms(updates.get_weight_matrices(gradient.network))
        norms = norms["attention"] | norms["mlp"]

        def profiles(inputs):
            states = input_states(model.network, inputs, config)
            hidden = rc.apply(model.network, states, config).hidden
            return rc.profile(hidden, measures=MEASURES)

        found = jax.vmap(profiles)(held_out.first(LOOKED_AT).inputs)
        return {
            "accuracy": examples.token_accuracy(logits, held_out),
            "loss": value,
            "gradients": jnp.stack([norms[name] for name in GRADIENTS]),
        } | {name: jnp.mean(found[name], axis=0) for name in MEASURES}

    return measure


def train_cells(
    options: Flags,
    cells_of: Callable[[Flags], Sequence[Cell]],
    run: RunFolder,
    *,
    make_measure: Callable = make_measure,
) -> dict[Cell, dict[str, Any]]:
    """{cell: what `Training` gives and "failed" [s]} of the cells of the flags; see `make_measure`
    for what is measured."""

    @functools.cache
    def program_of(static):
        config, batch_size, profiled = static
        epochs = max(1, options.n_steps // STEPS_PER_EPOCH)
        recipe = Recipe(
            config, options.num_labels, batch_size, num_epochs=epochs, shuffle=True, unroll=1
        )
        ensemble = Ensemble(
            recipe,
            functools.partial(data_of, options, batch_size),
            mesh=executor.mesh,
            epochs_per_chunk=-(-epochs // LOOKS),
            watch=make_measure(recipe),
        )
        gains = functools.partial(admin_gains, recipe)
        return Training(
            ensemble, executor.run, prepared=ensemble.of_models(gains) if profiled else None
        )

    def programs_of(options):
        """{what is compiled in: {cell: the floats}}."""
        found: dict[Any, dict[str, Hyper]] = {}
        for cell in cells_of(options):
            config, floats = split(network_of(options, cell))
            hyper = Hyper(cell.learning_rate, dropout=None, warmup=cell.warmup, network=floats)
            static = config, cell.batch_size, cell.design == "admin"
            found.setdefault(static, {})[cell.name] = jax.tree.map(np.float32, hyper)
        return found

    limit = guess_limit(options.n_eval_data * options.num_tokens, options.num_labels)
    cells, arrays = cells_of(options), {}
    with Executor(options, run) as executor:
        about = {
            "keys": seed_keys(options.seed, options.num_seeds),
            "most": max(16, options.num_seeds),
        }
        for static in programs_of(options):

            def floats_of(member, static=static):
                return programs_of(member).get(static, {})

            program = functools.partial(program_of, static)
            arrays |= executor.map(program, floats_of, **about)
    found = {cell: nested(arrays[cell.name]) for cell in cells}
    return {cell: own | {"failed": failed(own, limit)} for cell, own in found.items()}


def admin_gains(recipe: Recipe, model: Any, data: Any, hyper: Hyper, _: Any = None) -> Hyper:
    """Admin's ω, profiled on the first batch of each seed's own initial network."""
    config = recipe.config.replace(**hyper.network | {"skip_gain": 1.0})
    batch = data["train"].inputs[: recipe.batch_size]
    gains = rc.network.admin_profile(model.network, batch, config).skip_gain
    return hyper.replace(network=hyper.network | {"skip_gain": gains})


def network_of(options: Flags, cell: Cell) -> rc.TransformerConfig:
    """The network of a cell: an encoder that answers token by token."""
    d = options.d_model
    embedding = rc.EmbeddingConfig(
        vocab_size=options.num_labels,
        d_embed=d,
        positions="learned",
        num_positions=options.num_tokens,
        projection="before_norm",
    )
    config = rc.design(
        rc.transformer(
            cell.depth, options.num_heads, d, d_ff=options.d_ff, mlp="relu", embedding=embedding
        ),
        cell.design,
    )
    # Admin's gains are those of the first batch: `admin_gains`.
    return config.replace(skip_gain=1.0) if cell.design == "admin" else config


def split(config: rc.TransformerConfig) -> tuple[rc.TransformerConfig, dict[str, Any]]:
    """(what is compiled in, the floats that differ between runs)."""
    return config.replace(**FLOATS), {name: getattr(config, name) for name in FLOATS}


def data_of(options: Flags, batch_size: int, key: Any) -> dict[str, Any]:
    """Training data of one seed, an epoch of `STEPS_PER_EPOCH` batches, and data of its own."""
    key_train, key_eval = jax.random.split(key)
    make: Callable = functools.partial(
        sequences.make_examples,
        seq_len=options.num_tokens,
        num_letters=options.num_labels,
        task=options.task,
    )
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


def diverged(found: dict[str, Any]) -> np.ndarray:
    """Which seeds had a loss that is not finite, [s]."""
    return ~np.isfinite(found["losses"]).all(axis=1)


def failed(found: dict[str, Any], limit: float) -> np.ndarray:
    """Which seeds diverged or still guess at the end, [s]."""
    return diverged(found) | ~(found["accuracy"][:, -1] > limit)


def gradient(found: dict[str, Any], matrix: str) -> np.ndarray:
    """Norm of the loss's gradient to one matrix, [s, t, L]."""
    return found["gradients"][:, :, GRADIENTS.index(matrix)]


def steps_of(found: dict[str, Any]) -> np.ndarray:
    """The training step of each look."""
    looks = found["accuracy"].shape[1]
    return STEPS_PER_EPOCH * found["losses"].shape[1] * np.arange(looks) / (looks - 1)
