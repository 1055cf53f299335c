"""How far an array of tokens is from rank one: residuals, ratios, ranks and cosines.

Everything takes one [n, d] array of any framework (numpy, JAX, torch) and an optional Bool [n]
mask of the tokens that exist; a quantity with a mask equals that of the array without the masked
rows. float64 arrays of numpy or torch are measured in float64, JAX arrays in their own precision,
float32 at least. Axis letters: n tokens, d width.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.measures import decompositions
from rank_collapse.measures.centers import CENTERS, CompositeCenter, center_token, composite_center
from rank_collapse.measures.norms import (
    NORMS,
    as_tokens,
    composite_norm,
    in_own_precision,
    matrix_norm,
    norm_1,
    norm_inf,
    num_tokens,
    root,
    singular_values,
)

__all__ = [
    "CENTERS",
    "NORMS",
    "CompositeCenter",
    "best_rank_one_residual",
    "center_token",
    "composite_center",
    "composite_norm",
    "effective_rank",
    "matrix_norm",
    "norm_1",
    "norm_inf",
    "rank_at",
    "rank_one_ratio",
    "residual",
    "residual_ratio",
    "singular_values",
    "stable_rank",
    "token_cosine",
]


@in_own_precision
def residual(x: Any, *, center: str = "mean", mask: Any = None) -> Float[Array, "n d"]:
    """res(X) = X − 1xᵀ, what is left of the tokens beside one common token x.

    Args:
        x: Tokens [n, d].
        center: Which x: "mean" (the published curves; minimises the Frobenius norm), "median"
            (columnwise; minimises ‖.‖_1), "midrange" (minimises the largest |entry|) or
            "composite" (minimises ‖.‖_{1,∞}; see `composite_center`).
        mask: Bool [n], True for tokens that exist; None for all.

    Returns:
        The residual [n, d], zero in masked rows.

    Raises:
        ValueError: Unknown center; not a matrix, no token, not finite (where x is not traced), or
            a wrong mask.

    Source: Dong et al. 2021, section 2.
    """
    x, mask = as_tokens(x, mask)
    rest = x - center_token(x, center, mask=mask)[None, :]
    return rest if mask is None else jnp.where(mask[:, None], rest, 0)


@in_own_precision
def residual_ratio(
    x: Any, *, center: str = "mean", norm: str = "composite", mask: Any = None
) -> Float[Array, ""]:
    """‖res(X)‖ / ‖X‖, in [0, 1] for the norm's own minimiser; 0 where X = 0.

    Args:
        x: Tokens [n, d].
        center: See `residual`.
        norm: See `matrix_norm`; the published curves use "composite".
        mask: Bool [n], True for tokens that exist; None for all.

    Raises:
        ValueError: Unknown center or norm; see also `residual`.

    Source: Dong et al. 2021, section 4.2 and figure 2.
    """
    x, mask = as_tokens(x, mask)
    return _ratio(matrix_norm(residual(x, center=center, mask=mask), norm), matrix_norm(x, norm))


@in_own_precision
def best_rank_one_residual(x: Any, *, mask: Any = None) -> Float[Array, "n d"]:
    """X − σ_1 u_1 v_1ᵀ, what the best approximation of rank one leaves (Eckart and Young).

    Unlike res(X), the common token may come with another weight in each row.

    Args:
        x: Tokens [n, d].
        mask: Bool [n], True for tokens that exist; None for all.
    """
    x, _ = as_tokens(x, mask)
    scale = jnp.max(jnp.abs(x))
    scale = jnp.where(scale == 0, 1, scale)
    u, s, vt = decompositions.svd(x / scale)
    return x - scale * s[0] * u[:, :1] * vt[:1, :]


@in_own_precision
def rank_one_ratio(x: Any, *, norm: str = "composite", mask: Any = None) -> Float[Array, ""]:
    """‖X − σ_1 u_1 v_1ᵀ‖ / ‖X‖; 0 where X = 0.

    Args:
        x: Tokens [n, d].
        norm: See `matrix_norm`.
        mask: Bool [n], True for tokens that exist; None for all.
    """
    x, _ = as_tokens(x, mask)
    return _ratio(matrix_norm(best_rank_one_residual(x), norm), matrix_norm(x, norm))


@in_own_precision
def stable_rank(x: Any, *, mask: Any = None, method: str = "svd") -> Float[Array, ""]:
    """‖X‖_F² / ‖X‖_2², at most the rank; 0 where X = 0 (Rudelson and Vershynin 2007).

    Args:
        x: Tokens [n, d].
        mask: Bool [n], True for tokens that exist; None for all.
        method: "svd", or "gram": see `singular_values`.
    """
    s = singular_values(x, mask=mask, method=method)
    return jnp.sum(jnp.square(s / jnp.where(s[0] == 0, 1, s[0])))


@in_own_precision
def effective_rank(x: Any, *, mask: Any = None, method: str = "svd") -> Float[Array, ""]:
    """exp(−Σ_i p_i log p_i), p_i = σ_i / Σ_j σ_j; 0 where X = 0 (Roy and Vetterli 2007).

    Args:
        x: Tokens [n, d].
        mask: Bool [n], True for tokens that exist; None for all.
        method: "svd", or "gram": see `singular_values`.
    """
    s = singular_values(x, mask=mask, method=method)
    total = jnp.sum(s)
    p = s / jnp.where(total == 0, 1, total)
    entropy = -jnp.sum(p * jnp.log(jnp.where(p == 0, 1, p)))
    return jnp.where(total == 0, 0, jnp.exp(entropy))


@in_own_precision
def rank_at(x: Any, *, tolerance: Any = None, mask: Any = None) -> Array:
    """Number of singular values above tolerance · σ_1.

    Args:
        x: Tokens [n, d].
        tolerance: Relative threshold, may be traced; None for max(n, d) times the dtype's epsilon,
            which is numpy's choice.
        mask: Bool [n], True for tokens that exist; None for all.
    """
    x, mask = as_tokens(x, mask)
    s = singular_values(x)
    if tolerance is None:
        tolerance = jnp.maximum(num_tokens(x, mask), x.shape[1]) * jnp.finfo(x.dtype).eps
    return jnp.sum(s > tolerance * s[0])


@in_own_precision
def token_cosine(x: Any, *, mask: Any = None) -> Float[Array, ""]:
    """Mean of cos(x_i, x_j) over the pairs i ≠ j; a zero token has cosine 0 with every other.

    Args:
        x: Tokens [n, d].
        mask: Bool [n], True for tokens that exist; None for all.

    Raises:
        ValueError: Fewer than two tokens (NaN where only a traced mask leaves fewer).
    """
    x, mask = as_tokens(x, mask)
    if x.shape[0] < 2:
        raise ValueError(f"x of shape {x.shape} has no pair of tokens")
    scale = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    x = x / jnp.where(scale == 0, 1, scale)  # squares of small tokens would underflow
    length = root(jnp.sum(jnp.square(x), axis=1, keepdims=True))
    unit = x / jnp.where(length == 0, 1, length)
    count = num_tokens(x, mask)
    # over pairs: |Σ x̂_i|² counts i = j too, with |x̂_i|² each
    total = jnp.sum(jnp.square(jnp.sum(unit, axis=0))) - jnp.sum(jnp.square(unit))
    return total / (count * (count - 1))


def _ratio(part, whole):
    return jnp.where(whole == 0, 0, part / jnp.where(whole == 0, 1, whole))
