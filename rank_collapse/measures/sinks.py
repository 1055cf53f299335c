"""Attention sinks: keys that most queries look at."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.measures.norms import as_array, in_own_precision
from rank_collapse.measures.saturation import matrices
from rank_collapse.network.entry import as_mask


@in_own_precision
def column_means(attention: Any, *, mask: Any = None) -> Float[Array, "*s m"]:
    """mean_i P_ij, how much each key is looked at; sums to 1 over the keys.

    Args:
        attention: Weights [..., n, m], each row a distribution.
        mask: Bool [n], the queries that exist; None for all.

    Returns:
        One value per key, [..., m].

    Raises:
        ValueError: Not matrices, or a mask of another length.
    """
    p = matrices(attention)
    if mask is None:
        return jnp.mean(p, axis=-2)
    mask = as_mask(as_array(mask))
    if mask.shape != p.shape[-2:-1]:
        raise ValueError(f"mask of shape {mask.shape} does not fit {p.shape[-2]} queries")
    return jnp.sum(jnp.where(mask[:, None], p, 0), axis=-2) / jnp.sum(mask)


@in_own_precision
def largest_column(attention: Any, *, mask: Any = None) -> Float[Array, "*s"]:
    """max_j mean_i P_ij, the share of attention that the most looked at key gets.

    1/m if attention is uniform, 1/n if each query looks at itself, 1 if all look at one key.

    Args:
        attention, mask: As `column_means` takes them.

    Returns:
        One value per matrix, [...].
    """
    return jnp.max(column_means(attention, mask=mask), axis=-1)


@in_own_precision
def first_column(attention: Any, *, mask: Any = None, key_mask: Any = None) -> Float[Array, "*s"]:
    """mean_i P_ij of the first key j that exists: the share of attention that it gets.

    Args:
        attention: Weights [..., n, m].
        mask: Bool [n], the queries that exist; None for all.
        key_mask: Bool [m], the keys that exist; None for all, the first key is then key 0. In
            self-attention of padded texts give the tokens that exist as both.

    Returns:
        One value per matrix, [...].

    Raises:
        ValueError: As `column_means`, or a key_mask of another length.
    """
    columns = column_means(attention, mask=mask)
    if key_mask is None:
        return columns[..., 0]
    key_mask = as_mask(as_array(key_mask), "key_mask")
    if key_mask.shape != columns.shape[-1:]:
        raise ValueError(
            f"key_mask of shape {key_mask.shape} does not fit {columns.shape[-1]} keys"
        )
    return columns[..., jnp.argmax(key_mask)]


@in_own_precision
def sink_rate(
    attention: Any, *, sink: Any = 0.3, mask: Any = None, key_mask: Any = None
) -> Float[Array, "*s"]:
    """Share of heads whose `first_column` is above `sink` (Gu et al. 2025, section 3).

    Args:
        attention: Weights [..., h, n, m].
        sink: The threshold ε.
        mask, key_mask: As `first_column` takes them.

    Returns:
        One value per layer, [...].

    Raises:
        ValueError: No axis of heads, or as `first_column`.
    """
    if jnp.ndim(attention) < 3:
        raise ValueError(f"attention of shape {jnp.shape(attention)} is not [..., h, n, m]")
    first = first_column(attention, mask=mask, key_mask=key_mask)
    return jnp.mean((first > sink).astype(first.dtype), axis=-1)
