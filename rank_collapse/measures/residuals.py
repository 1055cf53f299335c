"""How far an array of tokens is from rank one: residuals, ratios, ranks and cosines.

Everything takes an array [n, d] in NumPy, JAX or torch, and an optional Bool [n] mask of the tokens
that exist. It returns an array of the same framework on the same device (`arrays.where_it_lives`).
A quantity with a mask equals the quantity of the array without the masked rows, and is NaN where
the mask leaves too few tokens. Leading axes are a batch: [..., n, d] with a mask [n] or [..., n]
gives one value per example, [...]. Computed in float64 if x is float64, else in float32.
"""

import numpy as np
from array_api_compat import is_torch_array
from jaxtyping import Float

from rank_collapse.annotations import AnyArray
from rank_collapse.measures.arrays import (
    is_jax_array,
    match_framework,
    namespace,
    stop_gradient,
    where_it_lives,
)
from rank_collapse.measures.norms import (
    Norm,
    as_tokens,
    compute_norm,
    compute_singular_values,
    exact_sum,
    num_tokens,
    safe_divide,
    safe_sqrt,
    scale_to_unit,
    smaller_gram_matrix,
)

# Steps of the power iteration of `stable_rank_bound`; each is one product with G.
POWER_STEPS = 20


@where_it_lives
def residual(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b n d"]:
    """Compute res(X) = X − 1x̄ᵀ, the tokens minus their mean x̄, which minimises ‖.‖_F.

    Args:
        x: Tokens [..., n, d].
        mask: Bool [n] or [..., n], True for tokens that exist; None for all.

    Returns:
        The residual [..., n, d], zero in masked rows.

    Raises:
        ValueError: Not a matrix, no token, not finite (where x is not traced), or a wrong mask.

    Source: Dong et al. 2021, section 2.
    """
    x, mask = as_tokens(x, mask)
    x, scale = scale_to_unit(x)
    return scale[..., None, None] * compute_residual(x, mask)


def scale_tokens(x: AnyArray, mask: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Scale tokens so that nothing overflows or underflows, for ratios of their norms."""
    x, mask = as_tokens(x, mask, empty=True)
    return scale_to_unit(x)[0], mask


def compute_residual(x: AnyArray, mask: AnyArray) -> AnyArray:
    """Compute `residual` of the result of `as_tokens`."""
    mean = safe_divide(exact_sum(x, -2), num_tokens(x, mask)[..., None])
    residuals = x - mean[..., None, :]
    return residuals if mask is None else namespace(x).where(mask[..., None], residuals, 0)


@where_it_lives
def residual_ratio(
    x: AnyArray, *, norm: Norm = "composite", mask: AnyArray | None = None
) -> Float[AnyArray, "*b"]:
    """Compute ‖res(X)‖ / ‖X‖, at most 1 in the Frobenius norm; 0 where X = 0.

    NaN for fewer than two tokens, where the ratio has no meaning; `rc.profile` does the same.

    Args:
        x: Tokens [..., n, d].
        norm: See `matrix_norm`; the published curves use "composite".
        mask: Bool [n] or [..., n], True for tokens that exist; None for all.

    Raises:
        ValueError: Unknown norm; see also `residual`.

    Source: Dong et al. 2021, section 4.2 and figure 2.
    """
    x, mask = scale_tokens(x, mask)
    ratio = _norm_ratio(compute_norm(compute_residual(x, mask), norm), compute_norm(x, norm), mask)
    return namespace(x).where(num_tokens(x, mask) < 2, float("nan"), ratio)


@where_it_lives
def rank_one_ratio(
    x: AnyArray, *, norm: Norm = "composite", mask: AnyArray | None = None
) -> Float[AnyArray, "*b"]:
    """Compute ‖X − σ_1 u_1 v_1ᵀ‖ / ‖X‖; 0 where X = 0.

    Unlike in res(X), each row may have its own multiple of the common token.

    Args:
        x: Tokens [..., n, d].
        norm: See `matrix_norm`.
        mask: Bool [n] or [..., n], True for tokens that exist; None for all.
    """
    x, mask = scale_tokens(x, mask)
    return _norm_ratio(compute_norm(_best_rank_one_residual(x), norm), compute_norm(x, norm), mask)


def _best_rank_one_residual(x):
    """Compute X − σ_1 u_1 v_1ᵀ, left by the best approximation of rank one (Eckart and Young)."""
    xp = namespace(x)
    scaled, scale = scale_to_unit(x)
    if is_jax_array(x):
        from rank_collapse.measures import on_jax

        part = on_jax.from_svd(_first_part, _first_part_change)(scaled)
    else:
        constant = stop_gradient(scaled)
        factors = xp.linalg.svd(constant, full_matrices=False)
        part = _first_part(*factors)
        if is_torch_array(x):  # plus 0, with the derivative: that of torch's SVD divides by gaps
            part = part + _first_part_change(*factors, scaled - constant)
    return x - scale[..., None, None] * part


def _first_part(u, s, vt):
    """Compute σ_1 u_1 v_1ᵀ."""
    return s[..., :1, None] * u[..., :1] * vt[..., :1, :]


def _first_part_change(u, s, vt, dx):
    """Compute d(σ_1 u_1 v_1ᵀ) along dX; finite where singular values other than σ_1 are equal.

    With a = Uᵀ dX v_1 and b = Vᵀ dXᵀ u_1, dσ_1 = a_1 and
        du_1 = Σ_j u_j (σ_1 a_j + σ_j b_j)/(σ_1² − σ_j²) + (dX v_1 − U a)/σ_1,
    dv_1 the same of V, b and a. Where σ_1 = σ_j, or σ_1 = 0, the approximation has no derivative;
    their part is left out.

    Args:
        u, s, vt: Singular value decomposition of X.
        dx: Direction dX.
    """
    transpose, s = namespace(s).matrix_transpose, s[..., None]
    first, first_u, first_v = s[..., :1, :], u[..., :1], transpose(vt[..., :1, :])
    dx_v, dx_u = dx @ first_v, transpose(dx) @ first_u
    a, b = transpose(u) @ dx_v, vt @ dx_u
    # Not σ_1² − σ_j²: a compiled program may round only one of the squares, and σ_1² − σ_1² is then
    # not 0.
    inverse_gaps = safe_divide(1 + 0 * s, (first - s) * (first + s), 0)
    inverse_first = safe_divide(1 + 0 * first, first, 0)
    du = u @ (inverse_gaps * (first * a + s * b)) + inverse_first * (dx_v - u @ a)
    dv = transpose(vt) @ (inverse_gaps * (first * b + s * a)) + inverse_first * (
        dx_u - transpose(vt) @ b
    )
    change = first * (du @ transpose(first_v) + first_u @ transpose(dv))
    return change + a[..., :1, :] * (first_u @ transpose(first_v))


@where_it_lives
def stable_rank(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute ‖X‖_F² / ‖X‖_2², at most the rank; 0 where X = 0 (Rudelson and Vershynin 2007).

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], True for tokens that exist, None for all.
    """
    x, mask = scale_tokens(x, mask)
    s = compute_singular_values(x)
    return nan_if_empty(namespace(s).sum(_squared_ratios(s), axis=-1), mask)


@where_it_lives
def effective_rank(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute exp(−Σ_i p_i log p_i), p_i = σ_i / Σ_j σ_j; 0 where X = 0 (Roy and Vetterli 2007).

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], True for tokens that exist, None for all.
    """
    x, mask = scale_tokens(x, mask)
    return nan_if_empty(_effective_rank(x), mask)


def _effective_rank(x):
    s, xp = compute_singular_values(x), namespace(x)
    return xp.where(s[..., 0] == 0, 0, xp.exp(_share_entropy(s)))


def _squared_ratios(s):
    """Compute σ_i²/σ_1², 0 where all are 0."""
    return namespace(s).square(safe_divide(s, s[..., :1], 0))


def _share_entropy(values):
    """Compute −Σ_i p_i log p_i of p_i = values_i / Σ_j values_j; 0 where all are 0."""
    xp = namespace(values)
    p = safe_divide(values, xp.sum(values, axis=-1, keepdims=True), 0)
    return -xp.sum(p * xp.log(xp.where(p == 0, 1, p)), axis=-1)


@where_it_lives
def effective_rank_share(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute `effective_rank` of X − 1x̄ᵀ divided by its largest possible value, min(n − 1, d).

    NaN for fewer than two tokens.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], True for tokens that exist, None for all.
    """
    x, mask = scale_tokens(x, mask)
    full_rank = namespace(x).clip(num_tokens(x, mask) - 1, 0, x.shape[-1])
    return nan_if_empty(safe_divide(_effective_rank(compute_residual(x, mask)), full_rank), mask)


@where_it_lives
def matrix_entropy(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute −Σ_i p_i log p_i in nats, p_i = σ_i²/Σ_j σ_j²: von Neumann's entropy of XXᵀ.

    0 for rank one and where X = 0, log min(n, d) where all singular values are equal. For the
    tokens of one prompt in one layer it is the prompt entropy.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], True for tokens that exist, None for all.

    Source: Giraldo et al. 2014; Skean et al. 2025, section 3, at α → 1.
    """
    x, mask = scale_tokens(x, mask)
    return nan_if_empty(_share_entropy(_squared_ratios(compute_singular_values(x))), mask)


@where_it_lives
def token_cosine(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute the mean of cos(x_i, x_j) over the pairs i ≠ j; a zero token has cosine 0.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], True for tokens that exist, None for all.

    Raises:
        ValueError: Fewer than two tokens (NaN where only a mask leaves fewer).
    """
    x, mask = as_tokens(x, mask, empty=True)
    if x.shape[-2] < 2:
        raise ValueError(f"x of shape {tuple(x.shape)} has no pair of tokens")
    xp = namespace(x)
    unit, squares = divide_by_norms(x)
    count = num_tokens(x, mask)
    # |Σ_i x̂_i|² is the sum over all pairs; without the pairs i = j, which add |x̂_i|² each:
    pairs = xp.sum(xp.square(exact_sum(unit, -2)), axis=-1) - xp.sum(squares, axis=-1)
    return safe_divide(pairs, count * xp.clip(count - 1, 0, None))


def divide_by_norms(x: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Divide tokens by their norms.

    Args:
        x: Result of `as_tokens`, [..., n, d].

    Returns:
        (x̂_i = x_i/|x_i| [..., n, d], |x̂_i|² [..., n]). The latter is 1, or 0 for a token that is 0.
    """
    xp = namespace(x)
    x, _ = scale_to_unit(x, axis=-1)
    squares = xp.sum(xp.square(x), axis=-1)
    inverse = safe_divide(xp.ones_like(squares), safe_sqrt(squares), 0)
    return inverse[..., None] * x, squares * xp.square(inverse)


@where_it_lives
def participation_ratio(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute tr(G)²/‖G‖_F² = (Σ σ_i²)² / Σ σ_i⁴ of G = XXᵀ: the number of directions that carry
    the squares.

    1 for rank one, min(n, d) where all singular values are equal, 0 where X = 0.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], True for tokens that exist, None for all.

    Raises:
        ValueError: In the same cases as `composite_norm`.
    """
    x, mask = scale_tokens(x, mask)
    xp, gram = namespace(x), smaller_gram_matrix(x)
    square = xp.sum(xp.square(gram), axis=(-2, -1))
    return nan_if_empty(safe_divide(xp.square(xp.linalg.trace(gram)), square, 0), mask)


@where_it_lives
def stable_rank_bound(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute ‖X‖_F²/σ², where σ ≤ σ_1 comes from 20 power steps on G = XXᵀ; it is at least
    `stable_rank`.

    It needs no singular values, so it may be computed at every training step. It is up to 1 % too
    large where σ_2/σ_1 is 0.9, and a few percent where all singular values are of one size.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], True for tokens that exist, None for all.

    Raises:
        ValueError: In the same cases as `composite_norm`.
    """
    x, mask = scale_tokens(x, mask)
    xp, gram = namespace(x), smaller_gram_matrix(x)

    def step(v):
        product = gram @ v
        return safe_divide(
            product, safe_sqrt(xp.sum(xp.square(product), axis=-2, keepdims=True)), 0
        )

    v = np.random.default_rng(0).standard_normal((gram.shape[-1], 1))
    v = v if x.dtype == xp.float64 else v.astype(np.float32)
    v = xp.broadcast_to(match_framework(x, v)[1], (*gram.shape[:-1], 1))
    if is_jax_array(x):
        from rank_collapse.measures import on_jax

        v = on_jax.repeat_step(step, v, POWER_STEPS, gram[..., :1])
    else:
        for _ in range(POWER_STEPS):
            v = step(v)
    square = (xp.matrix_transpose(v) @ gram @ v)[..., 0, 0]  # σ²
    return nan_if_empty(safe_divide(xp.linalg.trace(gram), square, 0), mask)


def nan_if_empty(value: object, mask: AnyArray) -> AnyArray:
    """Return a measure [...], NaN where no token exists."""
    xp = namespace(value)
    return value if mask is None else xp.where(xp.any(mask, axis=-1), value, xp.nan)


def _norm_ratio(numerator, denominator, mask):
    """Divide two norms, with 0/0 = 0; NaN if the mask leaves no token."""
    return nan_if_empty(safe_divide(numerator, denominator, 0), mask)
