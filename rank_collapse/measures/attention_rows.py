"""Measures of some rows of attention, for models whose fused attention never has the weights."""

from typing import Any

import numpy as np
from jaxtyping import Float

from rank_collapse.measures.arrays import (
    as_array,
    as_bools,
    as_floats,
    beside,
    namespace,
    where_it_lives,
)
from rank_collapse.measures.attention import (
    attention_entropy,
    first_column,
    largest_weight,
    sink_rate,
)
from rank_collapse.network.precision import full_precision


@where_it_lives
@full_precision
def attention_rows(
    q: Any,
    k: Any,
    *,
    rows: Any = None,
    mask: Any = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    sink: float = 0.3,
) -> dict[str, Float[Any, "..."]]:
    """Measures of the weights softmax(scale · q_i·k_j) of some queries i, exact for these.

    In O(r m k) operations and O(h r m) memory for r queries and m keys. Means over those of the
    queries that exist and may attend to a key.

    Args:
        q: Queries [..., h, n, k] as they enter the product, after rotation and norms.
        k: Keys [..., g, m, k]; g divides h, heads share keys in groups of neighbours.
        rows: Int [r], positions of the queries to measure; None for all.
        mask: Bool [m] or [b, m], the keys that exist, and where m = n the queries; None for all.
        causal: Whether query i attends to keys j ≤ i + m − n, of which a cache has the first m − n.
        window: Only keys less than so many positions from i + m − n; None for all.
        scale: 1/√k by default.
        sink: Weight of the first key that exists above which a head counts in sink_rate.

    Returns:
        "attention_entropy", "largest_weight" and "first_column" [..., h], "sink_rate" [...], of
        `MEASURES`.

    Raises:
        ValueError: Shapes that do not fit each other, or rows that are not among the queries.
    """
    q, k = beside(as_floats(q), as_floats(k))
    xp, (*leading, h, n, d), (*others, g, m, _) = namespace(q), q.shape, k.shape
    if leading != others or h % g or k.shape[-1] != d:
        raise ValueError(f"q of shape {tuple(q.shape)} does not fit k of shape {tuple(k.shape)}")
    rows = np.arange(n) if rows is None else as_array(rows)
    if isinstance(rows, np.ndarray) and not ((rows >= 0) & (rows < n)).all():
        raise ValueError(f"rows={rows} are not all among the {n} queries")
    q, rows = beside(q, rows)
    scale = d**-0.5 if scale is None else scale
    shown = scale * xp.take(q, rows, axis=-2)
    shown = shown.reshape((*leading, g, -1, d))  # a group's heads one after the other
    scores = (shown @ xp.matrix_transpose(k)).reshape((*leading, h, len(rows), m))
    place, key = (rows + (m - n))[:, None], beside(q, np.arange(m)[None])[1]
    there = (key <= place) if causal else (key == key) & (place == place)
    if window is not None:
        there = there & (key > place - window) & (key < place + window)
    exists = beside(q, np.ones(m, bool))[1] if mask is None else beside(q, as_bools(mask))[1]
    keys = xp.broadcast_to(exists[..., None, None, :], (*leading, 1, 1, m))
    there = xp.broadcast_to(there, (*leading, 1, *there.shape)) & keys
    counted = xp.any(there, axis=-1)
    if m == n:
        counted = counted & xp.take(keys[..., 0, :], rows, axis=-1)
    scores = xp.where(there, scores, -xp.inf)
    size = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    p = size / xp.sum(size, axis=-1, keepdims=True)
    counted = xp.broadcast_to(counted, p.shape[:-1])
    keys = xp.broadcast_to(keys[..., 0, :], (*leading, h, m))
    return {
        "attention_entropy": attention_entropy(p, mask=counted),
        "largest_weight": largest_weight(p, mask=counted),
        "first_column": first_column(p, mask=counted, key_mask=keys),
        "sink_rate": sink_rate(p, sink=sink, mask=counted, key_mask=keys),
    }
