"""A few scalars of one layer that show collapse coming, at little cost for every training step.

Axis letters: b leading axes as one, n tokens, d width, h heads, m keys.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from rank_collapse.measures import documents, spikes
from rank_collapse.measures.arrays import (
    as_floats,
    broadcast_mask,
    is_jax_array,
    match_framework,
    namespace,
    on_host,
    where_it_lives,
)
from rank_collapse.measures.norms import exact_sum, num_tokens, safe_divide
from rank_collapse.measures.profiles import NEEDS_TWO_TOKENS, measure_states
from rank_collapse.measures.table import MEASURES
from rank_collapse.struct import check_numbers, refuse_if

TOKENS = (
    "residual_ratio",
    "token_cosine",
    "participation_ratio",
    "stable_rank_bound",
    "bulk_ratio",
)
ATTENTION = ("attention_entropy", "largest_weight", "largest_column", "sink_rate")


@where_it_lives
def monitor(
    x: Any,
    attention: Any = None,
    *,
    mask: Any = None,
    segments: Any = None,
    sink: float = 0.3,
    tokens: spikes.TokenKind = "raw",
    norm: Callable[[Any], Any] | None = None,
    exclude: spikes.Excluded | None = None,
    threshold: float = spikes.SPIKE,
) -> dict[str, Float[Any, ""]]:
    """Measure one layer's tokens and attention weights: scalars, means over leading axes and heads.

    `MEASURES` says what they mean: "residual_ratio", "token_cosine", "participation_ratio",
    "stable_rank_bound" and "bulk_ratio"; with attention also "attention_entropy", "largest_weight",
    "largest_column" and "sink_rate". Further scalars:

    attention_entropy_least, attention_entropy_largest   over heads, of means over examples
    batch_residual_ratio, batch_effective_rank           of two examples or more, each pooled by the
                                                         mean of its tokens: collapse over the batch
    spiked     the share of examples whose residual ratio is of one token, see `Profile`
    left_out   with `exclude`, how many tokens

    Computed in float32 (float64 stays), where the arrays are, without singular values but those of
    the pooled examples. A pure function: it works inside jit, scan, remat and vmap. Values that are
    not finite give NaN, not an error. Means leave out examples without a token, and residual ratio
    and cosine also those of one token; NaN where all are left out.
    Cost: 2 n d min(n, d) operations for G, and n m per head for the attention.

    Args:
        x: Tokens [..., n, d] of any framework.
        attention: Weights [..., h, n, m] with the same leading axes; None for none.
        mask: Bool [n] or [..., n], the tokens that exist; None for all. Where m = n they are the
            keys too, and the first key is the first that exists; elsewhere it is key 0.
        segments: Int [n] or [..., n] of packed rows: tokens of one number are a document, and an
            example is a document, see `documents.split_documents`.
        sink: Weight of the first key above which a head counts as a sink.
        tokens: "raw", as they are; "unit", x_i/|x_i|; "read", what attention reads, N(x).
        norm: N of "read", a function of x.
        exclude, threshold: "spikes" leaves out tokens longer than `threshold` times the median.

    Returns:
        Scalars by name.

    Raises:
        ValueError: Shapes that do not fit each other, or fewer than two tokens.
    """
    check_numbers("[0, 1]", sink=sink)
    x = as_floats(x)
    refuse_if(
        x.ndim < 2 or x.shape[-2] < 2,
        f"x of shape {tuple(x.shape)} is not [..., n, d] with two tokens or more",
    )
    *leading, n, d = x.shape
    if mask is not None:
        x, mask = broadcast_mask(x, mask, (*leading, n), "tokens")
        mask = mask.reshape((-1, n))
    arrays = {"x": x.reshape((-1, n, d)), "mask": mask}
    if attention is not None:
        arrays["p"] = _reshape_weights(x, as_floats(attention))
    if segments is not None:
        arrays = _split_by_document(arrays, segments)
    x, mask = arrays["x"], arrays["mask"]
    choice = {"tokens": tokens, "exclude": exclude, "threshold": threshold}
    read = None if norm is None else norm(x)
    chosen, exists, left_out = spikes.choose_tokens(x, mask, read, **choice)
    arrays |= {"x": chosen, "counted": exists}
    if is_jax_array(x):
        from rank_collapse.measures import on_jax

        scalars = on_jax.compile_function(_measure_layer)(arrays, sink)
    else:
        scalars = _measure_layer(arrays, sink)
    if left_out is not None:
        scalars["left_out"] = left_out.sum()
    return scalars


def _reshape_weights(x, p):
    """Reshape attention to weights [b, h, n, m] of tokens [..., n, d]."""
    shape, expected = tuple(p.shape), tuple(x.shape)
    refuse_if(
        p.ndim < 3 or shape[:-3] != expected[:-2],
        f"attention of shape {shape} is not [..., h, n, m] beside x of {expected}",
    )
    refuse_if(
        shape[-2] != expected[-2], f"attention of shape {shape} has not {expected[-2]} queries"
    )
    return match_framework(x, p.reshape((-1, *shape[-3:])))[1]


def _split_by_document(arrays, segments):
    """Split the arrays, an example for each document."""
    x, mask = arrays["x"], arrays["mask"]
    segments = segments if np.ndim(segments) == 1 else np.reshape(on_host(segments), x.shape[:2])
    packed = documents.split_documents(segments, mask, tuple(x.shape[:2]))
    pieces = {"x": packed.split_tokens(x), "mask": match_framework(x, packed.exists)[1]}
    if "p" in arrays:
        pieces["p"] = packed.split_weights(arrays["p"])
    return pieces


def _measure_layer(arrays, sink):
    """Measure one layer: means over the examples that have enough tokens.

    Args:
        arrays: "x" [b, n, d]; "mask" and "counted" [b, n] or None, the tokens that exist and
            those that are measured; "p" [b, h, n, m] if there is attention.
        sink: As `monitor` takes it.
    """
    x, mask, counted = arrays["x"], arrays["mask"], arrays["counted"]
    values = measure_states(TOKENS, x, counted)
    values["spiked"] = namespace(x).astype(values["spiked"], x.dtype)
    min_tokens = dict.fromkeys((*NEEDS_TWO_TOKENS, "spiked"), 2)
    scalars = {
        name: _mean_over_examples(a, counted, min_tokens.get(name, 1)) for name, a in values.items()
    }
    if len(x) > 1:
        scalars |= _measure_batch(x, counted)
    if "p" in arrays:
        scalars |= _measure_attention(arrays["p"], mask, x.shape[-2], sink)
    return scalars


def _measure_batch(x, mask):
    """Measure the examples, each pooled by the mean of its tokens."""
    xp, count = namespace(x), num_tokens(x, mask)
    x = x if mask is None else xp.where(mask[..., None], x, 0)
    pooled = safe_divide(exact_sum(x, -2), count[..., None], 0)
    values = measure_states(("residual_ratio", "effective_rank"), pooled, count > 0)
    return {f"batch_{name}": values[name] for name in ("residual_ratio", "effective_rank")}


def _measure_attention(p, mask, num_tokens, sink):
    """Measure attention: means over examples and heads, and the extreme heads' entropies.

    Args:
        p: Weights [b, h, n, m].
        mask: Bool [b, n]; None for all.
        num_tokens: n.
        sink: As `monitor` takes it.
    """
    scalars = {}
    key_mask = mask if p.shape[-1] == num_tokens else None
    for name in ATTENTION:
        options = {"sink": sink, "key_mask": key_mask} if name == "sink_rate" else {}
        values = MEASURES[name](p, mask=mask, **options)
        by_example = values.mean(axis=-1) if values.ndim > 1 else values
        scalars[name] = _mean_over_examples(by_example, mask)
        if name == "attention_entropy":
            xp, by_head = namespace(values), _mean_over_examples(values, mask)
            scalars["attention_entropy_least"] = xp.min(by_head)
            scalars["attention_entropy_largest"] = xp.max(by_head)
    return scalars


def _mean_over_examples(values, mask, min_tokens=1):
    """Average values [b, ...] over the examples in which enough tokens exist.

    Args:
        values: One for each example, and more axes.
        mask: Bool [b, n]; None for all.
        min_tokens: How many tokens are enough.
    """
    if mask is None:
        return values.mean(axis=0)
    xp = namespace(values)
    is_enough = (xp.sum(mask, axis=-1) >= min_tokens).reshape((-1,) + (1,) * (values.ndim - 1))
    return safe_divide(xp.sum(xp.where(is_enough, values, 0), axis=0), xp.sum(is_enough, axis=0))
