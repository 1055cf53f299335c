"""How widely attention looks: the entropy of its rows."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.measures.norms import as_array, in_own_precision
from rank_collapse.network.entry import as_mask


@in_own_precision
def attention_entropy(attention: Any, *, mask: Any = None) -> Float[Array, "*s"]:
    """−Σ_j P_ij log P_ij in nats, its mean over the queries i: log m if uniform, 0 if one-hot.

    Args:
        attention: Weights [..., n, m], each row a distribution; `trace.attention` is [L, h, n, n].
        mask: Bool [n], the queries that exist; None for all. Keys that may not be looked at have
            weight 0 and add nothing.

    Returns:
        One value per matrix, [...].

    Raises:
        ValueError: Not matrices, or a mask of another length.
    """
    p = as_array(attention)
    if p.ndim < 2:
        raise ValueError(f"attention of shape {p.shape} is not [..., n, m]")
    p = p.astype(jnp.promote_types(p.dtype, jnp.float32))
    rows = -jnp.sum(p * jnp.log(jnp.where(p > 0, p, 1)), axis=-1)
    if mask is None:
        return jnp.mean(rows, axis=-1)
    mask = as_mask(as_array(mask))
    if mask.shape != p.shape[-2:-1]:
        raise ValueError(f"mask of shape {mask.shape} does not fit {p.shape[-2]} queries")
    keep = mask.reshape((1,) * (rows.ndim - 1) + mask.shape)
    return jnp.sum(jnp.where(keep, rows, 0), axis=-1) / jnp.sum(mask)
