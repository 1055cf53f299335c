"""Training a network with a linear read-out on a token-wise task: one seed, as pure functions.

What is static is a `Recipe`; what may be swept is a `Hyper` and is traced. Several seeds, learning
rates or dropout rates are one more axis: see `rank_collapse.training.ensemble`.

Axis letters: b examples, n tokens, i input width, c classes or outputs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from rank_collapse import struct
from rank_collapse.network import entry, parameters, transformer
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.dropout import dropout, dropout_branches
from rank_collapse.paths.sets import Classifier
from rank_collapse.training.tasks.examples import (
    LOSSES,
    Examples,
    part_mask,
    part_positions,
    token_mask,
)

SCHEDULES = ("constant", "milestones", "linear")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a training run compiles in.

    Attributes:
        config: The network, with an embedding.
        num_outputs: Classes, or width of the targets.
        batch_size, num_epochs: Examples per step, passes over the data.
        loss: A name of `tasks.examples.LOSSES`.
        shuffle: Whether each epoch draws a new order; if not, batches are as the data lie.
        schedule: "constant"; "milestones": learning rate · decay^(milestones passed), by epoch;
            "linear": to 0 at the last step.
        milestones, decay: Of the milestones.
        clip_norm: Largest global norm of a gradient; None for any.
        output_dropout: Dropout of the network's output too, before the read-out.
        unroll: Layers computed per step of the loop over the depth: more take longer to compile
            and save the memory traffic of the loop's buffers. In place of `config.unroll`, which
            the evaluation keeps. Does not change results.
    """

    config: TransformerConfig
    num_outputs: int
    batch_size: int
    num_epochs: int
    loss: str = "cross_entropy"
    shuffle: bool = False
    schedule: str = "constant"
    milestones: tuple[int, ...] = (15, 30, 40, 50, 60)
    decay: float = 0.91
    clip_norm: float | None = None
    output_dropout: bool = False
    unroll: int = 6

    def __post_init__(self):
        for name in ("num_outputs", "batch_size", "unroll"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a positive integer")
        if self.num_epochs < 0:
            raise ValueError(f"num_epochs={self.num_epochs} is negative")
        if self.loss not in LOSSES:
            raise ValueError(f"loss={self.loss!r} is not one of {tuple(LOSSES)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is not one of {SCHEDULES}")
        if self.config.embedding is None:
            raise ValueError("config.embedding=None: a trained network needs an embedding")


@struct.dataclass
class Hyper:
    """What may differ between the runs of an ensemble, all traced scalars.

    `weight_decay` is added to the gradient (L2, as in Adam with decay), `init_scale` multiplies
    the initial weights of the layers. `network` holds floats of the configuration by name
    ("skip_gain", "branch_gain", "temperature"), each as it may stand there, in place of the
    recipe's; None for none.
    """

    learning_rate: Any = 1e-3
    weight_decay: Any = 0.0
    dropout: Any = 0.1
    init_scale: Any = 1.0
    network: Any = None


@struct.dataclass
class Model:
    """A network and the classifier that reads each token of its output."""

    network: Any  # parameters.TransformerParams
    classifier: Any  # path_sets.Classifier


@struct.dataclass
class TrainState:
    """Everything the next epoch needs apart from the data."""

    model: Model
    optimizer: Any
    key: Any  # of dropout and of the order of the examples


def config_of(recipe: Recipe, hyper: Hyper) -> TransformerConfig:
    """The recipe's network with the floats of one run."""
    return recipe.config.replace(**(hyper.network or {}))


def num_batches(num_examples: int, batch_size: int) -> int:
    """Steps in an epoch; the last one may have fewer examples."""
    return -(-num_examples // batch_size)


def init_model(key: Any, recipe: Recipe, init_scale: Any = 1.0) -> Model:
    """Initial weights: the network as its config says, the read-out normal(0, 0.02), bias 0."""
    key_network, key_classifier = jax.random.split(key)
    params = parameters.init(key_network, recipe.config, weight_scale=init_scale)
    shape = (recipe.config.d_model, recipe.num_outputs)
    w = 0.02 * jax.random.normal(key_classifier, shape)
    return Model(network=params, classifier=Classifier(w, jnp.zeros(recipe.num_outputs)))


def init_state(key: Any, hyper: Hyper, recipe: Recipe) -> TrainState:
    """The state before the first step."""
    key_model, key_train = jax.random.split(key)
    model = init_model(key_model, recipe, hyper.init_scale)
    optimizer = _optimizer(hyper, recipe).init(model)
    return TrainState(model=model, optimizer=optimizer, key=key_train)


def forward(
    model: Model,
    inputs: Any,
    config: TransformerConfig,
    *,
    mask: Any = None,
    positions: Any = None,
    dropout_key: Any = None,
    dropout_rate: Any = 0.0,
    output_dropout: bool = False,
) -> Float[Array, "n c"]:
    """Logits of one example; with a key, dropout on embedding, attention weights and branches.

    Args:
        model: Weights.
        inputs: Token ids [n] or vectors [n, i].
        config: The network.
        mask: Bool [n], which tokens exist, or [n, n], which tokens a token may look at.
        positions: Int [n], positions of the tokens; 0..n-1 by default.
        dropout_key, dropout_rate: None for none.
        output_dropout: With a key, dropout on the network's output too.
    """
    states = entry.input_states(model.network, inputs, config, positions=positions)
    if dropout_key is not None:
        dropout_key, key_embedding, key_output = dropout_branches(dropout_key, 3)
        states = dropout(key_embedding, states, dropout_rate)
    output = transformer.apply(
        model.network, states, config, mask=mask, positions=positions,
        dropout_key=dropout_key, dropout_rate=dropout_rate,
    ).output  # fmt: skip
    if dropout_key is not None and output_dropout:
        output = dropout(key_output, output, dropout_rate)
    w, b = model.classifier
    return output @ w + b[None, :]


def batch_forward(
    model: Model,
    examples: Examples,
    config: TransformerConfig,
    *,
    dropout_key: Any = None,
    dropout_rate: Any = 0.0,
    output_dropout: bool = False,
    batch_size: int | None = None,
) -> Float[Array, "b n c"]:
    """`forward` of every example; `batch_size` at a time where that is given."""
    keys = None
    if dropout_key is not None:
        keys = dropout_branches(dropout_key, len(examples))

    def single(item):
        inputs, mask, parts, key = item
        positions = None
        if parts is not None:
            mask, positions = part_mask(parts), part_positions(parts)
        return forward(
            model, inputs, config, mask=mask, positions=positions,
            dropout_key=key, dropout_rate=dropout_rate, output_dropout=output_dropout,
        )  # fmt: skip

    items = (examples.inputs, examples.mask, examples.parts, keys)
    if batch_size is None or batch_size >= len(examples):
        return jax.vmap(single)(items)
    return jax.lax.map(single, items, batch_size=batch_size)


def train_step(
    state: TrainState,
    batch: Examples,
    weights: Bool[Array, "b"],
    step: Any,
    factor: Any,
    hyper: Hyper,
    recipe: Recipe,
) -> tuple[TrainState, Float[Array, ""]]:
    """One Adam step on one batch.

    Args:
        state: State before.
        batch: Examples.
        weights: Which of them count: the last batch of an epoch may be short.
        step: Number of the step since the start, which picks the dropout.
        factor: Of the schedule, multiplies the learning rate.
        hyper, recipe: The run.

    Returns:
        The state after the step and the loss before it.
    """
    key = jax.random.fold_in(jax.random.fold_in(state.key, 1), step)
    counts = weights[:, None] & token_mask(batch)
    config = config_of(recipe, hyper).replace(unroll=recipe.unroll)

    def loss(model):
        logits = batch_forward(
            model, batch, config, dropout_key=key, dropout_rate=hyper.dropout,
            output_dropout=recipe.output_dropout,
        )  # fmt: skip
        return LOSSES[recipe.loss](logits, batch.labels, counts)

    value, gradient = jax.value_and_grad(loss)(state.model)
    updates, optimizer = _optimizer(hyper, recipe).update(gradient, state.optimizer, state.model)
    rate = hyper.learning_rate * factor
    model = jax.tree.map(lambda p, u: p - rate.astype(p.dtype) * u, state.model, updates)
    return state.replace(model=model, optimizer=optimizer), value


def train_epoch(
    state: TrainState, examples: Examples, epoch: Any, hyper: Hyper, recipe: Recipe
) -> tuple[TrainState, Float[Array, ""]]:
    """One pass over the data.

    Args:
        state: State before.
        examples: The training data.
        epoch: Number of the epoch since the start; may be traced.
        hyper, recipe: The run.

    Returns:
        The state after the epoch and the mean loss of its steps.
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

    def body(state, item):
        index, chosen, weights = item
        batch = jax.tree.map(lambda a: a[chosen], examples)
        step = epoch * steps + index
        factor = schedule_factor(recipe, epoch, step, steps)
        return train_step(state, batch, weights, step, factor, hyper, recipe)

    state, losses = jax.lax.scan(body, state, (jnp.arange(steps), order, weights))
    return state, jnp.mean(losses)


def schedule_factor(recipe: Recipe, epoch: Any, step: Any, steps_per_epoch: int) -> Any:
    """What multiplies the learning rate at a step; see `Recipe.schedule`."""
    if recipe.schedule == "milestones":
        passed = sum(jnp.asarray(epoch >= m, jnp.float32) for m in recipe.milestones)
        return jnp.asarray(recipe.decay, jnp.float32) ** passed
    if recipe.schedule == "linear":
        return 1.0 - step / max(recipe.num_epochs * steps_per_epoch, 1)
    return jnp.ones(())


def _optimizer(hyper, recipe):
    """Everything of Adam but the learning rate."""
    clip = [] if recipe.clip_norm is None else [optax.clip_by_global_norm(recipe.clip_norm)]
    decay = optax.add_decayed_weights(hyper.weight_decay)
    return optax.chain(*clip, decay, optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8))
