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
from jaxtyping import Array, Float

from rank_collapse.measures.arrays import (
    as_array,
    as_bools,
    as_floats,
    beside,
    known,
    namespace,
    on_host,
    where_it_lives,
)
from rank_collapse.measures.norms import mean_of
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import Each, run
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import Forward
from rank_collapse.network.walk import Layer
from rank_collapse.struct import refuse, refuse_if


@where_it_lives
def attention_entropy(attention: Any, *, mask: Any = None) -> Float[Any, "*s"]:
    """−Σ_j P_ij log P_ij in nats, its mean over the queries i: log m if uniform, 0 if one-hot.

    Args:
        attention: Weights [..., n, m]; `trace.attention` is [L, h, n, n].
        mask: Bool [n] or [b, n], the queries that exist; None for all.

    Returns:
        One value per matrix, [...].

    Raises:
        ValueError: Not matrices of weights, or a mask of another shape.
    """
    p, mask = _weights(attention, mask)
    xp = namespace(p)
    # Where p is 0 so is the product; a select in its place takes three times as long on a CPU.
    log = xp.log(xp.clip(p, xp.finfo(p.dtype).tiny, None))
    return mean_of(-xp.sum(p * log, axis=-1), mask)


@where_it_lives
def largest_weight(attention: Any, *, mask: Any = None) -> Float[Any, "*s"]:
    """max_j P_ij, its mean over the queries i: 1/m if uniform, 1 if one-hot.

    Arguments and shapes are those of `attention_entropy`.
    """
    p, mask = _weights(attention, mask)
    return mean_of(namespace(p).max(p, axis=-1), mask)


@where_it_lives
def saturated_share(attention: Any, threshold: Any = 0.99, *, mask: Any = None) -> Float[Any, "*s"]:
    """Share of the queries i with max_j P_ij > threshold.

    Args:
        attention, mask: As `attention_entropy` takes them.
        threshold: Largest weight from which a row counts as saturated.

    Returns:
        One value per matrix, [...].
    """
    p, mask = _weights(attention, mask)
    return mean_of(_above(namespace(p).max(p, axis=-1), threshold), mask)


@where_it_lives
def largest_column(attention: Any, *, mask: Any = None) -> Float[Any, "*s"]:
    """max_j mean_i P_ij, the share of attention on the most attended key.

    1/m if attention is uniform, 1/n if each query attends to itself, 1 if all attend to one key.

    Arguments and shapes are those of `attention_entropy`.
    """
    columns = _columns(*_weights(attention, mask))
    return namespace(columns).max(columns, axis=-1)


@where_it_lives
def first_column(attention: Any, *, mask: Any = None, key_mask: Any = None) -> Float[Any, "*s"]:
    """mean_i P_ij of the first key j that exists: its share of the attention.

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
    return _first(*_weights(attention, mask), key_mask)


@where_it_lives
def sink_rate(
    attention: Any, *, sink: Any = 0.3, mask: Any = None, key_mask: Any = None
) -> Float[Any, "*s"]:
    """Share of heads whose `first_column` is above `sink` (Gu et al. 2025, section 3).

    Args:
        attention: Weights [..., h, n, m].
        sink: The threshold ε.
        mask, key_mask: As `first_column` takes them.

    Returns:
        One value per layer, [...].

    Raises:
        ValueError: No axis of heads, or as `first_column`.
    """
    p, mask = _weights(attention, mask)
    refuse_if(p.ndim < 3, f"attention of shape {tuple(p.shape)} is not [..., h, n, m]")
    return _above(_first(p, mask, key_mask), sink).mean(axis=-1)


@where_it_lives
def largest_logit(scores: Any, *, mask: Any = None) -> Float[Any, "*s"]:
    """max_ij S_ij over the pairs that exist: what QK-clip holds below a threshold, head by head.

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
        s, mask = beside(s, as_bools(mask))
        mask = mask[:, None] & mask[None] if mask.ndim == 1 else mask
        refuse_if(
            mask.shape[-2:] != s.shape[-2:] or mask.ndim > s.ndim,
            f"mask of shape {mask.shape} does not fit scores of {s.shape}",
        )
        s = namespace(s).where(mask.reshape((1,) * (s.ndim - mask.ndim) + mask.shape), s, -np.inf)
    return namespace(s).max(s, axis=(-2, -1))


def _weights(attention, mask):
    """Attention of any framework in float32 at least, and its mask."""
    p = as_floats(attention)
    refuse_if(p.ndim < 2, f"attention of shape {tuple(p.shape)} is not [..., n, m]")
    if mask is not None:
        p, mask = beside(p, _of_each(mask, p.shape[:-1], "mask", "queries"))
    values = known(p)
    if values is not None:
        rows = values if mask is None else values[on_host(mask)]
        least, sums = rows.min(initial=0), rows.sum(axis=-1)
        # of bfloat16, whose weights are rounded to 2⁻⁹, among them
        off = np.abs(sums - 1).max(initial=0, where=~np.isnan(sums))
        if least < 0 or off > 0.02:
            wrong = (
                f"the weight {least:.3g}" if least < 0 else f"a row whose sum is {off:.3g} off 1"
            )
            raise ValueError(
                f"attention of shape {tuple(p.shape)} has {wrong}: expected weights after the "
                "softmax; exclude rows that do not exist with mask="
            )
    return p, mask


