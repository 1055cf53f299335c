"""How far an array of tokens is from rank one: residuals, ratios, ranks and cosines.

Everything takes an array [n, d] of NumPy, JAX or torch and an optional Bool [n] mask of the tokens
that exist, and gives an array of that framework on the same device (`arrays.where_it_lives`). A
quantity with a mask equals that of the array without the masked rows, and is NaN where the mask
leaves too few tokens for it. Leading axes are a batch: [..., n, d] with a mask [n] or [..., n]
gives one value per example, [...]. Computed in float64 where x is, else in float32.
"""

from typing import Any

import numpy as np
from array_api_compat import is_torch_array
from jaxtyping import Float

from rank_collapse.measures.arrays import (
    constant,
    is_jax_array,
    namespace,
    same_framework,
    where_it_lives,
)
from rank_collapse.measures.centers import Center, center_of
from rank_collapse.measures.norms import (
    Norm,
    as_tokens,
    divide,
    gram_of,
    norm_of,
    num_tokens,
    root,
    singular_values_of,
    total,
    unit_scale,
)

# Steps of the power iteration of `stable_rank_bound`; each is one product with G.
POWER_STEPS = 20


@where_it_lives
def residual(x: Any, *, center: Center = "mean", mask: Any = None) -> Float[Any, "*b n d"]:
    """res(X) = X − 1xᵀ, the tokens minus one common token x.

    Args:
        x: Tokens [..., n, d].
        center: Which x: "mean" (the published curves; minimises the Frobenius norm), "median"
            (columnwise; minimises ‖.‖_1) or "midrange" (minimises the largest |entry|).
        mask: Bool [n] or [..., n], True for tokens that exist; None for all.

    Returns:
        The residual [..., n, d], zero in masked rows.

    Raises:
        ValueError: Unknown center; not a matrix, no token, not finite (where x is not traced), or
            a wrong mask.

    Source: Dong et al. 2021, section 2.
    """
    x, mask = as_tokens(x, mask)
    x, scale = unit_scale(x)
    return scale[..., None, None] * residual_of(x, mask, center)


def scaled_tokens(x: Any, mask: Any) -> tuple[Any, Any]:
    """Tokens in a scale in which nothing overflows or underflows, for ratios, and their mask."""
    x, mask = as_tokens(x, mask, empty=True)
    return unit_scale(x)[0], mask


def residual_of(x: Any, mask: Any, center: Center) -> Any:
    """`residual` of what `as_tokens` made."""
    rest = x - center_of(x, mask, center)[..., None, :]
    return rest if mask is None else namespace(x).where(mask[..., None], rest, 0)


@where_it_lives
def residual_ratio(
    x: Any, *, center: Center = "mean", norm: Norm = "composite", mask: Any = None
) -> Float[Any, "*b"]:
    """‖res(X)‖ / ‖X‖, in [0, 1] for the norm's own minimiser; 0 where X = 0.

    Args:
        x: Tokens [..., n, d].
        center: See `residual`.
        norm: See `matrix_norm`; the published curves use "composite".
        mask: Bool [n] or [..., n], True for tokens that exist; None for all.

    Raises:
        ValueError: Unknown center or norm; see also `residual`.

    Source: Dong et al. 2021, section 4.2 and figure 2.
    """
    x, mask = scaled_tokens(x, mask)
    return _ratio(norm_of(residual_of(x, mask, center), norm), norm_of(x, norm), mask)


@where_it_lives
def rank_one_ratio(x: Any, *, norm: Norm = "composite", mask: Any = None) -> Float[Any, "*b"]:
    """‖X − σ_1 u_1 v_1ᵀ‖ / ‖X‖; 0 where X = 0.

    Unlike in res(X), the common token may come with another weight in each row.

    Args:
        x: Tokens [..., n, d].
        norm: See `matrix_norm`.
        mask: Bool [n] or [..., n], True for tokens that exist; None for all.
    """
    x, mask = scaled_tokens(x, mask)
    return _ratio(norm_of(_best_rank_one_residual(x), norm), norm_of(x, norm), mask)


