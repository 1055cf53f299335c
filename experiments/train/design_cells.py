"""Encoders of a residual design at a depth that learn letters: their cells, training, measures."""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import rank_collapse as rc
from experiments.lab import (
    Chunk,
    Executor,
    Flags,
    Options,
    RunFolder,
    cli,
    report_activity,
    shared_flags,
)
from experiments.train.train_networks import describe_cells, keep_states
from experiments.train.trained_tasks import train_and_eval
from experiments.train.weight_matrices import compute_matrix_norms, get_weight_matrices
from rank_collapse.network.inputs import input_states
from rank_collapse.network.residual import Gains
from rank_collapse.training import Ensemble, Hyper, Model, Recipe
from rank_collapse.training.recipe import run_config
from rank_collapse.training.tasks import examples, sequences
from rank_collapse.training.tasks.examples import Examples
from rank_collapse.training.training import batch_forward

STEPS_PER_EPOCH = 25  # of which the training loss is the mean
LOOKS = 4  # at the networks while they train, besides the one before
MEASURES = ("token_cosine", "residual_ratio")
GRADIENTS = ("w_q", "w_k", "w_v", "w_o", "w_in", "w_out")
NUM_MEASURED = 8  # examples whose hidden states are measured
FLOATS = {"skip_gain": 1.0, "branch_gain": 1.0, "init_gain": 1.0}


@dataclass(frozen=True)
class Cell:
    """One combination of the varied settings; each is run with several seeds."""

    depth: int
    design: str  # Name of a residual design
    learning_rate: float
    warmup: int
    batch_size: int

    @property
    def name(self) -> str:
        """Names the cell's arrays."""
        return (
            f"designs depth={self.depth} {self.design} rate={self.learning_rate:g} "
            f"warmup={self.warmup} batch={self.batch_size}"
        )


def make_flags(selecting: Sequence[str]) -> Flags:
    """Makes the flags of networks that learn letters, without the flags that choose cells.

    Args:
        selecting: Flags that choose which part of a folder is shown, and do not change its
            contents.
    """
    flags = cli.make_flags(
        "trainability",
        num_seeds=8,
        can_grow=True,
        shows="failed",
        traced=("learning_rate",),
        selecting=selecting,
    )
    shared_flags.define(
        flags,
        least={"num_tokens": 1, "n_eval_data": 8},
        num_heads=4,
        d_model=48,
        d_ff=96,
        num_tokens=16,
        num_labels=10,
        n_eval_data=64,
        batch_size=32,
        learning_rate=1e-3,
        seed_chunk=0,
    )
    flags.define("enum", "task", "reverse", "Task, learned token by token.", sequences.TASKS)
    text = f"Training steps, a multiple of {STEPS_PER_EPOCH}."
    flags.define("integer", "n_steps", 300, text, lower_bound=1)
    return flags


def make_measure(
    recipe: Recipe,
) -> Callable[[Model, dict[str, Examples], Hyper, jax.Array], dict[str, jax.Array]]:
    """Makes measure(model, data, hyper, key) of one run.

    The examples are held out. It returns "accuracy" and "loss" [], and the mean over examples of
    `MEASURES` for the hidden states [L + 1]. "gradients" [len(GRADIENTS), L] are Frobenius norms of
    the loss's gradient for each matrix of each layer, all heads together.

    Args:
        recipe: The training recipe.
    """

    def measure(model, data, hyper, _):
        """Measures one run on held-out examples.

        Args:
            model, data, hyper: The run's network, examples and values.

        Returns:
            {name: accuracy, loss, norms of gradients, or a measure of states by layer}.
        """
        config, held_out = run_config(recipe, hyper), data["eval"]

        def compute_loss(model):
            logits = batch_forward(model, held_out, config)
            return examples.loss_metric(logits, held_out), logits

        (loss, logits), gradient = jax.value_and_grad(compute_loss, has_aux=True)(model)
        norms = compute_matrix_norms(get_weight_matrices(gradient.network))
        norms = norms["attention"] | norms["mlp"]

        def measure_states(inputs):
            states = input_states(model.network, inputs, config)
            hidden = rc.apply(model.network, states, config).hidden
            return rc.profile(hidden, measures=MEASURES)

        profiles = jax.vmap(measure_states)(held_out.first(NUM_MEASURED).inputs)
        return {
            "accuracy": examples.token_accuracy(logits, held_out),
            "loss": loss,
            "gradients": jnp.stack([norms[name] for name in GRADIENTS]),
        } | {name: jnp.mean(profiles[name], axis=0) for name in MEASURES}

    return measure


