"""Values of the parts of a sum: Shapley values and covariance shares.

Axis letters: p parts (path lengths), c classes.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.annotations import ArrayLike, Tree
from rank_collapse.checks import check_whole, refuse_if
from rank_collapse.network.precision import full_precision

MAX_PARTS = 20  # 2^20 coalitions


def coalition_values(value: Callable[[Float[Array, "p"]], Any], num_parts: int) -> Tree:
    """Compute v of all 2^p coalitions of p parts, one after the other, keeping only the values.

    Call it under jit if you call it more than once; outside of jit every call compiles.

    Args:
        value: v, a function of the present parts [p] (1 or 0); returns any pytree of arrays.
        num_parts: p.

    Returns:
        The pytree of `value` with a leading axis [2^p]. Part k is in coalition i if bit k of i is
        set, so coalition 0 is empty, 2^k is part k alone, and 2^p − 1 has all parts.

    Raises:
        ValueError: p below 1 or above `MAX_PARTS`.
    """
    return jax.lax.map(value, jnp.asarray(_membership(num_parts), jnp.result_type(float)))


def _membership(num_parts):
    """Make the table [2^p, p], 1 where a part is in a coalition.

    Raises:
        ValueError: p below 1 or above `MAX_PARTS`.
    """
    num_parts = check_whole("num_parts", num_parts, 1, MAX_PARTS)
    return (np.arange(2**num_parts)[:, None] >> np.arange(num_parts)) & 1


@full_precision
def shapley_values(values: ArrayLike, num_parts: int) -> Tree:
    """Compute φ_k = Σ_{S ∌ k} |S|! (p − |S| − 1)!/p! (v(S ∪ k) − v(S)), exactly.

    It is the mean, over all orders in which the parts may join, of the change of v when part k
    joins. Σ_k φ_k = v(all) − v(none).

    Args:
        values: v of all coalitions [2^p, ...], from `coalition_values`; any pytree.
        num_parts: p.

    Returns:
        The pytree with [p] instead of [2^p].

    Raises:
        ValueError: In the cases of `coalition_values`; or values of another number of coalitions.

    Source: Shapley 1953, "A value for n-person games".

    Example:
        values = rc.paths.coalition_values(lambda present: loss(present @ parts), num_parts=3)
        rc.shapley_values(values, 3)  # what each of the three parts is worth
    """
    p, is_member = num_parts, _membership(num_parts)
    for v in jax.tree.leaves(values):
        if jnp.shape(v)[:1] != (2**p,):
            raise ValueError(
                f"values have the shape {jnp.shape(v)}, but must have one entry for each of the "
                f"{2**p} subsets of {p} parts"
            )
    size = is_member.sum(axis=1)
    # The fraction of orders in which a part joins a certain coalition of s others.
    orders = [math.factorial(s) * math.factorial(p - 1 - s) / math.factorial(p) for s in range(p)]
    # v of a coalition of size s counts for its members, which joined s − 1 others, and against the
    # other parts, which have still to join all s.
    member_weight, other_weight = np.array([0.0, *orders]), np.array([*orders, 0.0])
    weights = np.where(is_member, member_weight[size][:, None], -other_weight[size][:, None])
    return jax.tree.map(
        lambda v: jnp.tensordot(jnp.asarray(weights.T, jnp.result_type(v, float)), v, 1), values
    )


@full_precision
def covariance_shares(
    parts: Float[Array, "p *s c"], total: Float[Array, "*s c"], mask: ArrayLike | None = None
) -> Float[Array, "p"]:
    """Compute Cov(z_k, z)/Var z of each part z_k of a sum z, over tokens, summed over classes.

    The shares of all parts sum to 1. A share below 0 or above 1 means that parts cancel; the other
    shares are then not fractions either.

    Args:
        parts: z_k.
        total: z, their sum.
        mask: Bool [*s], tokens that exist.

    Raises:
        ValueError: A mask of another shape.
    """
    refuse_if(
        mask is not None and np.shape(mask) != total.shape[:-1],
        f"mask of shape {np.shape(mask)} does not fit a total of shape {total.shape}",
    )
    flat = parts.reshape(parts.shape[0], -1, parts.shape[-1])
    total = total.reshape(-1, total.shape[-1])
    token_mask = jnp.ones(len(total), bool) if mask is None else jnp.ravel(mask)
    weight = token_mask.astype(total.dtype)[:, None] / jnp.sum(token_mask, dtype=total.dtype)
    centred = total - jnp.sum(weight * total, axis=0, keepdims=True)
    weighted = weight * centred  # sums to 0 over tokens, so that the parts' means drop out
    return jnp.einsum("pnc,nc->p", flat, weighted) / jnp.sum(weighted * centred)
