"""Data sets of token-wise tasks, their losses, metrics and baselines.

Axis letters: b examples, n tokens, i input width, c classes or outputs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rank_collapse import struct
from rank_collapse.annotations import Key, Leaf, Number, Tree


class Examples(struct.Struct):
    """A data set: every token of every example has a label."""

    inputs: Leaf  # Int [b, n] token ids, or Float [b, n, i] vectors
    labels: Leaf  # Int [b, n] classes, or Float [b, n, c] targets
    mask: Leaf | None = None  # Bool [b, n], which tokens exist; None for all
    # Int [b, n], which sequence of a packed row a token is from; -1 for none
    parts: Leaf | None = None

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def first(self, count: int) -> "Examples":
        """Select the first `count` examples."""
        return jax.tree.map(lambda a: a[:count], self)


def in_batches(fn: Callable[[Tree], Tree], items: Tree, batch_size: int | None = None) -> Tree:
    """Map fn over the examples of `items`, leaves [b, ...]; `batch_size` at a time, None for all.

    Args:
        fn: Function of one example.
        items: Tree of arrays [b, ...].
        batch_size: Examples at a time; None for all.
    """
    if batch_size is None or batch_size >= jax.tree.leaves(items)[0].shape[0]:
        return jax.vmap(fn)(items)
    return jax.lax.map(fn, items, batch_size=batch_size)


def token_mask(examples: Any) -> Bool[Array, "b n"]:
    """Returns which tokens exist, as an array."""
    if examples.mask is not None:
        return examples.mask
    return jnp.ones(examples.inputs.shape[:2], bool)


def part_mask(parts: Int[Array, "n"]) -> Bool[Array, "n n"]:
    """Compute the tokens to which each token of a packed row may attend: those of its own
    sequence."""
    return (parts[:, None] == parts[None, :]) & (parts >= 0)[None, :]


def part_positions(parts: Int[Array, "n"]) -> Int[Array, "n"]:
    """Compute the position of each token of a packed row in its own sequence."""
    index = jnp.arange(parts.shape[0])
    begins = jnp.concatenate([jnp.ones(1, bool), parts[1:] != parts[:-1]])
    return index - jax.lax.cummax(jnp.where(begins, index, 0))


def packed_rows(lengths: Int[np.ndarray, "b"], width: int) -> Int[np.ndarray, "r width 2"]:
    """Plan rows that hold complete sequences behind each other.

    The longest sequences come first, each into the first row with enough free places.

    Args:
        lengths: Lengths of the sequences.
        width: Places of a row.

    Returns:
        (sequence, position in it) of each place; (-1, 0) where nothing is.
    """
    if lengths.max() > width:
        raise ValueError(f"a sequence of {lengths.max()} tokens does not fit width={width}")
    rows, free = [], []
    for index in np.argsort(-lengths, kind="stable"):
        length = int(lengths[index])
        row = next((r for r, free_places in enumerate(free) if free_places >= length), len(rows))
        if row == len(rows):
            rows.append(np.stack([np.full(width, -1), np.zeros(width, int)], axis=-1))
            free.append(width)
        begin = width - free[row]
        rows[row][begin : begin + length, 0] = index
        rows[row][begin : begin + length, 1] = np.arange(length)
        free[row] -= length
    return np.stack(rows).astype(np.int32)


def pack_examples(examples: Examples, rows: Int[np.ndarray, "r width 2"]) -> Examples:
    """Pack padded sequences into the rows of `packed_rows`, so that padding costs nothing.

    A network computes the same for every token as on the padded sequences: tokens attend only to
    their own sequence (`part_mask`), and their positions count from its beginning
    (`part_positions`).

    Args:
        examples: Padded sequences.
        rows: Rows from `packed_rows`.
    """
    parts, places = rows[..., 0], rows[..., 1]
    return Examples(
        inputs=examples.inputs[parts, places],
        labels=examples.labels[parts, places],
        mask=jnp.asarray(parts >= 0),
        parts=jnp.asarray(parts),
    )


def weighted_mean(
    values: Float[Array, "b n"], weights: Float[Array, "b n"] | Bool[Array, "b n"]
) -> Float[Array, ""]:
    """Compute Σ w v / Σ w; entries of weight 0 do not count even where they are not finite."""
    weights = weights.astype(values.dtype)
    return jnp.sum(jnp.where(weights > 0, values, 0) * weights) / jnp.sum(weights)


def cross_entropy(
    logits: Float[Array, "b n c"],
    labels: Int[Array, "b n"],
    weights: Float[Array, "b n"] | Bool[Array, "b n"],
    smoothing: Number = 0.0,
) -> Float[Array, ""]:
    """Compute the mean over tokens of −Σ_k q_k log softmax(logits)_k.

    q = (1 − ε) onehot(label) + ε / c.

    Args:
        logits, labels: Logits and labels of all tokens.
        weights: Weights of the tokens, [b, n].
        smoothing: ε (Szegedy et al. 2016, section 7); 0 for −log softmax(logits)[label].
    """
    import optax

    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    # −Σ q log p = −log p[label] + ε (logit of the label − mean logit)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return weighted_mean(losses + smoothing * (label_logits - jnp.mean(logits, axis=-1)), weights)


def squared_error(
    outputs: Float[Array, "b n c"],
    targets: Float[Array, "b n c"],
    weights: Float[Array, "b n"] | Bool[Array, "b n"],
    _: Number = 0.0,
) -> Float[Array, ""]:
    """Compute Σ ‖output − target‖² over tokens: a sum, as in Dong et al. 2021's code."""
    errors = jnp.sum(jnp.square(outputs - targets), axis=-1)
    return jnp.sum(jnp.where(weights, errors, 0.0))