def _of_each(mask, shape, name, what):
    """A mask [n], [b, n], or with all leading axes, as Bool [..., b, h, n] of that shape."""
    mask, shape = as_bools(mask, name), tuple(shape)
    *_, length = shape
    by_example = (*shape[-3:-2], length), (*shape[:-2], length)
    refuse_if(
        mask.shape not in ((length,), *by_example, shape),
        f"{name} of shape {tuple(mask.shape)} does not fit {length} {what} of {shape}",
    )
    if mask.shape != shape and mask.ndim > 1:
        mask = mask[..., None, :]
    mask = mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)
    return namespace(mask).broadcast_to(mask, shape)


def _columns(p, mask):
    return mean_of(namespace(p).matrix_transpose(p), None if mask is None else mask[..., None, :])


def _first(p, mask, key_mask):
    columns = _columns(p, mask)
    chosen = columns[..., 0]
    if key_mask is not None:
        columns, key_mask = beside(columns, _of_each(key_mask, columns.shape, "key_mask", "keys"))
        chosen = _of_first(columns, key_mask)
    xp = namespace(columns)
    if key_mask is None and mask is not None and mask.shape == columns.shape:
        none_yet = xp.cumulative_sum(xp.astype(mask, xp.int32), axis=-1) == 0
        before = xp.sum(xp.where(none_yet, columns, 0), axis=-1)
        chosen = xp.where(before == 0, _of_first(columns, mask), chosen)
    # A row with a NaN is no distribution, whichever key it stands at.
    return xp.where(xp.any(xp.isnan(columns), axis=-1), xp.nan, chosen)


def _of_first(columns, exists):
    """Values [..., m] at the first key that exists."""
    xp = namespace(columns)
    first = xp.argmax(xp.astype(exists, xp.int32), axis=-1)[..., None]
    return xp.take_along_axis(columns, first, axis=-1)[..., 0]


def _above(values, threshold):
    """1 above the threshold, 0 below it, NaN where the value is."""
    if not isinstance(threshold, int | float):
        values, threshold = beside(values, as_array(threshold))
    xp = namespace(values)
    return xp.where(xp.isnan(values), values, xp.astype(values > threshold, values.dtype))


@full_precision
def attention_profile(
    params: TransformerParams, x: Any, config: TransformerConfig, **inputs: Any
) -> dict[str, Float[Array, "l h"]]:
    """Measures of every head's attention weights, means over the queries that exist.

    entropy          −Σ_j P_ij log P_ij in nats
    largest_weight   max_j P_ij
    largest_column   max_j mean_i P_ij, the key that gets most attention
    first_column     mean_i P_i1, the attention sink (Xiao et al. 2024); of the first token that
                     exists

    Args:
        params, x, config, **inputs: As in `rc.apply`; a mask [n] says which tokens exist.
    """
    params, prepared = prepare_inputs(params, x, config, **inputs)
    return run(Each(attention_measures), params, prepared, config)


def attention_measures(layer: Layer, x: Any, seen: Forward) -> dict[str, Float[Array, "h"]]:
    """The measures of one layer's heads: a measure of `passes.Each`."""
    weights, mask = seen.trace.attention, layer.inputs.token_mask
    return {
        "entropy": attention_entropy(weights, mask=mask),
        "largest_weight": largest_weight(weights, mask=mask),
        "largest_column": largest_column(weights, mask=mask),
        "first_column": first_column(weights, mask=mask, key_mask=mask),
    }


@where_it_lives
@full_precision
def attention_rows(
    q: Any,
    k: Any,
    *,
    rows: Any = None,
    layout: Literal["hnk", "nhk"] | None = None,
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
        layout: "nhk" for q [..., n, h, k] and k [..., m, g, k]; None for "hnk", as above, where
            shapes do not suggest the other.
        mask: Bool [m] or [b, m], the keys that exist, and where m = n the queries; None for all.
        causal: Whether query i attends to keys j ≤ i + m − n, of which a cache has the first m − n.
        window: Only keys less than so many positions from i + m − n; None for all.
        scale: 1/√k by default.
        sink: Weight of the first key that exists above which a head counts in sink_rate.

    Returns:
        "attention_entropy", "largest_weight" and "first_column" [..., h], "sink_rate" [...], of
        `MEASURES`.

    Raises:
        ValueError: Shapes that do not fit each other, rows that are not among the queries, or as
            many keys as queries and fewer than heads, without a layout.
    """
    q, k = beside(as_floats(q), as_floats(k))
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
