"""Measures of the attention weights of some queries, computed from queries and keys.

They are for models whose fused attention returns no weights.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from rank_collapse.annotations import AnyArray
from rank_collapse.checks import check_numbers, check_whole, refuse, refuse_if
from rank_collapse.measures import documents
from rank_collapse.measures.arrays import (
    as_array,
    as_bools,
    as_floats,
    match_framework,
    namespace,
    where_it_lives,
)
from rank_collapse.measures.attention import (
    attention_entropy,
    first_column,
    largest_weight,
    sink_rate,
)


@where_it_lives
def attention_rows(
    q: AnyArray,
    k: AnyArray,
    *,
    rows: Any = None,
    layout: Literal["hnk", "nhk"] | None = None,
    mask: AnyArray | None = None,
    segments: AnyArray | None = None,
    num_segments: int | None = None,
    causal: bool = False,
    positions: AnyArray | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: AnyArray | None = None,
    sink: float = 0.3,
) -> dict[str, Float[AnyArray, "..."]]:
    """Measure the weights softmax(scale · q_i·k_j) of some queries i, exactly for these queries.

    With a soft cap c, as in Gemma 2, the weights are softmax(c tanh(scale · q_i·k_j / c)).

    Takes O(r m k) operations and O(h r m) memory for r queries and m keys. Means are over the
    measured queries that exist and may attend to a key.

    Args:
        q: Queries [..., h, n, k] as they enter the product, after rotation and norms.
        k: Keys [..., g, m, k]; g divides h, heads share keys in groups of neighbours.
        rows: Int [r], the queries to measure; None for all.
        layout: "nhk" for q [..., n, h, k] and k [..., m, g, k]; None for "hnk", as above, where
            shapes do not suggest the other.
        mask: Bool [m] or [b, m], the keys that exist, and where m = n the queries; None for all.
        segments: Int [n] or [..., n] of packed rows, where m = n: tokens with the same number form
            a document and attend to it alone; an example is then a document. Number 0 is a document
            like any other. If it marks padding, as in MaxText, pass mask=segments > 0.
        num_segments: The largest number of documents that exist in a row. It is needed where
            segments are traced: each row then has this many examples, NaN where it has fewer
            documents, and all are NaN where a row has more.
        causal: Whether query i attends only to the keys j ≤ p_i.
        positions: Int [n], p_i, the places of the queries among the keys; 0 to n − 1 where m = n.
            With a cache, m > n, None means the last n keys that the mask marks as existing.
        window: Queries attend only to keys less than this many places from p_i; None for all.
        scale: 1/√k by default.
        soft_cap: c above 0; None for none.
        sink: Weight on the first existing key above which a head counts in sink_rate.

    Returns:
        "attention_entropy", "largest_weight" and "first_column" [..., h], "sink_rate" [...], as in
        `MEASURES`; [documents, h] and [documents] with segments.

    Raises:
        ValueError: Shapes that do not fit each other; rows outside the queries; no `layout` where
            there are as many keys as queries and more heads; causal queries on a cache whose
            positions are unknown.
    """
    if window is not None:
        window = check_whole("window", window, 1)
    q, k = _arrange_heads(q, k, layout)
    *leading, _, n, d = q.shape
    m = k.shape[-2]
    exists = None if mask is None else match_framework(q, as_bools(mask))[1]
    refuse_if(
        exists is not None and tuple(exists.shape) not in ((m,), (*leading, m)),
        f"mask of shape {np.shape(mask)} is not of shape ({m},) or {(*leading, m)}: it marks the "
        "keys that exist; causal=, window= and segments= restrict which keys a query attends to",
    )
    if segments is not None:
        refuse_if(
            m != n or rows is not None or positions is not None,
            "segments= covers all tokens and excludes rows=, positions= and a cache",
        )
        segments = documents.join_rows(segments, n)
    refuse_if(num_segments is not None and segments is None, "num_segments= needs segments=")
    scale = d**-0.5 if scale is None else scale
    check_numbers("[-inf, inf]", scale=scale)
    if soft_cap is not None:
        check_numbers("(0, inf]", soft_cap=soft_cap)
    if num_segments is not None:
        options = {"causal": causal, "window": window, "scale": scale, "soft_cap": soft_cap}
        return _measure_by_document(q, k, segments, exists, num_segments, sink, options)
    if segments is not None:
        q, k, exists = _split_by_document(q, k, segments, mask)
        *leading, _, n, _ = q.shape
        m = n
    q, rows = match_framework(q, np.arange(n) if rows is None else _check_rows(rows, n))
    xp = namespace(q)
    keys = match_framework(q, np.ones(m, bool))[1] if exists is None else exists
    keys = xp.broadcast_to(keys[..., None, None, :], (*leading, 1, 1, m))
    allowed = xp.broadcast_to(keys, (*leading, 1, len(rows), m))
    if causal or window is not None:
        place = xp.take(_query_positions(q, positions, n, m, exists), rows, axis=-1)
        place = place.reshape((*place.shape[:-1], 1, len(rows), 1))
        distance = place - match_framework(q, np.arange(m))[1]
        allowed = allowed & _is_within(distance, causal, window)
    counted = xp.any(allowed, axis=-1)
    if m == n:
        counted = counted & xp.take(keys[..., 0, :], rows, axis=-1)
    p = _softmax_rows(q, k, rows, scale, soft_cap, allowed)
    return _measure_rows(p, counted, keys[..., 0, :], sink)


def _arrange_heads(q, k, layout):
    """Convert queries and keys to floats [..., h, n, k] and [..., g, m, k].

    Args:
        q, k, layout: See `attention_rows`.

    Raises:
        ValueError: Shapes that do not fit each other, or no layout where the shapes do not tell.
    """
    q, k = match_framework(as_floats(q), as_floats(k))
    refuse_if(
        min(q.ndim, k.ndim) < 3,
        f"q of shape {tuple(q.shape)} and k of {tuple(k.shape)} are not [..., h, n, k]",
    )
    refuse(
        (layout not in (None, "hnk", "nhk"), f"layout={layout!r} is not 'hnk' or 'nhk'"),
        (
            layout is None and q.shape[-3] > q.shape[-2] and q.shape[-2] == k.shape[-2],
            f"q of shape {tuple(q.shape)} has more heads than tokens: pass layout='hnk' for "
            "[..., h, n, k] or 'nhk' for [..., n, h, k]",
        ),
    )
    if layout == "nhk":
        q, k = namespace(q).moveaxis(q, -2, -3), namespace(k).moveaxis(k, -2, -3)
    *leading, h, _, d = q.shape
    *leading_k, g, _, d_k = k.shape
    refuse_if(
        leading != leading_k or h % g or d_k != d,
        f"q of shape {tuple(q.shape)} does not fit k of shape {tuple(k.shape)}",
    )
    return q, k


def _check_rows(rows, n):
    """Convert the indices of the queries to measure to an array, and check them.

    Raises:
        ValueError: They are not whole numbers [r] from 0 to n − 1.
    """
    rows = as_array(rows)
    refuse_if(
        rows.ndim != 1 or "int" not in str(rows.dtype),
        f"rows of shape {tuple(rows.shape)} and dtype {rows.dtype} are not indices of queries [r]",
    )
    if isinstance(rows, np.ndarray):
        refuse_if(
            not ((rows >= 0) & (rows < n)).all(),
            f"rows={rows} are not all from 0 to {n - 1}, the last query",
        )
    return rows


def _is_within(distance, causal, window):
    """Return whether a query may attend to a key at a distance p_i − j.

    Args:
        distance: Whole numbers.
        causal, window: See `attention_rows`; one of the two restricts the keys.
    """
    if window is None:
        return distance >= 0
    is_near = namespace(distance).abs(distance) < window
    return is_near & (distance >= 0) if causal else is_near


def _measure_rows(p, counted, keys, sink):
    """Measure weights.

    Args:
        p: [..., h, r, m].
        counted: Bool [..., 1 or h, r], the queries that count.
        keys: Bool [..., 1 or h, m], the keys that exist.
        sink: See `attention_rows`.
    """
    xp = namespace(p)
    counted = xp.broadcast_to(counted, p.shape[:-1])
    keys = xp.broadcast_to(keys, (*p.shape[:-2], p.shape[-1]))
    return {
        "attention_entropy": attention_entropy(p, mask=counted),
        "largest_weight": largest_weight(p, mask=counted),
        "first_column": first_column(p, mask=counted, key_mask=keys),
        "sink_rate": sink_rate(p, sink=sink, mask=counted, key_mask=keys),
    }


def _split_by_document(q, k, segments, mask):
    """Split (queries, keys [documents, heads, tokens, width], mask of existing tokens) by
    document."""
    q, k = q.reshape((-1, *q.shape[-3:])), k.reshape((-1, *k.shape[-3:]))
    packed = documents.split_documents(segments, mask, (len(q), q.shape[-2]))
    return packed.split_heads(q), packed.split_heads(k), match_framework(q, packed.exists)[1]


def _measure_by_document(q, k, segments, exists, num_segments, sink, options):
    """Measure packed rows whose documents may be traced.

    Args:
        q, k: [..., h, n, k] and [..., g, n, k].
        segments, num_segments, sink: See `attention_rows`.
        exists: Bool [n] or [..., n]; None for all.
        options: "causal", "window", "scale" and "soft_cap".
    """
    q, k = q.reshape((-1, *q.shape[-3:])), k.reshape((-1, *k.shape[-3:]))
    xp, (b, _, n, _) = namespace(q), q.shape
    exists = None if exists is None else exists.reshape((-1, n))
    numbers, are_too_many, num_segments = documents.number_documents(
        q, segments, exists, (b, n), num_segments
    )
    rows = match_framework(q, np.arange(n))[1]
    is_pair = (numbers[:, :, None] == numbers[:, None, :]) & (numbers >= 0)[:, None, :]
    # The place of a token in its document: how many of it come before
    before = is_pair & (rows[None, :] < rows[:, None])[None]
    place = xp.sum(before, axis=-1)
    distance = place[:, :, None] - place[:, None, :]
    allowed = is_pair
    if options["causal"] or options["window"] is not None:
        allowed = is_pair & _is_within(distance, options["causal"], options["window"])
    p = _softmax_rows(q, k, rows, options["scale"], options["soft_cap"], allowed[:, None])

    def measure_document(number):
        is_token = (numbers == number)[:, None]
        weights = xp.where(is_token[..., None], p, 0)
        return _measure_rows(weights, is_token, is_token, sink)

    values = documents.measure_documents(measure_document, q, num_segments)
    nan = float("nan")
    by_row = {name: xp.moveaxis(a, 0, 1).reshape((-1, *a.shape[2:])) for name, a in values.items()}
    return {name: xp.where(are_too_many, nan, a) for name, a in by_row.items()}


def _query_positions(q, positions, n, m, exists):
    """Find the places of the queries among the keys, Int [n] or [..., n].

    Args:
        q: Queries, which decide the framework.
        positions: The places, if they are known.
        n, m: Numbers of queries and keys.
        exists: Bool [..., m], the keys that exist; None for all.
    """
    xp = namespace(q)
    if positions is not None:
        refuse_if(
            np.shape(positions)[-1:] != (n,) or "int" not in str(as_array(positions).dtype),
            f"positions of shape {np.shape(positions)} are not {n} whole numbers, one for each "
            "query",
        )
        return match_framework(q, as_array(positions))[1]
    if m == n:
        return match_framework(q, np.arange(n))[1]
    refuse_if(
        exists is None,
        f"{n} queries have {m} keys: pass positions=, the places of the queries among the keys, or "
        "mask=, the keys that exist",
    )
    # A key's ordinal is the number of keys that exist up to it. Of c keys the last n have the
    # ordinals c − n + 1 to c; the first key of an ordinal is the one that exists.
    ordinals = xp.cumulative_sum(xp.astype(exists, xp.int32), axis=-1)
    last_ordinals = ordinals[..., -1:] - match_framework(q, np.arange(n - 1, -1, -1))[1]
    return xp.argmax(
        xp.astype(ordinals[..., None, :] == last_ordinals[..., None], xp.int32), axis=-1
    )


def _softmax_rows(q, k, rows, scale, soft_cap, allowed):
    """Compute the weights [..., h, r, m] of some queries over their keys.

    Args:
        q, k: Queries [..., h, n, k] and keys [..., g, m, k].
        rows: Int [r], the queries.
        scale, soft_cap: See `attention_rows`.
        allowed: Bool [..., 1, r, m], the keys that each may attend to.
    """
    xp = namespace(q)
    *leading, h, _, d = q.shape
    g, m = k.shape[-3:-1]
    scaled = scale * xp.take(q, rows, axis=-2)
    scaled = scaled.reshape((*leading, g, -1, d))  # a group's heads one after the other
    scores = (scaled @ xp.matrix_transpose(k)).reshape((*leading, h, len(rows), m))
    if soft_cap is not None:
        scores = soft_cap * xp.tanh(scores / soft_cap)
    scores = xp.where(allowed, scores, -xp.inf)
    exponentials = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    return exponentials / xp.sum(exponentials, axis=-1, keepdims=True)
