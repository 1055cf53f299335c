"""Training a network with a linear read-out on a token-wise task: one seed, as pure functions.

What is static is a `Recipe`; what may be swept is a `Hyper` and is traced. Several seeds, learning
rates or dropout rates are one more axis: see `rank_collapse.training.ensemble`.

Axis letters: b examples, n tokens, i input width, c classes or outputs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rank_collapse import struct
from rank_collapse.network import entry, parameters, transformer
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.dropout import dropout, dropout_branches
from rank_collapse.paths.sets import Classifier
from rank_collapse.training.optimizers import make_optimizer, schedule_factor
from rank_collapse.training.recipe import Hyper, Recipe, config_of
from rank_collapse.training.tasks.examples import (
    LOSSES,
    Examples,
    part_mask,
    part_positions,
    token_mask,
)


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
    own = dataclasses.replace(recipe, config=config_of(recipe, hyper))
    model = init_model(key_model, own, hyper.init_scale)
    optimizer = make_optimizer(hyper, recipe).init(model)
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
    key, rate = None, 0.0
    if hyper.dropout is not None:
        key = jax.random.fold_in(jax.random.fold_in(state.key, 1), step)
        rate = hyper.dropout
    counts = weights[:, None] & token_mask(batch)
    config = config_of(recipe, hyper).replace(unroll=recipe.unroll)

    def loss(model):
        logits = batch_forward(
            model, batch, config, dropout_key=key, dropout_rate=rate,
            output_dropout=recipe.output_dropout,
        )  # fmt: skip
        return LOSSES[recipe.loss](logits, batch.labels, counts, hyper.label_smoothing)

    value, gradient = jax.value_and_grad(loss)(state.model)
    updates, optimizer = make_optimizer(hyper, recipe).update(
        gradient, state.optimizer, state.model
    )
    step_size = hyper.learning_rate * factor
    model = jax.tree.map(lambda p, u: p - step_size.astype(p.dtype) * u, state.model, updates)
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
        factor = schedule_factor(recipe, epoch, step, steps, hyper.warmup)
        return train_step(state, batch, weights, step, factor, hyper, recipe)

    state, losses = jax.lax.scan(body, state, (jnp.arange(steps), order, weights))
    return state, jnp.mean(losses)
