"""Measures of attention weights: entropy, largest weights, saturated rows, sinks.

Where one weight p of a row is near 1 the softmax's Jacobian diag(P) − PPᵀ, whose entries are at
most 1 − p off that weight and p(1 − p) on it, is near 0, and so is what flows back to the scores.

Every measure takes weights [..., n, m] of NumPy, JAX or torch, each row a distribution, and a mask
of the queries that exist, of which means are taken; NaN where there is none. A mask is Bool [n], or
[b, n] of weights [..., b, h, n, m], or has all leading axes, those of heads or not. Rows of
weights that are negative or do not sum to 1, as logits, are refused where the values are known (not
inside jit and vmap); NaN stays NaN. Keys that a mask leaves out have weight 0 and add nothing.
`attention_rows` is for models whose fused attention never has the weights.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from rank_collapse.measures import documents
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
from rank_collapse.struct import refuse, refuse_if


@where_it_lives
def attention_entropy(
    attention: Any, *, mask: Any = None, missing_key: bool = False
) -> Float[Any, "*s"]:
    """Compute the entropy −Σ_j P_ij log P_ij in nats, its mean over the queries i.

    It is log m if attention is uniform, 0 if it is one-hot.

    Args:
        attention: Weights [..., n, m]; `trace.attention` is [L, h, n, n].
        mask: Bool [n] or [b, n], the queries that exist; None for all.
        missing_key: Whether what a row lacks to 1 is the weight of one key more, as of a learned
            sink beside the keys (gpt-oss, or softmax with 1 added to its sum).

    Returns:
        One value per matrix, [...].

    Raises:
        ValueError: Not matrices of weights, or a mask of another shape.
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
def largest_weight(attention: Any, *, mask: Any = None) -> Float[Any, "*s"]:
    """Compute max_j P_ij, its mean over the queries i: 1/m if uniform, 1 if one-hot.

    Args:
        attention, mask: As `attention_entropy` takes them.

    Returns:
        One value per matrix, [...].
    """
    p, mask = _check_weights(attention, mask)
    return masked_mean(namespace(p).max(p, axis=-1), mask)


@where_it_lives
def saturated_share(attention: Any, threshold: Any = 0.99, *, mask: Any = None) -> Float[Any, "*s"]:
    """Compute the share of the queries i with max_j P_ij > threshold.

    Args:
        attention, mask: As `attention_entropy` takes them.
        threshold: Largest weight from which a row counts as saturated.

    Returns:
        One value per matrix, [...].
    """
    p, mask = _check_weights(attention, mask)
    return masked_mean(_exceeds(namespace(p).max(p, axis=-1), threshold), mask)


@where_it_lives
def largest_column(attention: Any, *, mask: Any = None) -> Float[Any, "*s"]:
    """Compute max_j mean_i P_ij, the share of attention on the most attended key.

    It is 1/m if attention is uniform, 1/n if each query attends to itself, 1 if all attend to one
    key.

    Args:
        attention, mask: As `attention_entropy` takes them.

    Returns:
        One value per matrix, [...].
    """
    columns = _column_means(*_check_weights(attention, mask))
    return namespace(columns).max(columns, axis=-1)


@where_it_lives
def first_column(attention: Any, *, mask: Any = None, key_mask: Any = None) -> Float[Any, "*s"]:
    """Compute mean_i P_ij of the first key j that exists: its share of the attention.

    Args:
        attention, mask: As `attention_entropy` takes them.
        key_mask: Bool [m] or [b, m], the keys that exist. None for all, but for padding on the
            left: where there are as many keys as queries, and no query attends to a key before the
            first query that exists, that query's key is the first.

    Returns:
        One value per matrix, [...].

    Raises:
        ValueError: As `attention_entropy`, or a key_mask of another shape.
    """
    return _first_column_share(*_check_weights(attention, mask), key_mask)


@where_it_lives
def sink_rate(
    attention: Any, *, sink: Any = 0.3, mask: Any = None, key_mask: Any = None
) -> Float[Any, "*s"]:
    """Compute the share of heads whose `first_column` is above `sink` (Gu et al. 2025, section 3).

    Args:
        attention: Weights [..., h, n, m].
        sink: The threshold ε.
        mask, key_mask: As `first_column` takes them.

    Returns:
        One value per layer, [...].

    Raises:
        ValueError: No axis of heads, or as `first_column`.
    """
    p, mask = _check_weights(attention, mask)
    refuse_if(p.ndim < 3, f"attention of shape {tuple(p.shape)} is not [..., h, n, m]")
    return _exceeds(_first_column_share(p, mask, key_mask), sink).mean(axis=-1)


