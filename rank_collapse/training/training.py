"""Training a network on a task of tokens: one seed, as pure functions.

Static settings are a `Recipe`; values that may be swept are a `Hyper` and are traced. Several
seeds, learning rates or dropout rates are one more axis: see `rank_collapse.training.ensemble`.
`models` defines the trained models, a network with a classifier or an encoder-decoder, and their
logits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rank_collapse import struct
from rank_collapse.annotations import Key, Number, Tree
from rank_collapse.network.encoder_decoder import EncoderDecoderParams
from rank_collapse.training.models import (
    Model as Model,
    batch_forward as batch_forward,
    forward as forward,
    init_model as init_model,
)
from rank_collapse.training.recipe import Hyper as Hyper, Recipe as Recipe, run_config
from rank_collapse.training.tasks.examples import LOSSES, Examples, token_mask
from rank_collapse.training.tasks.sequences import SequencePairs


class TrainState(struct.Struct):
    """Everything the next epoch needs apart from the data.

    Attributes:
        model: The network and its classifier, or an encoder-decoder.
        optimizer: State of `make_optimizer`.
        key: Random key of dropout, and of the order of the examples.
    """

    model: Model | EncoderDecoderParams
    optimizer: Tree
    key: Key


def num_batches(num_examples: int, batch_size: int) -> int:
    """Count the steps of an epoch; the last one may have fewer examples."""
    return -(-num_examples // batch_size)


def schedule_factor(
    recipe: Recipe, epoch: Number, step: Number, steps_per_epoch: int, warmup: Number = 0.0
) -> Number:
    """Compute the factor on the learning rate at a step; see `Recipe.schedule`.

    Every schedule is multiplied by min(1, s / warmup), s = step + 1; inverse_sqrt is then
    min(s / warmup, √(warmup / s)) (Vaswani et al. 2017, equation 3, whose d^-½ warmup^-½ is the
    learning rate here, the largest that is reached).

    Args:
        recipe: Recipe that holds the schedule.
        epoch, step: Numbers since the start; may be traced.
        steps_per_epoch: Static.
        warmup: Steps of the warm-up; 0 for none; may be traced.
    """
    warmup = jnp.maximum(jnp.asarray(warmup, jnp.float32), 1.0)
    nth = jnp.asarray(step + 1, jnp.float32)
    return jnp.minimum(nth / warmup, 1.0) * _schedule_shape(
        recipe, epoch, step, steps_per_epoch, warmup
    )


def _schedule_shape(recipe, epoch, step, steps_per_epoch, warmup):
    """Compute the factor of a schedule without the linear warm-up; see `schedule_factor`.

    Args:
        recipe: The recipe, which names the schedule.
        epoch, step: The epoch, and the step counted from the beginning of the training.
        steps_per_epoch: Steps of one epoch.
        warmup: Steps of the warm-up.
    """
    if recipe.schedule == "milestones":
        num_passed = sum(jnp.asarray(epoch >= m, jnp.float32) for m in recipe.milestones)
        return jnp.asarray(recipe.decay, jnp.float32) ** num_passed
    if recipe.schedule == "linear":
        return 1.0 - step / max(recipe.num_epochs * steps_per_epoch, 1)
    if recipe.schedule == "inverse_sqrt":
        return jnp.minimum(jnp.sqrt(warmup / (step + 1)), 1.0)
    return jnp.ones(())


def make_optimizer(hyper: Hyper, recipe: Recipe) -> Any:
    """Makes everything of the optimizer but the learning rate: clipping, decay, Adam or RAdam."""
    import optax  # here: it takes half a second, which `--help` need not

    clip = [] if recipe.clip_norm is None else [optax.clip_by_global_norm(recipe.clip_norm)]
    decay = optax.add_decayed_weights(hyper.weight_decay)
    scale = {"adam": optax.scale_by_adam, "radam": optax.scale_by_radam}[recipe.optimizer]
    return optax.chain(*clip, decay, scale(b1=recipe.b1, b2=recipe.b2, eps=recipe.eps))


def init_state(key: Key, hyper: Hyper, recipe: Recipe) -> TrainState:
    """Initialise the state before the first step.

    Args:
        key: Random key, which is split for the weights, and for dropout and the order of the
            examples.
        hyper, recipe: Traced values and recipe of the run.
    """
    key_model, key_train = jax.random.split(key)
    run_recipe = dataclasses.replace(recipe, config=run_config(recipe, hyper))
    model = init_model(key_model, run_recipe, hyper.init_scale)
    if recipe.start is not None:
        model = model.replace(network=recipe.start(model.network, hyper.start))
    optimizer = make_optimizer(hyper, recipe).init(model)
    return TrainState(model=model, optimizer=optimizer, key=key_train)


def train_step(
    state: TrainState,
    batch: Examples | SequencePairs,
    weights: Bool[Array, "b"],
    step: Number,
    factor: Number,
    hyper: Hyper,
    recipe: Recipe,
) -> tuple[TrainState, Float[Array, ""]]:
    """Makes one step of the optimizer on one batch.

    Args:
        state: State before the step.
        batch: Examples, or SequencePairs of an encoder-decoder.
        weights: Whether each example counts, since the last batch of an epoch may be short.
        step: Number of the step since the start, which picks the dropout.
        factor: Factor from the schedule, which multiplies the learning rate.
        hyper, recipe: Traced values and recipe of the run.

    Returns:
        The state after the step and the loss before it.
    """
    key, rate = None, 0.0
    if hyper.dropout is not None:
        key = jax.random.fold_in(jax.random.fold_in(state.key, 1), step)
        rate = hyper.dropout
    counts = weights[:, None] & token_mask(batch)
    config = run_config(recipe, hyper, unroll=recipe.unroll)

    def compute_loss(model):
        """Computes the loss of the batch for a model, with dropout."""
        logits = batch_forward(
            model,
            batch,
            config,
            dropout_key=key,
            dropout_rate=rate,
            output_dropout=hyper.output_dropout if recipe.output_dropout else False,
        )
        return LOSSES[recipe.loss](logits, batch.labels, counts, hyper.label_smoothing)

    value, gradient = jax.value_and_grad(compute_loss)(state.model)
    updates, optimizer = make_optimizer(hyper, recipe).update(
        gradient, state.optimizer, state.model
    )
    step_size = hyper.learning_rate * factor
    model = jax.tree.map(lambda p, u: p - step_size.astype(p.dtype) * u, state.model, updates)
    return state.replace(model=model, optimizer=optimizer), value


def train_epoch(
    state: TrainState,
    examples: Examples | SequencePairs,
    epoch: Number,
    hyper: Hyper,
    recipe: Recipe,
) -> tuple[TrainState, Float[Array, ""]]:
    """Train for one epoch: (state after it, mean loss).

    Args:
        state: State before the epoch.
        examples: The training data.
        epoch: Number of the epoch since the start.
        hyper, recipe: Traced values and recipe of the run.
    """
    count, size = len(examples), recipe.batch_size
    steps = num_batches(count, size)
    order = jnp.arange(count)
    if recipe.shuffle:
        key = jax.random.fold_in(jax.random.fold_in(state.key, 0), epoch)
        order = jax.random.permutation(key, count)
    # The short last batch is filled with examples of weight 0.
    order = order[jnp.arange(steps * size) % count].reshape(steps, size)
    weights = (jnp.arange(steps * size) < count).reshape(steps, size)

    def run_step(state, step_inputs):
        """Trains on one batch of the epoch."""
        index, indices, weights = step_inputs
        batch = jax.tree.map(lambda a: a[indices], examples)
        step = epoch * steps + index
        factor = schedule_factor(recipe, epoch, step, steps, hyper.warmup)
        return train_step(state, batch, weights, step, factor, hyper, recipe)

    state, losses = jax.lax.scan(run_step, state, (jnp.arange(steps), order, weights))
    return state, jnp.mean(losses)