def train_cells(
    options: Options,
    make_cells: Callable[[Options], Sequence[Cell]],
    folder: RunFolder,
) -> dict[Cell, dict[str, np.ndarray]]:
    """Trains the cells of the flags and measures them, or reads finished cells from the run.

    Args:
        options: The flags of `make_flags`.
        make_cells: flags → cells; cells that differ only in floats share a program.
        folder: The run folder.

    Returns:
        {cell: what `make_measure` measures [s, looks, ...], "losses" [s, epochs], "diverged_at" and
        "failed" [s]}.
    """

    def group_by_program(point):
        """Groups cells (a network with its training) by the part of their settings that is
        compiled: {compiled part: {cell: the other numbers}}."""
        groups: dict[Hashable, dict[str, Hyper]] = {}
        for cell in make_cells(point):
            config, floats = split_floats(make_network(options, cell))
            if cell.design == "admin":  # as `admin_gains` returns it: one program draws all weights
                ones = np.ones(cell.depth)
                floats["skip_gain"] = Gains(attention=ones, mlp=ones)
            hyper = Hyper(cell.learning_rate, dropout=None, warmup=cell.warmup, network=floats)
            static = config, cell.batch_size, cell.design == "admin"
            groups.setdefault(static, {})[cell.name] = jax.tree.map(np.float32, hyper)
        return groups

    limit = guess_limit(options.n_eval_data * options.num_tokens, options.num_labels)
    results = {}
    with Executor(options, folder) as executor:
        for static in group_by_program(options):
            config, batch_size, is_profiled = static

            def select_floats(point, static=static):
                return group_by_program(point).get(static, {})

            ensemble = make_ensemble(options, config, batch_size, executor.mesh)
            profile = ensemble.map_models(functools.partial(admin_gains, ensemble.recipe))
            for chunk in executor.chunks(select_floats, most=max(16, options.num_seeds)):
                if is_profiled:
                    chunk = profile_gains(ensemble, profile, chunk, executor.run)
                with keep_states(ensemble, chunk, executor.run) as calls:
                    trained = ensemble.train(*chunk.unpadded, **calls)
                losses = {"losses": trained.losses, "diverged_at": trained.diverged_at}
                executor.save(chunk, trained.watched | losses)
            results |= executor.read(select_floats)
    return {
        cell: results[cell.name] | {"failed": has_failed(results[cell.name], limit)}
        for cell in make_cells(options)
    }


