"""Matrix norms of tokens [..., n, d], with an optional mask of tokens that exist."""

import functools
from typing import Any, Literal, get_args

import numpy as np
from array_api_compat import is_numpy_array, is_torch_array
from jaxtyping import Float

from rank_collapse.measures.arrays import (
    as_array,
    as_floats,
    constant,
    is_jax_array,
    namespace,
    where_it_lives,
    with_mask,
)
from rank_collapse.struct import refuse, refuse_if

Norm = Literal["composite", "one", "inf", "frobenius", "spectral", "max"]
NORMS = get_args(Norm)


def as_tokens(x: Any, mask: Any = None, *, empty: bool = False) -> tuple[Any, Any]:
    """Any framework's [..., n, d] array in float32 at least, and its mask as Bool [..., n].

    Masked rows become zeros. NumPy's arrays, see `where_it_lives`, are also checked for values that
    are not finite; elsewhere these propagate instead.

    Args:
        x, mask: What was given.
        empty: Whether a mask may leave no token, of which measures are NaN; traced masks may.

    Raises:
        ValueError: Not matrices, no token, not finite, or a mask of another shape.
    """
    x = as_array(x)
    shape = tuple(x.shape)
    refuse(
        (len(shape) < 2, f"x of shape {shape} is not [..., n, d]"),
        (0 in shape, f"x of shape {shape} has no example, no token or no feature"),
    )
    x = as_floats(x)
    if mask is not None:
        x, mask = with_mask(x, mask, shape[:-1], "tokens")
        refuse_if(
            not empty and is_numpy_array(mask) and not mask.any(axis=-1).all(),
            f"mask of shape {mask.shape} leaves no token",
        )
        x = namespace(x).where(mask[..., None], x, 0)
    if is_numpy_array(x) and not (finite := np.isfinite(x)).all():
        bad = x.size - int(finite.sum())
        raise ValueError(f"x of shape {shape} holds {bad} values that are not finite")
    return x, mask


def root(x: Any) -> Any:
    """√x with derivative 0 at 0, where tokens have collapsed, instead of NaN."""
    xp = namespace(x)
    return xp.where(x == 0, 0.0, xp.sqrt(xp.where(x == 0, 1.0, x)))


def divide(part: Any, whole: Any, otherwise: Any = np.nan) -> Any:
    """part/whole, and `otherwise` where whole is 0; derivatives are finite there."""
    xp = namespace(part)
    ratio = xp.where(whole == 0, otherwise, part / xp.where(whole == 0, 1, whole))
    return xp.astype(ratio, part.dtype, copy=False)


def total(x: Any, axis: int) -> Any:
    """Σ along an axis; NumPy, which adds rows one after the other, does it in float64."""
    if is_numpy_array(x):
        return np.asarray(x.sum(axis=axis, dtype=np.float64)).astype(x.dtype)
    return namespace(x).sum(x, axis=axis)


def mean_of(values: Any, mask: Any = None) -> Any:
    """Mean of values [..., n] over those that a mask of the same shape lets exist; NaN of none."""
    if mask is None:
        return total(values, -1) / values.shape[-1]
    xp = namespace(values)
    return divide(total(xp.where(mask, values, 0), -1), xp.sum(mask, axis=-1))


def num_tokens(x: Any, mask: Any = None) -> Any:
    """Number of tokens that exist [...], as floats."""
    xp = namespace(x)
    if mask is None:
        return xp.full_like(x[..., 0, 0], x.shape[-2])
    return xp.astype(xp.sum(mask, axis=-1), x.dtype)


