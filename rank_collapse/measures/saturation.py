"""How saturated attention is: its largest weights, and the share of rows that hardly move.

Where one weight p of a row is near 1 the softmax's Jacobian diag(P) − PPᵀ, whose entries are at
most 1 − p off that weight and p(1 − p) on it, is near 0, and so is what flows back to the scores.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.measures.norms import as_array, as_floats, in_own_precision
from rank_collapse.network.entry import as_mask


@in_own_precision
def largest_weight(attention: Any, *, mask: Any = None) -> Float[Array, "*s"]:
    """max_j P_ij, its mean over the queries i: 1/m if uniform, 1 if one-hot.

    Args:
        attention: Weights [..., n, m], each row a distribution.
        mask: Bool [n], the queries that exist; None for all.

    Returns:
        One value per matrix, [...].

    Raises:
        ValueError: Not matrices, or a mask of another length.
    """
    return mean_over_queries(jnp.max(matrices(attention), axis=-1), mask)


@in_own_precision
def saturated_share(
    attention: Any, threshold: Any = 0.99, *, mask: Any = None
) -> Float[Array, "*s"]:
    """Share of the queries i with max_j P_ij > threshold.

    Args:
        attention: Weights [..., n, m], each row a distribution.
        threshold: Largest weight from which a row counts as saturated.
        mask: Bool [n], the queries that exist; None for all.

    Returns:
        One value per matrix, [...].

    Raises:
        ValueError: Not matrices, or a mask of another length.
    """
    p = matrices(attention)
    return mean_over_queries((jnp.max(p, axis=-1) > threshold).astype(p.dtype), mask)


def matrices(attention: Any) -> Float[Array, "*s n m"]:
    """Attention of any framework as JAX's, in float32 at least.

    Raises:
        ValueError: Not matrices.
    """
    p = as_floats(attention)
    if p.ndim < 2:
        raise ValueError(f"attention of shape {p.shape} is not [..., n, m]")
    return p


def mean_over_queries(rows: Float[Array, "*s n"], mask: Any) -> Float[Array, "*s"]:
    """Mean of one value per query over those that exist.

    Raises:
        ValueError: A mask of another length.
    """
    if mask is None:
        return jnp.mean(rows, axis=-1)
    mask = as_mask(as_array(mask))
    if mask.shape != rows.shape[-1:]:
        raise ValueError(f"mask of shape {mask.shape} does not fit {rows.shape[-1]} queries")
    keep = mask.reshape((1,) * (rows.ndim - 1) + mask.shape)
    return jnp.sum(jnp.where(keep, rows, 0), axis=-1) / jnp.sum(mask)