def _best_rank_one_residual(x):
    """X − σ_1 u_1 v_1ᵀ, what the best approximation of rank one leaves (Eckart and Young)."""
    (scaled, scale), xp = unit_scale(x), namespace(x)
    if is_jax_array(x):
        from rank_collapse.measures import on_jax

        part = on_jax.from_svd(_first_part, _first_part_change)(scaled)
    else:
        known = constant(scaled)
        factors = xp.linalg.svd(known, full_matrices=False)
        part = _first_part(*factors)
        if is_torch_array(x):  # plus 0, with the derivative: that of torch's SVD divides by gaps
            part = part + _first_part_change(*factors, scaled - known)
    return x - scale[..., None, None] * part


def _first_part(u, s, vt):
    """σ_1 u_1 v_1ᵀ."""
    return s[..., :1, None] * u[..., :1] * vt[..., :1, :]


def _first_part_change(u, s, vt, dx):
    """d(σ_1 u_1 v_1ᵀ) of the pairs (σ_1, σ_j) alone: finite where others are equal.

    Where σ_1 = σ_j, or σ_1 = 0, the approximation has no derivative; their part is left out.
    """
    transpose, s = namespace(s).matrix_transpose, s[..., None]
    first, first_u, first_v = s[..., :1, :], u[..., :1], transpose(vt[..., :1, :])
    down, across = dx @ first_v, transpose(dx) @ first_u  # dX v_1, dXᵀ u_1
    a, b = transpose(u) @ down, vt @ across
    gap = divide(1 + 0 * s, first**2 - s**2, 0)
    beyond = divide(1 + 0 * first, first, 0)
    du = u @ (gap * (first * a + s * b)) + beyond * (down - u @ a)
    dv = transpose(vt) @ (gap * (first * b + s * a)) + beyond * (across - transpose(vt) @ b)
    change = first * (du @ transpose(first_v) + first_u @ transpose(dv))
    return change + a[..., :1, :] * (first_u @ transpose(first_v))


