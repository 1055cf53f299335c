"""Matrix norms of tokens [..., n, d], with an optional mask of tokens that exist."""

import functools
from typing import Literal, get_args

import numpy as np
from array_api_compat import is_numpy_array, is_torch_array
from jaxtyping import Float

from rank_collapse.annotations import AnyArray
from rank_collapse.checks import check_choice, refuse, refuse_if
from rank_collapse.measures.arrays import (
    as_array,
    as_floats,
    broadcast_mask,
    is_jax_array,
    namespace,
    stop_gradient,
    where_it_lives,
)

Norm = Literal["composite", "one", "inf", "frobenius", "spectral", "max"]
NORMS = get_args(Norm)


def as_tokens(
    x: AnyArray, mask: AnyArray | None = None, *, empty: bool = False
) -> tuple[AnyArray, AnyArray]:
    """Convert x to floats [..., n, d], and its mask to Bool [..., n].

    Masked rows become zeros. NumPy arrays, see `where_it_lives`, are also checked for values that
    are not finite; in other frameworks such values propagate instead.

    Args:
        x: An array of any framework.
        mask: Bool [n] or [..., n]; None for all.
        empty: Whether a mask may leave no token, which gives NaN; traced masks may.

    Returns:
        (x, mask); the mask is None if none was passed.

    Raises:
        ValueError: The array is not a matrix, has no token or is not finite, or the mask has
            another shape.
    """
    x = as_array(x)
    shape = tuple(x.shape)
    refuse(
        (len(shape) < 2, f"x of shape {shape} is not [..., n, d]"),
        (0 in shape, f"x of shape {shape} has no example, no token or no feature"),
    )
    x = as_floats(x)
    if mask is not None:
        x, mask = broadcast_mask(x, mask, shape[:-1], "tokens")
        refuse_if(
            not empty and is_numpy_array(mask) and not mask.any(axis=-1).all(),
            f"mask of shape {mask.shape} leaves no token",
        )
        x = namespace(x).where(mask[..., None], x, 0)
    if is_numpy_array(x):
        num_bad = x.size - int(np.isfinite(x).sum())
        refuse_if(num_bad > 0, f"x of shape {shape} holds {num_bad} values that are not finite")
    return x, mask


def safe_sqrt(x: AnyArray) -> AnyArray:
    """Compute √x with derivative 0 at 0, where tokens have collapsed, instead of NaN."""
    xp = namespace(x)
    return xp.where(x == 0, 0.0, xp.sqrt(xp.where(x == 0, 1.0, x)))


def safe_divide(
    numerator: AnyArray, denominator: AnyArray, otherwise: AnyArray = np.nan
) -> AnyArray:
    """Divide; a denominator of 0 gives another value, with finite derivatives.

    Args:
        numerator, denominator: Arrays that broadcast.
        otherwise: The value where the denominator is 0.
    """
    xp = namespace(numerator)
    if hasattr(denominator, "dtype"):  # a count
        denominator = xp.astype(denominator, numerator.dtype, copy=False)
    is_zero = denominator == 0
    ratio = xp.where(is_zero, otherwise, numerator / xp.where(is_zero, 1, denominator))
    return xp.astype(ratio, numerator.dtype, copy=False)


def exact_sum(x: AnyArray, axis: int) -> AnyArray:
    """Sum along an axis; NumPy, which adds rows one after the other, does it in float64."""
    if is_numpy_array(x):
        return np.asarray(x.sum(axis=axis, dtype=np.float64)).astype(x.dtype)
    return namespace(x).sum(x, axis=axis)


def masked_mean(values: AnyArray, mask: AnyArray | None = None) -> AnyArray:
    """Average values over the last axis.

    Args:
        values: [..., n].
        mask: Bool of the same shape, True for entries that count; None for all.

    Returns:
        [...]; NaN where none counts.
    """
    if mask is None:
        return exact_sum(values, -1) / values.shape[-1]
    xp = namespace(values)
    return safe_divide(exact_sum(xp.where(mask, values, 0), -1), xp.sum(mask, axis=-1))


def num_tokens(x: AnyArray, mask: AnyArray | None = None) -> AnyArray:
    """Count the tokens that exist, [...], as floats."""
    xp = namespace(x)
    if mask is None:
        return xp.full_like(x[..., 0, 0], x.shape[-2])
    return xp.astype(xp.sum(mask, axis=-1), x.dtype)


