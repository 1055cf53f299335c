"""How widely attention looks: the entropy of its rows."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.measures.norms import in_own_precision
from rank_collapse.measures.saturation import matrices, mean_over_queries


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
    p = matrices(attention)
    # Where p is 0 so is the product; a select in its place takes three times as long on a CPU.
    log = jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny))
    return mean_over_queries(-jnp.sum(p * log, axis=-1), mask)