def make_ensemble(
    options: Options, config: rc.TransformerConfig, batch_size: int, mesh: Mesh
) -> Ensemble:
    """Makes what trains the cells of one program, and measures them at each look.

    Args:
        options: The flags.
        config: The network, without the floats of a cell.
        batch_size: Examples of a step.
        mesh: The devices.
    """
    num_epochs = options.n_steps // STEPS_PER_EPOCH
    recipe = Recipe(
        config, options.num_labels, batch_size, num_epochs=num_epochs, shuffle=True, unroll=1
    )
    return Ensemble(
        recipe,
        functools.partial(make_data, options, batch_size),
        mesh=mesh,
        epochs_per_chunk=-(-num_epochs // LOOKS),
        watch=make_measure(recipe),
    )


def profile_gains(ensemble: Ensemble, profile: Callable, chunk: Chunk, folder: RunFolder) -> Chunk:
    """Replaces the skip gains of a chunk's runs by `admin_gains` of their own initial networks.

    Args:
        ensemble: What trains them.
        profile: Function that `Ensemble.map_models` makes of `admin_gains`.
        chunk: The runs.
        folder: The run folder, for its log.
    """
    keys, hyper = chunk.unpadded
    with report_activity(f"preparing {describe_cells(chunk)}", folder.log):
        program, runs = ensemble.begin(keys, hyper)
        sharded = ensemble.lay_out((hyper, keys))
        hyper = profile(*program.unflatten(runs), *sharded, num_seeds=len(chunk.seeds))
    return chunk._replace(floats=hyper)


def admin_gains(
    recipe: Recipe,
    model: Model,
    data: dict[str, Examples],
    hyper: Hyper,
    _: jax.Array | None = None,
) -> Hyper:
    """Profiles Admin's ω on the first batch of each seed's own initial network.

    Args:
        recipe: The training recipe.
        model: The initial network of the seed.
        data: Examples of the seed.
        hyper: Traced values of the run; its skip gains are replaced.
    """
    config = recipe.config.replace(**hyper.network | {"skip_gain": 1.0})
    batch = data["train"].inputs[: recipe.batch_size]
    gains = rc.network.admin_profile(model.network, batch, config).skip_gain
    return hyper.replace(network=hyper.network | {"skip_gain": gains})


def make_network(options: Options, cell: Cell) -> rc.TransformerConfig:
    """Makes the network of a cell: an encoder that answers token by token.

    Args:
        options: The flags.
        cell: Cell of the network.
    """
    d = options.d_model
    embedding = rc.EmbeddingConfig(
        vocab_size=options.num_labels,
        d_embed=d,
        positions="learned",
        num_positions=options.num_tokens,
        projection="before_norm",
    )
    encoder = rc.transformer(
        cell.depth, options.num_heads, d, d_ff=options.d_ff, mlp="relu", embedding=embedding
    )
    config = rc.design(encoder, cell.design)
    # Admin's gains are those of the first batch: `admin_gains`.
    return config.replace(skip_gain=1.0) if cell.design == "admin" else config


def split_floats(config: rc.TransformerConfig) -> tuple[rc.TransformerConfig, dict[str, float]]:
    """Splits a network's configuration into the compiled part and the numbers that differ between
    runs."""
    return config.replace(**FLOATS), {name: getattr(config, name) for name in FLOATS}


def make_data(options: Options, batch_size: int, key: jax.Array) -> dict[str, Examples]:
    """Makes one seed's training data, an epoch of `STEPS_PER_EPOCH` batches, and held-out data.

    Args:
        options: The flags.
        batch_size: Examples of a step.
        key: Random key of the seed.
    """
    make = functools.partial(
        sequences.make_examples,
        seq_len=options.num_tokens,
        num_letters=options.num_labels,
        task=options.task,
    )
    return train_and_eval(make, STEPS_PER_EPOCH * batch_size, options.n_eval_data, key)


def guess_limit(tokens: int, letters: int) -> float:
    """Computes the accuracy up to which a network may be guessing.

    1/c + 2.58 √((1/c)(1 − 1/c)/tokens) for c letters: one guess in 200 lies above it.
    """
    share = 1 / letters
    return share + 2.58 * math.sqrt(share * (1 - share) / tokens)


def has_diverged(results: dict[str, np.ndarray]) -> np.ndarray:
    """Flags the seeds that had a loss that is not finite, [s]."""
    return ~np.isfinite(results["losses"]).all(axis=1)


def has_failed(results: dict[str, np.ndarray], limit: float) -> np.ndarray:
    """Flags the seeds that diverged, or whose final accuracy is not above the limit, [s]."""
    return has_diverged(results) | ~(results["accuracy"][:, -1] > limit)


def gradient_norms(results: dict[str, np.ndarray], matrix: str) -> np.ndarray:
    """Selects the norm of the loss's gradient to one matrix, [s, t, L]."""
    return results["gradients"][:, :, GRADIENTS.index(matrix)]