@where_it_lives
def stable_rank(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """‖X‖_F² / ‖X‖_2², at most the rank; 0 where X = 0 (Rudelson and Vershynin 2007).

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], which of them exist, None for all.
    """
    x, mask = scaled_tokens(x, mask)
    s = singular_values_of(x)
    return nan_if_empty(namespace(s).sum(_of_largest(s), axis=-1), mask)


@where_it_lives
def effective_rank(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """exp(−Σ_i p_i log p_i), p_i = σ_i / Σ_j σ_j; 0 where X = 0 (Roy and Vetterli 2007).

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], which of them exist, None for all.
    """
    x, mask = scaled_tokens(x, mask)
    return nan_if_empty(_effective_rank(x), mask)


def _effective_rank(x):
    s, xp = singular_values_of(x), namespace(x)
    return xp.where(s[..., 0] == 0, 0, xp.exp(_entropy(s)))


def _of_largest(s):
    """σ_i²/σ_1², 0 where all are 0."""
    return namespace(s).square(divide(s, s[..., :1], 0))


def _entropy(values):
    """−Σ_i p_i log p_i of p_i = values_i / Σ_j values_j; 0 where all are 0."""
    xp = namespace(values)
    p = divide(values, xp.sum(values, axis=-1, keepdims=True), 0)
    return -xp.sum(p * xp.log(xp.where(p == 0, 1, p)), axis=-1)


@where_it_lives
def effective_rank_share(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """`effective_rank` of X − 1x̄ᵀ over min(n − 1, d), the most it can be: in [0, 1] at any n and d.

    NaN for fewer than two tokens.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], which of them exist, None for all.
    """
    x, mask = scaled_tokens(x, mask)
    most = namespace(x).clip(num_tokens(x, mask) - 1, 0, x.shape[-1])
    return nan_if_empty(divide(_effective_rank(residual_of(x, mask, "mean")), most), mask)


@where_it_lives
def matrix_entropy(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """−Σ_i p_i log p_i in nats, p_i = σ_i²/Σ_j σ_j²: von Neumann's entropy of XXᵀ/tr XXᵀ.

    0 for rank one and where X = 0, log min(n, d) where all singular values are equal. Of the tokens
    of one prompt in one layer it is the prompt entropy.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], which of them exist, None for all.

    Source: Giraldo et al. 2014; Skean et al. 2025, section 3, at α → 1.
    """
    x, mask = scaled_tokens(x, mask)
    return nan_if_empty(_entropy(_of_largest(singular_values_of(x))), mask)


@where_it_lives
def token_cosine(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """Mean of cos(x_i, x_j) over the pairs i ≠ j; a zero token has cosine 0 with every other.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], which of them exist, None for all.

    Raises:
        ValueError: Fewer than two tokens (NaN where only a mask leaves fewer).
    """
    x, mask = as_tokens(x, mask, empty=True)
    if x.shape[-2] < 2:
        raise ValueError(f"x of shape {tuple(x.shape)} has no pair of tokens")
    (unit, squares), xp = unit_tokens(x), namespace(x)
    count = num_tokens(x, mask)
    # over pairs: |Σ x̂_i|² counts i = j too, with |x̂_i|² each
    pairs = xp.sum(xp.square(total(unit, -2)), axis=-1) - xp.sum(squares, axis=-1)
    return divide(pairs, count * xp.clip(count - 1, 0, None))


def unit_tokens(x: Any) -> tuple[Any, Any]:
    """(x̂_i = x_i/|x_i| [..., n, d], |x̂_i|² [..., n]) of what `as_tokens` made; 0 where x_i is."""
    xp = namespace(x)
    x, _ = unit_scale(x, axis=-1)
    squares = xp.sum(xp.square(x), axis=-1)
    inverse = divide(xp.ones_like(squares), root(squares), 0)
    return inverse[..., None] * x, squares * xp.square(inverse)


@where_it_lives
def participation_ratio(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """tr(G)²/‖G‖_F² of G = XXᵀ, (Σ σ_i²)² / Σ σ_i⁴: how many directions carry the squares.

    1 for rank one, min(n, d) where all singular values are equal, 0 where X = 0.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], which of them exist, None for all.

    Raises:
        ValueError: As `composite_norm`.
    """
    x, mask = scaled_tokens(x, mask)
    xp, gram = namespace(x), gram_of(x)
    square = xp.sum(xp.square(gram), axis=(-2, -1))
    return nan_if_empty(divide(xp.square(xp.linalg.trace(gram)), square, 0), mask)


@where_it_lives
def stable_rank_bound(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """‖X‖_F²/σ², σ ≤ σ_1 by 20 power steps on G = XXᵀ: at least `stable_rank`, 0 where X = 0.

    It needs no singular values, so that it may be computed at every step of a training. Where
    σ_2/σ_1 is 0.9 it is up to 1 % above, where all are of one size some percent.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], which of them exist, None for all.

    Raises:
        ValueError: As `composite_norm`.
    """
    x, mask = scaled_tokens(x, mask)
    xp, gram = namespace(x), gram_of(x)

    def step(v):
        product = gram @ v
        return divide(product, root(xp.sum(xp.square(product), axis=-2, keepdims=True)), 0)

    v = np.random.default_rng(0).standard_normal((gram.shape[-1], 1))
    v = v if x.dtype == xp.float64 else v.astype(np.float32)
    v = xp.broadcast_to(same_framework(x, v)[1], (*gram.shape[:-1], 1))
    if is_jax_array(x):
        from rank_collapse.measures import on_jax

        v = on_jax.repeated(step, v, POWER_STEPS, gram[..., :1])
    else:
        for _ in range(POWER_STEPS):
            v = step(v)
    most = (xp.matrix_transpose(v) @ gram @ v)[..., 0, 0]
    return nan_if_empty(divide(xp.linalg.trace(gram), most, 0), mask)


def nan_if_empty(value: Any, mask: Any) -> Any:
    """A measure [...], NaN where no token exists."""
    xp = namespace(value)
    return value if mask is None else xp.where(xp.any(mask, axis=-1), value, xp.nan)


def _ratio(part, whole, mask):
    return nan_if_empty(divide(part, whole, 0), mask)
