"""Measures of attention weights: entropy, largest weights, saturated rows, sinks.

Where one weight p of a row is near 1, nothing flows back to the scores: the softmax's Jacobian
diag(P) − PPᵀ has entries of at most 1 − p.

Every measure takes weights [..., n, m] in NumPy, JAX or torch, where each row is a distribution.
Means are taken over the queries that exist, by a mask; NaN if there are none. A mask is Bool [n],
or [b, n] for weights [..., b, h, n, m], or has all leading axes, with or without the axis of heads.
Rows that are negative or do not sum to 1, such as logits, raise an error where the values are known
(not inside jit and vmap). NaN stays NaN. Keys that a mask leaves out have weight 0 and add nothing.
`attention_rows` is for models whose fused attention does not return the weights.
"""

import numpy as np
from jaxtyping import Float

from rank_collapse.annotations import AnyArray
from rank_collapse.checks import check_numbers, refuse_if
from rank_collapse.measures.arrays import (
    as_array,
    as_bools,
    as_floats,
    host_values_or_none,
    match_framework,
    namespace,
    on_host,
    where_it_lives,
)
from rank_collapse.measures.norms import masked_mean


@where_it_lives
def attention_entropy(
    attention: AnyArray, *, mask: AnyArray | None = None, missing_key: bool = False
) -> Float[AnyArray, "*s"]:
    """Compute the entropy −Σ_j P_ij log P_ij in nats, its mean over the queries i.

    It is log m if attention is uniform, 0 if it is one-hot.

    Args:
        attention: Weights [..., n, m]; `trace.attention` is [L, h, n, n].
        mask: Bool [n] or [b, n], the queries that exist; None for all.
        missing_key: Whether a row that sums to less than 1 gives the remainder to a further key: a
            learned sink (gpt-oss), or a softmax with 1 added to its sum.

    Returns:
        One value per matrix, [...].

    Raises:
        ValueError: Arrays that are not matrices of weights, or a mask of another shape.
    """
    p, mask = _check_weights(attention, mask, missing_key)
    entropy = _entropy_terms(p).sum(axis=-1)
    if missing_key:
        entropy = entropy + _entropy_terms(namespace(p).clip(1 - p.sum(axis=-1), 0, None))
    return masked_mean(entropy, mask)


def _entropy_terms(p):
    # Where p is 0 so is the product; a select in its place takes three times as long on a CPU.
    xp = namespace(p)
    return -p * xp.log(xp.clip(p, xp.finfo(p.dtype).tiny, None))


