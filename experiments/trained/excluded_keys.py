"""Attention from which one key is excluded, for the queries after it, from a chosen layer on.

    trace = rc.apply(params, ids, config, edit=make_edit(Condition(0, 3, True, False)))

Axis letters: h heads, n queries, m keys.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

EXCLUDED = -1e9  # score of a hidden key


class Condition(NamedTuple):
    """The key to exclude, traced: one program serves all conditions of a network."""

    key: ArrayLike  # position of the key
    start: ArrayLike  # first layer in which it is excluded; the depth for none
    is_hidden: ArrayLike  # Bool: by its score
    is_thinned: ArrayLike  # Bool: all weights lose as much together; else the key's weight is lost


def make_edit(condition: Condition) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """Makes what `rank_collapse.apply` takes as `edit`, functions of (entries, layer).

    Args:
        condition: The key, the first layer, and the way to exclude it.
    """
    return {
        "scores": partial(exclude_key, condition, condition.is_hidden, EXCLUDED),
        "weights": partial(lose_weight, condition),
    }


def lose_weight(condition: Condition, weights: jax.Array, layer: jax.Array) -> jax.Array:
    """Removes the key's weight from the rows [h, n, m] of the queries after it, or removes as much
    from all keys.

    Args:
        condition: The key, the first layer, and the mode.
        weights: Weights of the attention.
        layer: Number of the layer.
    """
    is_dropped = ~(condition.is_hidden | condition.is_thinned)
    dropped = exclude_key(condition, is_dropped, 0.0, weights, layer)
    is_row = jnp.arange(weights.shape[-2])[:, None] > condition.key
    is_active = is_row & condition.is_thinned & (layer >= condition.start)
    lost = jnp.take(weights, condition.key, axis=-1)[..., None]
    return jnp.where(is_active, weights * (1 - lost), dropped)


def exclude_key(
    condition: Condition,
    is_active: jax.Array,
    excluded: float,
    entries: jax.Array,
    layer: jax.Array,
) -> jax.Array:
    """Replaces the entries [h, n, m] of the key in the rows of later queries.

    Args:
        condition: The key, and the first layer.
        is_active: Whether the key is excluded here: in its scores, or in its weights.
        excluded: The entry that it gets.
        entries: Scores or weights.
        layer: Number of the layer.
    """
    queries = jnp.arange(entries.shape[-2])[:, None]
    keys = jnp.arange(entries.shape[-1])[None]
    is_entry = (keys == condition.key) & (queries > condition.key)
    return jnp.where(is_entry & is_active & (layer >= condition.start), excluded, entries)