@where_it_lives
def largest_logit(scores: Any, *, mask: Any = None) -> Float[Any, "*s"]:
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
    """Convert attention to floats, with its mask, and refuse what is no distribution."""
    p = as_floats(attention)
    refuse_if(p.ndim < 2, f"attention of shape {tuple(p.shape)} is not [..., n, m]")
    if mask is not None:
        p, mask = match_framework(p, _broadcast_row_mask(mask, p.shape[:-1], "mask", "queries"))
    values = host_values_or_none(p)
    if values is not None:
        rows = values if mask is None else values[on_host(mask)]
        least, off = rows.min(initial=0), rows.sum(axis=-1) - 1
        off = off if missing_key else np.abs(off)
        # of bfloat16, whose weights are rounded to 2⁻⁹, among them
        off = off.max(initial=0, where=~np.isnan(off))
        wrong = f"the weight {least:.3g}" if least < 0 else f"a row whose sum is {off:.3g} off 1"
        refuse_if(
            least < 0 or off > 0.02,
            f"attention of shape {tuple(p.shape)} has {wrong}: expected weights after the softmax; "
            "exclude rows that do not exist with mask=, and see missing_key= of attention_entropy",
        )
    return p, mask


def _broadcast_row_mask(mask, shape, name, subject):
    """Broadcast a mask [n], [b, n], or with all leading axes, to Bool [..., b, h, n].

    Args:
        mask: Of the rows that exist.
        shape: [..., b, h, n].
        name, subject: What the message calls the mask and its rows.
    """
    mask, shape = as_bools(mask, name), tuple(shape)
    *_, length = shape
    by_example = (*shape[-3:-2], length), (*shape[:-2], length)
    refuse_if(
        mask.shape not in ((length,), *by_example, shape),
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
    columns = _column_means(p, mask)
    chosen = columns[..., 0]
    if key_mask is not None:
        columns, key_mask = match_framework(
            columns, _broadcast_row_mask(key_mask, columns.shape, "key_mask", "keys")
        )
        chosen = _take_first_key(columns, key_mask)
    xp = namespace(columns)
    if key_mask is None and mask is not None and mask.shape == columns.shape:
        none_yet = xp.cumulative_sum(xp.astype(mask, xp.int32), axis=-1) == 0
        before = xp.sum(xp.where(none_yet, columns, 0), axis=-1)
        chosen = xp.where(before == 0, _take_first_key(columns, mask), chosen)
    # A row with a NaN is no distribution, whichever key it stands at.
    return xp.where(xp.any(xp.isnan(columns), axis=-1), xp.nan, chosen)


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


@where_it_lives
def attention_rows(
    q: Any,
    k: Any,
    *,
    rows: Any = None,
    layout: Literal["hnk", "nhk"] | None = None,
    mask: Any = None,
    segments: Any = None,
    causal: bool = False,
    positions: Any = None,
    window: int | None = None,
    scale: float | None = None,
    sink: float = 0.3,
) -> dict[str, Float[Any, "..."]]:
    """Measure the weights softmax(scale · q_i·k_j) of some queries i, exact for these.

    In O(r m k) operations and O(h r m) memory for r queries and m keys. Means over those of the
    queries that exist and may attend to a key.

    Args:
        q: Queries [..., h, n, k] as they enter the product, after rotation and norms.
        k: Keys [..., g, m, k]; g divides h, heads share keys in groups of neighbours.
        rows: Int [r], which of the queries to measure; None for all.
        layout: "nhk" for q [..., n, h, k] and k [..., m, g, k]; None for "hnk", as above, where
            shapes do not suggest the other.
        mask: Bool [m] or [b, m], the keys that exist, and where m = n the queries; None for all.
        segments: Int [n] or [..., n] of packed rows, where m = n: tokens of one number are a
            document and attend to it alone. An example is then a document, see
            `documents.split_documents`.
        causal: Whether query i attends to the keys j ≤ p_i alone.
        positions: Int [n], p_i, the places of the queries among the keys; 0 to n − 1 where m = n.
            With a cache, m > n, None takes the last n keys that the mask lets exist.
        window: Only keys less than so many places from p_i; None for all.
        scale: 1/√k by default.
        sink: Weight of the first key that exists above which a head counts in sink_rate.

    Returns:
        "attention_entropy", "largest_weight" and "first_column" [..., h], "sink_rate" [...], of
        `MEASURES`; [documents, h] and [documents] with segments.

    Raises:
        ValueError: Shapes that do not fit each other, rows that are not among the queries, as many
            keys as queries and fewer than heads without a layout, or causal queries on a cache
            whose places are not known.
    """
    q, k = match_framework(as_floats(q), as_floats(k))
    refuse(
        (layout not in (None, "hnk", "nhk"), f"layout={layout!r} is not 'hnk' or 'nhk'"),
        (
            layout is None and q.shape[-3] > q.shape[-2] == k.shape[-2],
            f"q of shape {tuple(q.shape)} has more heads than tokens: say layout='hnk' for "
            "[..., h, n, k] or 'nhk' for [..., n, h, k]",
        ),
    )
    if layout == "nhk":
        q, k = (namespace(a).moveaxis(a, -2, -3) for a in (q, k))
    (*leading, h, n, d), (*leading_k, g, m, d_k) = q.shape, k.shape
    refuse_if(
        leading != leading_k or h % g or d_k != d,
        f"q of shape {tuple(q.shape)} does not fit k of shape {tuple(k.shape)}",
    )
    exists = None if mask is None else match_framework(q, as_bools(mask))[1]
    refuse_if(
        exists is not None and tuple(exists.shape) not in ((m,), (*leading, m)),
        f"mask of shape {np.shape(mask)} is not one of keys, ({m},) or {(*leading, m)}; which keys "
        "a query may attend to say causal=, window= and segments=",
    )
    if segments is not None:
        refuse_if(
            m != n or rows is not None or positions is not None,
            "segments= is of all tokens: without rows=, positions= and a cache",
        )
        q, k, exists = _split_by_document(q, k, segments, exists)
        *leading, h, n, d = q.shape
        m = n
    rows = np.arange(n) if rows is None else as_array(rows)
    if isinstance(rows, np.ndarray):
        refuse_if(
            not ((rows >= 0) & (rows < n)).all(), f"rows={rows} are not all among the {n} queries"
        )
    q, rows = match_framework(q, rows)
    xp = namespace(q)
    keys = match_framework(q, np.ones(m, bool))[1] if exists is None else exists
    keys = xp.broadcast_to(keys[..., None, None, :], (*leading, 1, 1, m))
    allowed = xp.broadcast_to(keys, (*leading, 1, len(rows), m))
    if causal or window is not None:
        place = xp.take(_query_positions(q, positions, n, m, exists), rows, axis=-1)
        place = place.reshape((*place.shape[:-1], 1, len(rows), 1))
        key = match_framework(q, np.arange(m))[1]
        allowed = allowed & (key <= place) if causal else allowed
        if window is not None:
            allowed = allowed & (key > place - window) & (key < place + window)
    counted = xp.any(allowed, axis=-1)
    if m == n:
        counted = counted & xp.take(keys[..., 0, :], rows, axis=-1)
    p = _softmax_rows(q, k, rows, d**-0.5 if scale is None else scale, allowed)
    counted = xp.broadcast_to(counted, p.shape[:-1])
    keys = xp.broadcast_to(keys[..., 0, :], (*leading, h, m))
    return {
        "attention_entropy": attention_entropy(p, mask=counted),
        "largest_weight": largest_weight(p, mask=counted),
        "first_column": first_column(p, mask=counted, key_mask=keys),
        "sink_rate": sink_rate(p, sink=sink, mask=counted, key_mask=keys),
    }


def _split_by_document(q, k, segments, exists):
    """Split (queries, keys [documents, heads, tokens, width], which tokens exist)."""
    xp, n = namespace(q), q.shape[-2]
    q, k = (a.reshape((-1, *a.shape[-3:])) for a in (q, k))
    shape = (len(q), n)
    segments = segments if np.ndim(segments) == 1 else np.reshape(on_host(segments), shape)
    exists = None if exists is None else xp.broadcast_to(exists, shape)
    packed = documents.split_documents(segments, exists, shape)
    return packed.split_heads(q), packed.split_heads(k), match_framework(q, packed.exists)[1]


def _query_positions(q, positions, n, m, exists):
    """Find where the queries stand among the keys, Int [n] or [..., n].

    Args:
        q: Decides the framework.
        positions: The places, if they are known.
        n, m: Numbers of queries and keys.
        exists: Bool [..., m], the keys that exist; None for all.
    """
    xp = namespace(q)
    if positions is not None:
        refuse_if(
            np.shape(positions)[-1:] != (n,),
            f"positions of shape {np.shape(positions)} are not those of {n} queries",
        )
        return match_framework(q, as_array(positions))[1]
    if m == n:
        return match_framework(q, np.arange(n))[1]
    refuse_if(
        exists is None,
        f"{n} queries of {m} keys: say positions=, the places of the queries among the keys, or "
        "mask=, the keys that exist",
    )
    # The number of keys up to each; the last n that exist have the numbers count − n + 1 to count.
    number = xp.cumulative_sum(xp.astype(exists, xp.int32), axis=-1)
    wanted = number[..., -1:] - match_framework(q, np.arange(n - 1, -1, -1))[1]
    return xp.argmax(xp.astype(number[..., None, :] == wanted[..., None], xp.int32), axis=-1)


def _softmax_rows(q, k, rows, scale, allowed):
    """Compute the weights [..., h, r, m] of some queries over their keys.

    Args:
        q, k: Queries [..., h, n, k] and keys [..., g, m, k].
        rows: Int [r], the queries.
        scale: Factor of the scores.
        allowed: Bool [..., 1, r, m], the keys that each may attend to.
    """
    xp, (*leading, h, _, d), (g, m) = namespace(q), q.shape, k.shape[-3:-1]
    chosen = scale * xp.take(q, rows, axis=-2)
    chosen = chosen.reshape((*leading, g, -1, d))  # a group's heads one after the other
    scores = (chosen @ xp.matrix_transpose(k)).reshape((*leading, h, len(rows), m))
    scores = xp.where(allowed, scores, -xp.inf)
    size = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    return size / xp.sum(size, axis=-1, keepdims=True)