@where_it_lives
def largest_weight(attention: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*s"]:
    """Compute max_j P_ij, its mean over the queries i: 1/m if uniform, 1 if one-hot.

    Args:
        attention, mask: See `attention_entropy`.

    Returns:
        One value per matrix, [...].
    """
    p, mask = _check_weights(attention, mask)
    return masked_mean(namespace(p).max(p, axis=-1), mask)


@where_it_lives
def saturated_share(
    attention: AnyArray, threshold: AnyArray = 0.99, *, mask: AnyArray | None = None
) -> Float[AnyArray, "*s"]:
    """Compute the share of the queries i with max_j P_ij > threshold.

    Args:
        attention, mask: See `attention_entropy`.
        threshold: Largest weight from which a row counts as saturated.

    Returns:
        One value per matrix, [...].
    """
    check_numbers("[0, 1]", arrays=True, threshold=threshold)
    p, mask = _check_weights(attention, mask)
    return masked_mean(_exceeds(namespace(p).max(p, axis=-1), threshold), mask)


@where_it_lives
def largest_column(attention: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*s"]:
    """Compute max_j mean_i P_ij, the share of attention on the most attended key.

    It is 1/m if attention is uniform, 1/n if each query attends to itself, 1 if all attend to one
    key.

    Args:
        attention, mask: See `attention_entropy`.

    Returns:
        One value per matrix, [...].
    """
    columns = _column_means(*_check_weights(attention, mask))
    return namespace(columns).max(columns, axis=-1)


@where_it_lives
def first_column(
    attention: AnyArray, *, mask: AnyArray | None = None, key_mask: AnyArray | None = None
) -> Float[AnyArray, "*s"]:
    """Compute mean_i P_ij of the first key j that exists: its share of the attention.

    Args:
        attention, mask: See `attention_entropy`.
        key_mask: Bool [m] or [b, m], the keys that exist; None for all. Without it, padding on the
            left is still recognised: if there are as many keys as queries, the keys before the
            first existing query do not count where no query attends to them.

    Returns:
        One value per matrix, [...].

    Raises:
        ValueError: In the same cases as `attention_entropy`, or a key_mask of another shape.
    """
    return _first_column_share(*_check_weights(attention, mask), key_mask)


@where_it_lives
def sink_rate(
    attention: AnyArray,
    *,
    sink: AnyArray = 0.3,
    mask: AnyArray | None = None,
    key_mask: AnyArray | None = None,
) -> Float[AnyArray, "*s"]:
    """Compute the share of heads whose `first_column` is above `sink` (Gu et al. 2025, section 3).

    Args:
        attention: Weights [..., h, n, m].
        sink: The threshold ε.
        mask, key_mask: See `first_column`.

    Returns:
        One value per layer, [...].

    Raises:
        ValueError: No axis of heads, or the cases of `first_column`.
    """
    check_numbers("[0, 1]", arrays=True, sink=sink)
    p, mask = _check_weights(attention, mask)
    refuse_if(p.ndim < 3, f"attention of shape {tuple(p.shape)} is not [..., h, n, m]")
    return _exceeds(_first_column_share(p, mask, key_mask), sink).mean(axis=-1)


@where_it_lives
def largest_logit(scores: AnyArray, *, mask: AnyArray | None = None) -> Float[AnyArray, "*s"]:
    """Compute max_ij S_ij over the pairs that exist, which QK-clip bounds head by head.

    Args:
        scores: [..., n, m] before the softmax, as `apply(..., keep=("scores",))` keeps them.
        mask: Bool [n], the tokens that exist; or [n, m] or [..., n, m], which keys a query may
            attend to. None for all.

    Returns:
        One value per matrix, [...]; −inf where no pair exists.

    Raises:
        ValueError: Not matrices, or a mask of another shape.

    Source: Kimi K2 (arXiv 2507.20534), section 2.1.
    """
    s = as_floats(scores)
    refuse_if(s.ndim < 2, f"scores of shape {tuple(s.shape)} are not [..., n, m]")
    if mask is not None:
        s, mask = match_framework(s, as_bools(mask))
        mask = mask[:, None] & mask[None] if mask.ndim == 1 else mask
        refuse_if(
            mask.shape[-2:] != s.shape[-2:] or mask.ndim > s.ndim,
            f"mask of shape {mask.shape} does not fit scores of {s.shape}",
        )
        s = namespace(s).where(mask.reshape((1,) * (s.ndim - mask.ndim) + mask.shape), s, -np.inf)
    return namespace(s).max(s, axis=(-2, -1))


def _check_weights(attention, mask, missing_key=False):
    """Convert attention to floats, with its mask, and refuse rows that are not distributions.

    Args:
        attention: Weights [..., n, m].
        mask: See `_broadcast_row_mask`; None for all queries.
        missing_key: Whether rows may sum to less than 1.

    Returns:
        (weights, mask as Bool [..., n] or None).
    """
    p = as_floats(attention)
    refuse_if(p.ndim < 2, f"attention of shape {tuple(p.shape)} is not [..., n, m]")
    if mask is not None:
        p, mask = match_framework(p, _broadcast_row_mask(mask, p.shape[:-1], "mask", "queries"))
    values = host_values_or_none(p)
    if values is None:
        return p, mask
    rows = values if mask is None else values[on_host(mask)]
    smallest = rows.min(initial=0)
    excess = rows.sum(axis=-1) - 1
    excess = excess if missing_key else np.abs(excess)
    error = excess.max(initial=0, where=~np.isnan(excess))
    fault = (
        f"the weight {smallest:.3g}"
        if smallest < 0
        else f"a row whose sum differs from 1 by {error:.3g}"
    )
    refuse_if(
        smallest < 0 or error > 0.02,  # bfloat16 rounds weights to 2⁻⁹
        f"attention of shape {tuple(p.shape)} has {fault}: pass weights after the softmax; "
        "exclude rows that do not exist with mask=, and see missing_key= of attention_entropy",
    )
    return p, mask


def _broadcast_row_mask(mask, shape, name, subject):
    """Broadcast a mask [n], [b, n], or with all leading axes, to Bool [..., b, h, n].

    Args:
        mask: Mask of the rows that exist.
        shape: [..., b, h, n].
        name, subject: Names of the mask and of its rows in the message.
    """
    mask, shape = as_bools(mask, name), tuple(shape)
    length = shape[-1]
    accepted_shapes = (
        (length,),
        (*shape[-3:-2], length),  # [b, n]
        (*shape[:-2], length),  # all leading axes but that of heads
        shape,
    )
    refuse_if(
        mask.shape not in accepted_shapes,
        f"{name} of shape {tuple(mask.shape)} does not fit {length} {subject} of {shape}",
    )
    if mask.shape != shape and mask.ndim > 1:
        mask = mask[..., None, :]
    mask = mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)
    return namespace(mask).broadcast_to(mask, shape)


def _column_means(p, mask):
    return masked_mean(
        namespace(p).matrix_transpose(p), None if mask is None else mask[..., None, :]
    )


def _first_column_share(p, mask, key_mask):
    """Compute `first_column`: the mean weight of the first key that exists, [...].

    Args:
        p, mask: Weights and mask, as `_check_weights` returns them.
        key_mask: The keys that exist, see `_broadcast_row_mask`; None for all.
    """
    columns = _column_means(p, mask)
    share = columns[..., 0]
    if key_mask is not None:
        columns, key_mask = match_framework(
            columns, _broadcast_row_mask(key_mask, columns.shape, "key_mask", "keys")
        )
        share = _take_first_key(columns, key_mask)
    xp = namespace(columns)
    if key_mask is None and mask is not None and mask.shape == columns.shape:
        # Keys before the first query that exists are padding where no query attends to them.
        is_before = xp.cumulative_sum(xp.astype(mask, xp.int32), axis=-1) == 0
        share_before = xp.sum(xp.where(is_before, columns, 0), axis=-1)
        share = xp.where(share_before == 0, _take_first_key(columns, mask), share)
    # A row with a NaN is no distribution, whichever key it stands at.
    return xp.where(xp.any(xp.isnan(columns), axis=-1), xp.nan, share)


def _take_first_key(columns, exists):
    """Take values [..., m] at the first key that exists."""
    xp = namespace(columns)
    first = xp.argmax(xp.astype(exists, xp.int32), axis=-1)[..., None]
    return xp.take_along_axis(columns, first, axis=-1)[..., 0]


def _exceeds(values, threshold):
    """Return 1 above the threshold, 0 below it, NaN where the value is."""
    if not isinstance(threshold, int | float):
        values, threshold = match_framework(values, as_array(threshold))
    xp = namespace(values)
    return xp.where(xp.isnan(values), values, xp.astype(values > threshold, values.dtype))