@where_it_lives
def composite_norm(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """‖X‖_{1,∞} = √(‖X‖_1 ‖X‖_∞) (Dong et al. 2021, section 2).

    Not a norm: the triangle inequality fails, as the authors say.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], which of them exist, None for all.

    Raises:
        ValueError: Not a matrix, no token, not finite (where x is known), or a wrong mask.
    """
    return norm_of(as_tokens(x, mask)[0], "composite")


@where_it_lives
def singular_values(x: Any, *, mask: Any = None) -> Float[Any, "*b r"]:
    """Singular values, largest first; masked rows only add zeros.

    Of float32 the square roots of the eigenvalues, in float64, of the smaller of XXᵀ and XᵀX: less
    is lost than by an SVD in float32, in a tenth of the time. By an SVD of float64, and of JAX in
    jit or on an accelerator.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], which of them exist, None for all.

    Raises:
        ValueError: See `composite_norm`.
    """
    return singular_values_of(as_tokens(x, mask)[0])


@where_it_lives
def matrix_norm(x: Any, norm: Norm = "composite", *, mask: Any = None) -> Float[Any, "*b"]:
    """A norm by name.

    Args:
        x: Tokens [..., n, d].
        norm: "composite" ‖.‖_{1,∞}, "one" largest column sum, "inf" largest row sum, "frobenius",
            "spectral" largest singular value, "max" largest |entry|.
        mask: Bool [n] or [..., n], True for tokens that exist; None for all.

    Raises:
        ValueError: Unknown norm; see also `composite_norm`.
    """
    return norm_of(as_tokens(x, mask)[0], norm)


# ‖X‖_1 = max_j Σ_i |X_ij| and ‖X‖_∞ = max_i Σ_j |X_ij|.
norm_1, norm_inf = (functools.partial(matrix_norm, norm=norm) for norm in ("one", "inf"))


def norm_of(x: Any, norm: Norm) -> Any:
    """`matrix_norm` of what `as_tokens` made."""
    refuse_if(norm not in NORMS, f"norm={norm!r} is not one of {NORMS}")
    if norm == "composite":  # the product of the two itself could overflow
        return root(norm_of(x, "one")) * root(norm_of(x, "inf"))
    xp = namespace(x)
    if norm in ("one", "inf"):
        return xp.max(total(xp.abs(x), -2 if norm == "one" else -1), axis=-1)
    if norm == "spectral":
        return singular_values_of(x)[..., 0]
    if norm == "max":
        return xp.max(xp.abs(x), axis=(-2, -1))
    scaled, scale = unit_scale(x)
    return scale * root(xp.sum(xp.square(scaled), axis=(-2, -1)))


def singular_values_of(x: Any) -> Any:
    """`singular_values` of what `as_tokens` made."""
    (scaled, scale), xp = unit_scale(x), namespace(x)
    if is_jax_array(x):
        from rank_collapse.measures import on_jax

        return scale[..., None] * on_jax.svdvals(scaled)
    if x.dtype == xp.float64:
        return scale[..., None] * xp.linalg.svdvals(scaled)
    squares = xp.linalg.eigvalsh(gram_of(xp.astype(scaled, xp.float64)))
    squares = xp.astype(xp.flip(squares, axis=-1), x.dtype)
    return scale[..., None] * root(xp.clip(squares, 0, None))


def gram_of(x: Any) -> Any:
    """The smaller of XXᵀ and XᵀX."""
    xp = namespace(x)
    transposed = xp.matrix_transpose(x)
    left, right = (x, transposed) if x.shape[-2] <= x.shape[-1] else (transposed, x)
    return left @ right


def unit_scale(x: Any, axis: Any = (-2, -1)) -> tuple[Any, Any]:
    """(x 4^−k, 4^k) with the largest |entry| along these axes, of the first in [1, 4).

    Squares and sums then neither overflow nor underflow. No digit changes, since a power of 4 and
    its root are exact.
    """
    xp = namespace(x)
    largest = constant(xp.max(xp.abs(x), axis=axis, keepdims=True))
    limit = 1022 if x.dtype == xp.float64 else 126  # 4^−k is a normal number, too
    power = xp.clip((xp.frexp(largest)[1] - 1) // 2 * 2, -limit, limit)
    if is_torch_array(x):  # whose ldexp is exact for exponents of its dtype alone
        power = xp.astype(power, x.dtype)
    one = xp.ones_like(largest)
    return x * xp.ldexp(one, -power), xp.squeeze(xp.ldexp(one, power), axis=axis)