@where_it_lives
def composite_norm(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute ‖X‖_{1,∞} = √(‖X‖_1 ‖X‖_∞) (Dong et al. 2021, section 2).

    This is not a norm: the triangle inequality fails, as the authors say.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], True for tokens that exist, None for all.

    Raises:
        ValueError: The array is not a matrix, has no token or is not finite (where x is known), or
            the mask is wrong.
    """
    return compute_norm(as_tokens(x, mask)[0], "composite")


@where_it_lives
def matrix_norm(
    x: AnyArray, norm: Norm = "composite", *, mask: AnyArray | None = None
) -> Float[AnyArray, "*b"]:
    """Compute a norm by name.

    Args:
        x: Tokens [..., n, d].
        norm: "composite" ‖.‖_{1,∞}, "one" largest column sum, "inf" largest row sum, "frobenius",
            "spectral" largest singular value, "max" largest |entry|.
        mask: Bool [n] or [..., n], True for tokens that exist; None for all.

    Raises:
        ValueError: Unknown norm; see also `composite_norm`.
    """
    return compute_norm(as_tokens(x, mask)[0], norm)


# ‖X‖_1 = max_j Σ_i |X_ij| and ‖X‖_∞ = max_i Σ_j |X_ij|.
norm_1 = functools.partial(matrix_norm, norm="one")
norm_inf = functools.partial(matrix_norm, norm="inf")


def compute_norm(x: AnyArray, norm: Norm) -> AnyArray:
    """Compute `matrix_norm` of the result of `as_tokens`."""
    check_choice(f"norm={norm!r}", norm, NORMS)
    if norm == "composite":  # the product of the two itself could overflow
        return safe_sqrt(compute_norm(x, "one")) * safe_sqrt(compute_norm(x, "inf"))
    xp = namespace(x)
    if norm in ("one", "inf"):
        return xp.max(exact_sum(xp.abs(x), -2 if norm == "one" else -1), axis=-1)
    if norm == "spectral":
        return compute_singular_values(x)[..., 0]
    if norm == "max":
        return xp.max(xp.abs(x), axis=(-2, -1))
    scaled, scale = scale_to_unit(x)
    return scale * safe_sqrt(xp.sum(xp.square(scaled), axis=(-2, -1)))


def compute_singular_values(x: AnyArray) -> AnyArray:
    """Compute singular values [..., r], largest first, of tokens that `as_tokens` made.

    For float32: square roots of the eigenvalues, in float64, of the smaller of XXᵀ and XᵀX. This
    gives more digits than an SVD in float32, in a tenth of the time. For float64, and for JAX in
    jit or on an accelerator: an SVD. Masked rows are zeros, which only add zeros.
    """
    xp = namespace(x)
    scaled, scale = scale_to_unit(x)
    if is_jax_array(x):
        from rank_collapse.measures import on_jax

        return scale[..., None] * on_jax.svdvals(scaled)
    if x.dtype == xp.float64:
        return scale[..., None] * xp.linalg.svdvals(scaled)
    squares = xp.linalg.eigvalsh(smaller_gram_matrix(xp.astype(scaled, xp.float64)))
    squares = xp.astype(xp.flip(squares, axis=-1), x.dtype)
    return scale[..., None] * safe_sqrt(xp.clip(squares, 0, None))


def smaller_gram_matrix(x: AnyArray) -> AnyArray:
    """Compute the smaller of XXᵀ and XᵀX."""
    xp = namespace(x)
    transposed = xp.matrix_transpose(x)
    return x @ transposed if x.shape[-2] <= x.shape[-1] else transposed @ x


def scale_to_unit(x: AnyArray, axis: object = (-2, -1)) -> tuple[AnyArray, AnyArray]:
    """Scale x by a power of 4, so that squares and sums neither overflow nor underflow.

    No digit changes, since a power of 4 and its root are exact.

    Args:
        x: Floats.
        axis: The axes along which the largest |entry| is scaled into [1, 4).

    Returns:
        (x 4^−k, 4^k), the second without these axes.
    """
    xp = namespace(x)
    largest = stop_gradient(xp.max(xp.abs(x), axis=axis, keepdims=True))
    scale, inverse = powers_of_four(largest)
    return x * inverse, xp.squeeze(scale, axis=axis)


def powers_of_four(largest: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Compute (4^k, 4^−k) of numbers, such that they lie in [4^k, 4^(k+1)).

    Args:
        largest: Floats, without derivatives.
    """
    xp, x = namespace(largest), largest
    limit = 1022 if x.dtype == xp.float64 else 126  # 4^−k is a normal number, too
    power = xp.clip((xp.frexp(largest)[1] - 1) // 2 * 2, -limit, limit)
    if is_torch_array(x):  # whose ldexp is exact for exponents of its dtype alone
        power = xp.astype(power, x.dtype)
    one = xp.ones_like(largest)
    return xp.ldexp(one, power), xp.ldexp(one, -power)
