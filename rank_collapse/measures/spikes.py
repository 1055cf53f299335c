"""Tokens that hold most of the norm (massive activations), and which tokens are measured.

In a trained pre-norm network one token may carry nearly all of ‖X‖². Ratios of norms then say
nothing of the others: measured are unit tokens, what the layer reads, or tokens without spikes.
"""

from typing import Any, NamedTuple

from jaxtyping import Float

from rank_collapse.measures.arrays import as_floats, namespace, where_it_lives
from rank_collapse.measures.centers import median
from rank_collapse.measures.norms import as_tokens, divide, num_tokens, root, unit_scale
from rank_collapse.measures.residuals import residual_of, unit_tokens

TOKENS = ("raw", "unit", "read")
SPIKE = 5.0  # times the median norm, from which on a token is one


class Chosen(NamedTuple):
    """Tokens to measure [..., n, d], a mask of those that exist, and how many were left out."""

    x: Any
    mask: Any
    left_out: Any  # [...]; None where nothing is excluded


def chosen_tokens(
    x: Any,
    mask: Any = None,
    read: Any = None,
    *,
    tokens: str = "raw",
    exclude: str | None = None,
    threshold: float = SPIKE,
) -> Chosen:
    """The tokens that are measured.

    Args:
        x, mask: Floats [..., n, d]; Bool [..., n] of the same framework, or None.
        read: What the layer's attention reads of them, N(x) with its own norm, for "read".
        tokens: "raw", as they are; "unit", x_i/|x_i|; or "read".
        exclude: "spikes" leaves out the tokens i with |x_i| > threshold · median_j |x_j|.
        threshold: Of spikes, in median norms of the raw tokens.

    Raises:
        ValueError: An unknown name; "read" without what is read.
    """
    if tokens not in TOKENS:
        raise ValueError(f"tokens={tokens!r} is not one of {TOKENS}")
    if exclude not in (None, "spikes"):
        raise ValueError(f"exclude={exclude!r} is not 'spikes' or None")
    if tokens == "read" and read is None:
        raise ValueError("tokens='read' needs norm=, the layer's own norm as a function of tokens")
    xp, left_out = namespace(x), None
    if exclude:
        there = xp.ones_like(x[..., 0], dtype=xp.bool) if mask is None else mask
        lengths, middle = _lengths(xp.where(there[..., None], x, 0), mask)
        spikes = there & (lengths > threshold * middle[..., None])
        mask, left_out = there & ~spikes, xp.sum(spikes, axis=-1)
    if tokens == "unit":
        x, _ = unit_tokens(x)
    return Chosen(as_floats(read) if tokens == "read" else x, mask, left_out)


@where_it_lives
def spike_entry(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """max|x_ij| / median|x_ij| over the tokens that exist (Sun et al. 2024, massive activations).

    NaN where the median is 0.

    Args:
        x, mask: Tokens [..., n, d]; Bool [n] or [..., n], which of them exist, None for all.

    Raises:
        ValueError: As `composite_norm`.
    """
    x, mask = as_tokens(x, mask, empty=True)
    xp = namespace(x)
    size = xp.abs(x)
    sorted_last = size if mask is None else xp.where(mask[..., None], size, xp.inf)
    flat = sorted_last.reshape((*x.shape[:-2], -1, 1))
    middle = median(flat, num_tokens(x, mask)[..., None] * x.shape[-1])[..., 0, 0]
    return divide(xp.max(size, axis=(-2, -1)), middle)


@where_it_lives
def spike_norm(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """max_i |x_i| / median_i |x_i|; NaN where the median is 0. Arguments as of `spike_entry`."""
    x, mask = as_tokens(x, mask, empty=True)
    lengths, middle = _lengths(x, mask)
    return divide(namespace(x).max(lengths, axis=-1), middle)


@where_it_lives
def spike_share(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """max_i |x_i|² / ‖X‖_F², 1/n where all are as long. Arguments as of `spike_entry`."""
    return _largest_share(as_tokens(x, mask, empty=True)[0])


@where_it_lives
def residual_spike(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """max_i |r_i|² / ‖res(X)‖_F², r the tokens less their mean: above 1/2 a residual ratio is of
    one token.

    NaN for fewer than three tokens, and where all are equal. Arguments as of `spike_entry`.
    """
    x, mask = as_tokens(x, mask, empty=True)
    share = _largest_share(residual_of(unit_scale(x)[0], mask, "mean"))
    xp = namespace(x)
    return xp.where(num_tokens(x, mask) < 3, xp.nan, share)


@where_it_lives
def spike_token(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """The position i of the largest |x_ij|, the first such; NaN where no token exists."""
    return _place(x, mask)[0]


@where_it_lives
def spike_feature(x: Any, *, mask: Any = None) -> Float[Any, "*b"]:
    """The feature j of the largest |x_ij|, the first such; NaN where no token exists."""
    return _place(x, mask)[1]


def _place(x, mask):
    x, mask = as_tokens(x, mask, empty=True)
    xp = namespace(x)
    largest = xp.argmax(xp.abs(x).reshape((*x.shape[:-2], -1)), axis=-1)
    place = (largest // x.shape[-1], largest % x.shape[-1])
    there = num_tokens(x, mask) > 0
    return [xp.where(there, xp.astype(index, x.dtype), xp.nan) for index in place]


def _largest_share(x):
    xp = namespace(x)
    x, _ = unit_scale(x)
    squares = xp.sum(xp.square(x), axis=-1)
    return divide(xp.max(squares, axis=-1), xp.sum(squares, axis=-1))


def _lengths(x, mask):
    """(|x_i| [..., n], their median [...]), both over one scale; 0 for tokens that do not exist."""
    xp = namespace(x)
    x, _ = unit_scale(x)
    lengths = root(xp.sum(xp.square(x), axis=-1))
    sorted_last = lengths if mask is None else xp.where(mask, lengths, xp.inf)
    return lengths, median(sorted_last[..., None], num_tokens(x, mask)[..., None])[..., 0, 0]
