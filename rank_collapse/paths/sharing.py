"""What the parts of a sum are worth: Shapley values and covariance shares.

Axis letters: p parts (path lengths), c classes.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

MAX_PARTS = 20  # 2^20 coalitions


def shapley_values(value: Callable[[Float[Array, "p"]], Any], num_parts: int) -> Any:
    """φ_k = Σ_{S ∌ k} |S|! (p − |S| − 1)!/p! (v(S ∪ k) − v(S)): exact, over all 2^p coalitions.

    The mean, over all orders in which the parts may join, of what part k changes when it joins.
    Σ_k φ_k = v(all) − v(none).

    Args:
        value: v, of the parts that are present [p] (1 or 0); any pytree of arrays. It is called for
            one coalition after another, so that only its values are held.
        num_parts: p.

    Returns:
        The pytree of `value` with a leading axis [p].

    Raises:
        ValueError: p below 1 or above `MAX_PARTS`.

    Source: Shapley 1953, "A value for n-person games".
    """
    p = num_parts
    if not 1 <= p <= MAX_PARTS:
        raise ValueError(f"num_parts={p} is not in 1..{MAX_PARTS}: there are 2^p coalitions")
    index = np.arange(2**p)
    present = (index[:, None] >> np.arange(p)) & 1  # [2^p, p]
    size = present.sum(axis=1)
    orders = np.array([math.factorial(s) * math.factorial(p - 1 - s) for s in range(p)], float)
    orders = np.append(orders, 0.0) / math.factorial(p)
    joined = np.append(0.0, orders[:-1])  # of coalitions that hold k: without it, one smaller
    weights = np.where(present == 1, joined[size][:, None], -orders[size][:, None])
    present = jnp.asarray(present, jnp.result_type(float))
    values = jax.lax.map(value, present)
    return jax.tree.map(lambda v: jnp.tensordot(weights.T.astype(v.dtype), v, 1), values)


def covariance_shares(
    parts: Float[Array, "p *s c"], total: Float[Array, "*s c"], mask: Any = None
) -> Float[Array, "p"]:
    """Cov(z_k, z)/Var z of each part z_k of a sum z, over tokens, summed over classes.

    The shares of all parts sum to 1. They are no shares of a whole where one is below 0 or above
    1: the parts then cancel.

    Args:
        parts: z_k.
        total: z, their sum.
        mask: Bool [*s], tokens that exist.
    """
    flat = parts.reshape(parts.shape[0], -1, parts.shape[-1])
    total = total.reshape(-1, total.shape[-1])
    keep = jnp.ones(len(total), bool) if mask is None else jnp.ravel(mask)
    weight = keep.astype(total.dtype)[:, None] / jnp.sum(keep)
    away = total - jnp.sum(weight * total, axis=0, keepdims=True)
    weighted = weight * away  # sums to 0 over tokens, so that the parts' means drop out
    return jnp.einsum("pnc,nc->p", flat, weighted) / jnp.sum(weighted * away)
