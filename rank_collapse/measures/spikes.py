"""Tokens that hold most of the norm (massive activations), and which tokens are measured.

In a trained pre-norm network one token may carry nearly all of ‖X‖². Ratios of norms then show
nothing about the other tokens. One can measure unit tokens, the input of the layer, or tokens
without spikes instead.
"""

from typing import Literal, get_args

import numpy as np
from jaxtyping import Float

from rank_collapse.annotations import AnyArray, Number
from rank_collapse.checks import check_numbers, refuse
from rank_collapse.measures.arrays import as_floats, namespace, where_it_lives
from rank_collapse.measures.norms import num_tokens, safe_divide, safe_sqrt, scale_to_unit
from rank_collapse.measures.residuals import (
    compute_residual,
    divide_by_norms,
    nan_if_empty,
    residual_ratio,
    scale_tokens,
)

TokenKind = Literal["raw", "unit", "read"]
Excluded = Literal["spikes"]
TOKEN_KINDS = get_args(TokenKind)
SPIKE = 5.0  # times the median norm, from which on a token is one


def choose_tokens(
    x: AnyArray,
    mask: AnyArray | None = None,
    read: AnyArray | None = None,
    *,
    tokens: TokenKind = "raw",
    exclude: Excluded | None = None,
    threshold: Number = SPIKE,
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Choose the tokens to measure.

    Args:
        x, mask: Floats [..., n, d]; Bool [..., n] of the same framework, or None.
        read: The input of the layer's attention, N(x) with the layer's own norm, for "read".
        tokens: "raw", as they are; "unit", x_i/|x_i|; or "read".
        exclude: "spikes" leaves out the tokens i with |x_i| > threshold · median_j |x_j|. A token
            that is not finite is no spike: it stays, and measures of it are NaN.
        threshold: Norm above which a token is a spike, in median norms of the raw tokens.

    Returns:
        (tokens [..., n, d], a mask of the existing tokens or None for all, the number of tokens
        left out [...] or None where nothing is excluded).

    Raises:
        ValueError: An unknown name; "read" without `read`, or `read` without "read".
    """
    check_numbers("[0, inf]", threshold=threshold)
    refuse(
        (tokens not in TOKEN_KINDS, f"tokens={tokens!r} is not one of {TOKEN_KINDS}"),
        (exclude not in (None, "spikes"), f"exclude={exclude!r} is not 'spikes' or None"),
        (
            tokens == "read" and read is None,
            "tokens='read' needs norm=, the layer's own norm as a function of tokens",
        ),
        (
            tokens != "read" and read is not None,
            f"norm= needs tokens='read', not {tokens!r}",
        ),
    )
    xp, left_out = namespace(x), None
    if exclude:
        exists = xp.ones_like(x[..., 0], dtype=xp.bool) if mask is None else mask
        lengths, median = _token_lengths(scale_to_unit(xp.where(exists[..., None], x, 0))[0], mask)
        is_long = (lengths > threshold * median[..., None]) & xp.all(xp.isfinite(x), axis=-1)
        is_spike = exists & is_long
        mask, left_out = exists & ~is_spike, xp.sum(is_spike, axis=-1)
    if tokens == "unit":
        x, _ = divide_by_norms(x)
    elif tokens == "read":
        x = as_floats(read)
    return x, mask, left_out


@where_it_lives
def spike_entry(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute max|x_ij| / median|x_ij| over the tokens that exist; NaN where the median is 0.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], True for tokens that exist, None for all.

    Raises:
        ValueError: In the same cases as `composite_norm`.

    Source: Sun et al. 2024, massive activations.
    """
    x, mask = scale_tokens(x, mask)
    xp = namespace(x)
    sizes = xp.abs(x)
    sorts_last = sizes if mask is None else xp.where(mask[..., None], sizes, xp.inf)
    count = num_tokens(x, mask)[..., None] * x.shape[-1]
    median = masked_median(sorts_last.reshape((*x.shape[:-2], -1, 1)), count)[..., 0, 0]
    return nan_if_empty(safe_divide(xp.max(sizes, axis=(-2, -1)), median), mask)


@where_it_lives
def spike_norm(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute max_i |x_i| / median_i |x_i|; NaN where the median is 0.

    Args:
        x, mask: See `spike_entry`.
    """
    x, mask = scale_tokens(x, mask)
    lengths, median = _token_lengths(x, mask)
    return nan_if_empty(safe_divide(namespace(x).max(lengths, axis=-1), median), mask)


@where_it_lives
def spike_share(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute max_i |x_i|² / ‖X‖_F², 1/n where all are as long.

    Args:
        x, mask: See `spike_entry`.
    """
    return _largest_share(scale_tokens(x, mask)[0])


@where_it_lives
def residual_spike(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute max_i |r_i|² / ‖R‖_F² of R = res(X), the tokens less their mean.

    Above 1/2 a residual ratio says little about the other tokens. NaN for fewer than three tokens,
    and where all are equal.

    Args:
        x, mask: See `spike_entry`.
    """
    x, mask = scale_tokens(x, mask)
    share = _largest_share(scale_to_unit(compute_residual(x, mask))[0])
    return namespace(x).where(num_tokens(x, mask) < 3, float("nan"), share)


@where_it_lives
def bulk_ratio(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Compute ‖res(X)‖ / ‖X‖ in ‖·‖_{1,∞} of the bulk: without a few tokens far from the others.

    With the median token m, by feature, a token is far if |x_i − m| > 5 median_j |x_j − m|. The
    farthest tokens are left out: at most an eighth of the tokens, or one. Tokens at the same
    distance are all left out, or none of them. The ratio is near 0 where nearly all tokens are
    equal, whatever the others are; with a single long token `residual_ratio` is about 1 there.

    Args:
        x, mask: See `spike_entry`.
    """
    x, mask = scale_tokens(x, mask)
    xp, ratio = namespace(x), residual_ratio(x, mask=_select_bulk(x, mask))
    # An infinite token is far from the others, but must not be left out.
    return xp.where(xp.all(xp.isfinite(x), axis=(-2, -1)), ratio, float("nan"))


def choose_ratio(ratio: AnyArray, bulk: AnyArray) -> np.ndarray:
    """Choose the ratio on which a verdict about all tokens is based.

    It is `residual_ratio`; or `bulk_ratio`, where a few tokens make more than half of the residual.

    Args:
        ratio, bulk: Both measures of the same tokens, of any shape; where bulk is NaN, `ratio` is
            chosen.
    """
    ratio, bulk = np.asarray(ratio, float), np.asarray(bulk, float)
    return np.where(2 * bulk < ratio, bulk, ratio)


def _select_bulk(x, mask):
    """Select the tokens of `bulk_ratio`: all but those that are far from the median token, at most
    an eighth of them.

    A token is left out if its distance from the median (of each feature) is more than `SPIKE` times
    the median distance, and among the largest eighth (at least one).

    Args:
        x: Tokens [..., n, d].
        mask: Bool [..., n], the tokens that exist; or None.

    Returns:
        Bool [..., n].
    """
    xp, count = namespace(x), num_tokens(x, mask)[..., None]
    exists = xp.ones_like(x[..., 0], dtype=xp.bool) if mask is None else mask
    exists = xp.broadcast_to(exists, x.shape[:-1])
    median = masked_median(xp.where(exists[..., None], x, xp.inf), count)
    is_any = count[..., None] > 0
    offset = xp.where(exists[..., None] & is_any, x - xp.where(is_any, median, 0), 0)
    distances = safe_sqrt(xp.sum(xp.square(scale_to_unit(offset)[0]), axis=-1))
    sorts_last = xp.where(exists, distances, xp.inf)[..., None]
    middle = masked_median(sorts_last, count)[..., 0]
    count = xp.astype(count, xp.arange(0).dtype)
    most = xp.maximum(count // 8, xp.ones_like(count))
    num_kept = xp.maximum(count - 1 - most, xp.zeros_like(count))[..., None]
    cutoff = xp.take_along_axis(xp.sort(sorts_last, axis=-2), num_kept, axis=-2)[..., 0]
    return exists & ~((distances > SPIKE * middle) & (distances > cutoff))


@where_it_lives
def spike_token(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Find the position i of the largest |x_ij|, the first such.

    Args:
        x, mask: See `spike_entry`.
    """
    return _largest_position(x, mask, lambda index, width: index // width)


@where_it_lives
def spike_feature(x: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*b"]:
    """Find the feature j of the largest |x_ij|, the first such.

    Args:
        x, mask: See `spike_entry`.
    """
    return _largest_position(x, mask, lambda index, width: index % width)


def _largest_position(x, mask, read_index):
    """Compute where |x_ij| is largest; NaN where tokens are not finite or none exists.

    Args:
        x: Tokens [..., n, d].
        mask: Bool [..., n]; None for all.
        read_index: Function of (index in the flattened tokens, d), which returns the token or the
            feature.
    """
    x, mask = scale_tokens(x, mask)
    xp = namespace(x)
    size = xp.abs(x)
    if mask is not None:  # where all are 0, the first token that exists
        size = xp.where(mask[..., None], size, -1)
    size = size.reshape((*x.shape[:-2], -1))
    index = xp.astype(read_index(xp.argmax(size, axis=-1), x.shape[-1]), x.dtype)
    is_finite = xp.isfinite(xp.max(size, axis=-1))
    return nan_if_empty(xp.where(is_finite, index, xp.nan), mask)


def _largest_share(x):
    """Compute the share of Σ_i ‖x_i‖² that the largest token has, [...]."""
    xp = namespace(x)
    squares = xp.sum(xp.square(x), axis=-1)
    return safe_divide(xp.max(squares, axis=-1), xp.sum(squares, axis=-1))


def _token_lengths(x, mask):
    """Compute (|x_i| [..., n], their median [...]) of scaled tokens; 0 where they do not exist."""
    xp = namespace(x)
    unit, scale = scale_to_unit(x, axis=-1)
    lengths = scale * safe_sqrt(xp.sum(xp.square(unit), axis=-1))
    sorts_last = lengths if mask is None else xp.where(mask, lengths, xp.inf)
    return lengths, masked_median(sorts_last[..., None], num_tokens(x, mask)[..., None])[..., 0, 0]


def masked_median(x: AnyArray, count: AnyArray) -> AnyArray:
    """Compute the median along the axis before the last, which is kept.

    Args:
        x: Values [..., n, d]; those that do not exist are infinite.
        count: Number of entries that exist, [..., 1].
    """
    xp = namespace(x)
    rows = xp.sort(x, axis=-2)
    count = xp.astype(count, xp.arange(0).dtype)[..., None]
    shape = (*x.shape[:-2], 1, x.shape[-1])

    def take_row(index):
        return xp.take_along_axis(rows, xp.broadcast_to(index, shape), axis=-2)

    return take_row((count - 1) // 2) / 2 + take_row(count // 2) / 2