LOSSES = {"cross_entropy": cross_entropy, "squared_error": squared_error}


def token_accuracy(logits: Float[Array, "b n c"], examples: Any) -> Float[Array, ""]:
    """Compute the share of tokens whose label has the largest logit."""
    right = (jnp.argmax(logits, axis=-1) == examples.labels).astype(jnp.float32)
    return weighted_mean(right, token_mask(examples))


def exact_match(logits: Float[Array, "b n c"], examples: Any) -> Float[Array, ""]:
    """Compute the share of examples with every token right."""
    right = (jnp.argmax(logits, axis=-1) == examples.labels) | ~token_mask(examples)
    return jnp.mean(jnp.all(right, axis=-1).astype(jnp.float32))


def loss_metric(logits: Float[Array, "b n c"], examples: Any) -> Float[Array, ""]:
    """Compute the cross-entropy of the examples, as a metric."""
    return cross_entropy(logits, examples.labels, token_mask(examples))


def area_under_curve(logits: Float[Array, "b n 2"], examples: Examples) -> Float[Array, ""]:
    """Compute AUC: the chance that a token of class 1 gets a higher score than one of class 0.

    Mann and Whitney's statistic with average ranks for ties; NaN where a class is absent.

    Args:
        logits: Logits of the two classes.
        examples: Examples with labels 0 and 1.
    """
    score = (logits[..., 1] - logits[..., 0]).ravel()
    exists = token_mask(examples).ravel()
    positive = (examples.labels.ravel() == 1) & exists
    negative = (examples.labels.ravel() == 0) & exists
    negative_scores = jnp.sort(jnp.where(negative, score, jnp.inf))
    count = negative.sum()
    below = jnp.minimum(jnp.searchsorted(negative_scores, score, side="left"), count)
    below_or_tied = jnp.minimum(jnp.searchsorted(negative_scores, score, side="right"), count)
    wins = jnp.sum(jnp.where(positive, (below + below_or_tied).astype(score.dtype) / 2, 0.0))
    return wins / (positive.sum() * count).astype(score.dtype)


def majority_baseline(train: Examples, held_out: Examples, num_classes: int) -> Float[Array, ""]:
    """Compute the accuracy on `held_out` of always answering the most frequent label of `train`.

    Args:
        train, held_out: Data sets.
        num_classes: Number of classes.
    """
    weights = token_mask(train).ravel().astype(jnp.float32)
    counts = jnp.zeros(num_classes).at[train.labels.ravel()].add(weights)
    right = (held_out.labels == jnp.argmax(counts)).astype(jnp.float32)
    return weighted_mean(right, token_mask(held_out))


def random_baseline(key: Key, held_out: Examples, num_classes: int) -> Float[Array, ""]:
    """Compute the accuracy on `held_out` of one uniformly random answer per token.

    Args:
        key: Random key for the answers.
        held_out: Data set.
        num_classes: Number of classes.
    """
    guess = jax.random.randint(key, held_out.labels.shape, 0, num_classes)
    right = (held_out.labels == guess).astype(jnp.float32)
    return weighted_mean(right, token_mask(held_out))
