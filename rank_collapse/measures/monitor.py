"""A few scalars of one layer that show collapse coming, at little cost for every training step.

Axis letters: b leading axes as one, n tokens, d width, h heads, m keys.
"""

from collections.abc import Callable

from jaxtyping import Float

from rank_collapse.annotations import AnyArray, Number
from rank_collapse.checks import check_numbers, refuse_if
from rank_collapse.measures import documents, spikes
from rank_collapse.measures.arrays import (
    as_floats,
    broadcast_mask,
    is_jax_array,
    match_framework,
    namespace,
    where_it_lives,
)
from rank_collapse.measures.layer_measures import NEEDS_TWO_TOKENS, measure_states
from rank_collapse.measures.norms import exact_sum, num_tokens, safe_divide
from rank_collapse.measures.table import MEASURES

TOKEN_MEASURES = (
    "residual_ratio",
    "token_cosine",
    "participation_ratio",
    "stable_rank_bound",
    "bulk_ratio",
)
ATTENTION_MEASURES = ("attention_entropy", "largest_weight", "largest_column", "sink_rate")


@where_it_lives
def monitor(
    x: AnyArray,
    attention: AnyArray | None = None,
    *,
    mask: AnyArray | None = None,
    segments: AnyArray | None = None,
    num_segments: int | None = None,
    sink: float = 0.3,
    tokens: spikes.TokenKind = "raw",
    norm: Callable[[AnyArray], AnyArray] | None = None,
    exclude: spikes.Excluded | None = None,
    threshold: Number = spikes.SPIKE,
) -> dict[str, Float[AnyArray, ""]]:
    """Measure one layer's tokens and attention weights: scalars, means over leading axes and heads.

    `MEASURES` explains "residual_ratio", "token_cosine", "participation_ratio", "stable_rank_bound"
    and "bulk_ratio", and, with attention, "attention_entropy", "largest_weight", "largest_column"
    and "sink_rate". Further scalars:

    attention_entropy_least, attention_entropy_largest   over heads, of means over examples
    batch_residual_ratio, batch_effective_rank           of two examples or more, each pooled by the
                                                         mean of its tokens: collapse over the batch
    spiked     the share of examples whose residual ratio is of one token, see `Profile`
    left_out   with `exclude`, how many tokens

    Computed in float32 (float64 stays), on the device of the arrays, without singular values except
    for the pooled examples. A pure function: it works inside jit, scan, remat and vmap. Values that
    are not finite give NaN, not an error. Means leave out examples without a token; residual ratio
    and cosine also leave out examples with one token. They are NaN where all examples are left out.
    Cost: 2 n d min(n, d) operations for G, and n m per head for the attention.

    Args:
        x: Tokens [..., n, d] of any framework.
        attention: Weights [..., h, n, m] with the same leading axes; None for none.
        mask: Bool [n] or [..., n], the tokens that exist; None for all. Where m = n these are the
            keys, too, and the first key is the first one that exists; elsewhere it is key 0.
        segments: Int [n] or [..., n] of packed rows: tokens with the same number form a document,
            and an example is a document. Number 0 is a document like any other. If it marks
            padding, as in MaxText, pass mask=segments > 0.
        num_segments: The largest number of documents that a row holds. A compiled step, in which
            segments are traced, needs it; all scalars are NaN where a row has more. The cost is
            that of so many rows, one after the other.
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
    token_mask = mask
    if mask is not None:
        x, mask = broadcast_mask(x, mask, (*leading, n), "tokens")
        mask = mask.reshape((-1, n))
    arrays = {"x": x.reshape((-1, n, d)), "mask": mask}
    if attention is not None:
        arrays["p"] = _reshape_weights(x, as_floats(attention))
    if segments is not None:
        segments = documents.join_rows(segments, n)
    if segments is not None and num_segments is None:
        arrays = _split_by_document(arrays, segments, token_mask)
    refuse_if(num_segments is not None and segments is None, "num_segments= needs segments=")
    choice = {"tokens": tokens, "exclude": exclude, "threshold": threshold}
    if norm is not None:
        arrays["read"] = norm(arrays["x"])
    if num_segments is not None:
        return _measure_by_document(arrays, segments, num_segments, sink, choice)
    x, mask = arrays["x"], arrays["mask"]
    chosen, exists, left_out = spikes.choose_tokens(x, mask, arrays.pop("read", None), **choice)
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
    """Check that attention fits tokens x [..., n, d], and reshape it to weights [b, h, n, m].

    Args:
        x: The tokens.
        p: Attention [..., h, n, m].

    Raises:
        ValueError: Other leading axes, or another number of queries than tokens.
    """
    shape, expected = tuple(p.shape), tuple(x.shape)
    refuse_if(
        p.ndim < 3 or shape[:-3] != expected[:-2],
        f"attention of shape {shape} is not [..., h, n, m] with the leading axes of x "
        f"of {expected}",
    )
    refuse_if(
        shape[-2] != expected[-2],
        f"attention of shape {shape} has {shape[-2]} queries, but x has {expected[-2]} tokens",
    )
    return match_framework(x, p.reshape((-1, *shape[-3:])))[1]


def _split_by_document(arrays, segments, mask):
    """Split packed rows into documents: each becomes an example, padded to the longest.

    Args:
        arrays: "x" [b, n, d], and "p" [b, h, n, n] if there is attention.
        segments: Int [n] or [b, n], the number of each token's document.
        mask: See `monitor`.

    Returns:
        {"x": [documents, n, d], "mask": Bool [documents, n], and "p" if there is attention}.
    """
    x = arrays["x"]
    packed = documents.split_documents(segments, mask, tuple(x.shape[:2]))
    pieces = {"x": packed.split_tokens(x), "mask": match_framework(x, packed.exists)[1]}
    if "p" in arrays:
        pieces["p"] = packed.split_weights(arrays["p"])
    return pieces


def _measure_by_document(arrays, segments, num_segments, sink, choice):
    """Measure packed rows whose documents may be traced.

    Args:
        arrays: "x" [b, n, d]; "mask" [b, n] or None; "p" [b, h, n, n] if there is attention;
            "read", the input of the attention, if it is measured.
        segments, num_segments: See `monitor`.
        sink: See `monitor`.
        choice: Options of `spikes.choose_tokens`: "tokens", "exclude" and "threshold".
    """
    x, mask, read = arrays["x"], arrays["mask"], arrays.get("read")
    numbers, are_too_many, num_segments = documents.number_documents(
        x, segments, mask, tuple(x.shape[:2]), num_segments
    )
    xp = namespace(x)

    def measure_document(number):
        """Measure the documents with this number in all rows."""
        mask = numbers == number
        chosen, counted, left_out = spikes.choose_tokens(x, mask, read, **choice)
        pieces = {"x": chosen, "mask": mask, "counted": counted}
        if "p" in arrays:
            pieces["p"] = xp.where(mask[:, None, None, :], arrays["p"], 0)
            pieces["p"] = xp.where(mask[:, None, :, None], pieces["p"], 0)
        values = _measure_examples(pieces, sink)
        return values if left_out is None else values | {"left_out": left_out}

    by_document = documents.measure_documents(measure_document, x, num_segments)
    values = {name: a.reshape((-1, *a.shape[2:])) for name, a in by_document.items()}
    left_out = values.pop("left_out", None)
    scalars = _average_examples(values)
    if left_out is not None:
        scalars["left_out"] = left_out.sum()
    return {name: xp.where(are_too_many, xp.nan, a) for name, a in scalars.items()}


def _measure_layer(arrays, sink):
    """Measure one layer: means over the examples that have enough tokens.

    Args:
        arrays: "x" [b, n, d]; "mask" and "counted" [b, n] or None, the tokens that exist and
            those that are measured; "p" [b, h, n, m] if there is attention.
        sink: See `monitor`.
    """
    return _average_examples(_measure_examples(arrays, sink))


def _measure_examples(arrays, sink):
    """Measure each example, see `_measure_layer`.

    Returns:
        {name: [b] or [b, h]}; also "pooled" [b, d], the mean of an example's tokens, "num_tokens"
        [b], how many exist, and "num_counted" [b], how many are measured.
    """
    x, mask, counted = arrays["x"], arrays["mask"], arrays["counted"]
    xp, values = namespace(x), measure_states(TOKEN_MEASURES, x, counted)
    values["spiked"] = xp.astype(values["spiked"], x.dtype)
    values["num_counted"], values["num_tokens"] = num_tokens(x, counted), num_tokens(x, mask)
    summed = x if counted is None else xp.where(counted[..., None], x, 0)
    values["pooled"] = safe_divide(exact_sum(summed, -2), values["num_counted"][..., None], 0)
    if "p" in arrays:
        key_mask = mask if arrays["p"].shape[-1] == x.shape[-2] else None
        for name in ATTENTION_MEASURES:
            options = {"sink": sink, "key_mask": key_mask} if name == "sink_rate" else {}
            values[name] = MEASURES[name](arrays["p"], mask=mask, **options)
    return values


def _average_examples(values):
    """Average the results of `_measure_examples`, and measure the examples among each other."""
    pooled, num_counted, num_existing = (
        values.pop(name) for name in ("pooled", "num_counted", "num_tokens")
    )
    xp, scalars = namespace(pooled), {}
    for name, a in values.items():
        is_attention = name in ATTENTION_MEASURES
        least = 2 if name in (*NEEDS_TWO_TOKENS, "spiked") else 1
        count = num_existing if is_attention else num_counted
        by_example = a.mean(axis=-1) if a.ndim > 1 else a
        scalars[name] = _mean_over_examples(by_example, count, least)
        if name == "attention_entropy":
            by_head = _mean_over_examples(a, count)
            scalars["attention_entropy_least"] = xp.min(by_head)
            scalars["attention_entropy_largest"] = xp.max(by_head)
    if len(pooled) > 1:
        batch = measure_states(("residual_ratio", "effective_rank"), pooled, num_counted > 0)
        for name in ("residual_ratio", "effective_rank"):
            scalars[f"batch_{name}"] = batch[name]
    return scalars


def _mean_over_examples(values, count, least=1):
    """Average values [b, ...] over the examples with enough tokens; NaN if there are none.

    Args:
        values: One value for each example, with further axes.
        count: Number of tokens of each, [b].
        least: Smallest number of tokens that is enough.
    """
    xp = namespace(values)
    is_enough = (count >= least).reshape((-1,) + (1,) * (values.ndim - 1))
    return safe_divide(xp.sum(xp.where(is_enough, values, 0), axis=0), xp.sum(is_enough, axis=0))
