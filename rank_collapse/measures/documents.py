"""Documents in packed rows: several texts in one example that do not attend to each other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rank_collapse.annotations import AnyArray
from rank_collapse.checks import check_whole, refuse_if
from rank_collapse.measures.arrays import (
    as_array,
    as_bools,
    host_values_or_none,
    is_jax_array,
    is_traced,
    match_framework,
    namespace,
    on_host,
)


class Documents(NamedTuple):
    """Positions of the tokens of each document: k documents, n tokens in the longest.

    Attributes:
        row: Int [k, 1], the example.
        place: Int [k, n], the tokens in it.
        exists: Bool [k, n]; shorter documents are padded at the end.
    """

    row: np.ndarray
    place: np.ndarray
    exists: np.ndarray

    def _match_indices(self, x):
        """Return `row` and `place` as arrays of the framework of x."""
        return match_framework(x, self.row)[1], match_framework(x, self.place)[1]

    def split_tokens(self, x: AnyArray) -> AnyArray:
        """Split tokens [..., b, n, d] into [..., k, n, d]."""
        row, place = self._match_indices(x)
        return x[..., row, place, :]

    def split_heads(self, q: AnyArray) -> AnyArray:
        """Split queries or keys of heads [..., b, h, n, d] into [..., k, h, n, d]."""
        row, place = self._match_indices(q)
        xp = namespace(q)
        return xp.moveaxis(xp.moveaxis(q, -3, -2)[..., row, place, :, :], -2, -3)

    def split_weights(self, p: AnyArray) -> AnyArray:
        """Split attention weights [..., b, h, n, n] into [..., k, h, n, n]."""
        xp = namespace(p)
        row, place = self._match_indices(p)
        pairs = xp.moveaxis(p, -3, -1)[..., row[:, None], place[:, :, None], place[:, None, :], :]
        exists = match_framework(p, self.exists)[1]
        return xp.where(exists[:, None, None, :], xp.moveaxis(pairs, -1, -3), 0)


def join_rows(segments: AnyArray, n: int) -> AnyArray:
    """Return segments [..., n] of packed rows as [b, n]; those of another shape as they are, which
    `split_documents` and `number_documents` refuse.

    Args:
        segments: The numbers of the documents.
        n: Tokens of a row.
    """
    segments = as_array(segments)
    has_rows = segments.ndim > 1 and segments.shape[-1] == n
    return segments.reshape((-1, n)) if has_rows else segments


def split_documents(segments: AnyArray, mask: AnyArray, shape: tuple[int, int]) -> Documents:
    """Split a batch into its documents, in the order in which they begin.

    Args:
        segments: Int [n] or [b, n]: tokens of an example with the same number form a document.
            Number 0 is a document, too; other libraries mark padding by it, which mask=segments > 0
            leaves out. The values must be known, since the number of documents is a shape; see
            `number_documents`.
        mask: Bool [n] or [b, n], with any leading axes for b, the tokens that exist; None for all.
        shape: (b, n).

    Raises:
        ValueError: Traced or other numbers, another shape, or no document.
    """
    refuse_if(
        is_traced(segments) or is_traced(mask),
        "segments or their mask are traced, so the number of documents is unknown: pass "
        "num_segments=, the largest number of documents in a row",
    )
    segments = np.asarray(on_host(as_array(segments)))
    _check_segments(segments, shape)
    exists = np.ones(shape, bool)
    if mask is not None:  # of NumPy it stays on the host, inside jit too
        exists = exists & np.asarray(on_host(as_bools(mask))).reshape((-1, shape[1]))
    rows, places = [], []
    for row, row_exists in enumerate(exists):
        numbers = np.broadcast_to(segments, shape)[row]
        for number in dict.fromkeys(numbers[row_exists].tolist()):
            rows.append(row)
            places.append(np.flatnonzero((numbers == number) & row_exists))
    refuse_if(not rows, "the mask leaves no document")
    lengths = np.array([len(place) for place in places])
    longest = max(2, lengths.max())
    place = np.stack([np.pad(place, (0, longest - len(place))) for place in places])
    return Documents(np.array(rows)[:, None], place, np.arange(longest) < lengths[:, None])


def number_documents(
    x: AnyArray, segments: AnyArray, mask: AnyArray, shape: tuple[int, int], num_segments: int
) -> tuple[AnyArray, AnyArray, int]:
    """Number the documents of each row in the order in which they begin, traced or not.

    Args:
        x: Array that decides the framework.
        segments, mask, shape: See `split_documents`.
        num_segments: The largest number of documents in a row.

    Returns:
        (the document of each token, Int [b, n], −1 for tokens that do not exist; whether a row has
        more documents than `num_segments`, Bool []; `num_segments` as a Python integer).

    Raises:
        ValueError: In the cases of `split_documents`, except for traced numbers; also more
            documents, where the values are known.
    """
    num_segments = check_whole("num_segments", num_segments, 1)
    segments = as_array(segments)
    _check_segments(segments, shape)
    segments = match_framework(x, segments)[1]
    exists = match_framework(x, np.ones(shape, bool) if mask is None else mask)[1]
    xp = namespace(segments, exists)
    segments, exists = xp.broadcast_to(segments, shape), xp.broadcast_to(exists, shape)
    is_same = (segments[:, :, None] == segments[:, None, :]) & exists[:, None, :]
    first = xp.argmax(xp.astype(is_same, xp.int32), axis=-1)  # where a token's document begins
    places = match_framework(x, np.arange(shape[1]))[1]
    starts = xp.astype(exists & (first == places[None]), xp.int32)
    numbers = xp.take_along_axis(xp.cumulative_sum(starts, axis=-1) - 1, first, axis=-1)
    counts = xp.sum(starts, axis=-1)
    is_concrete = is_jax_array(counts) and not is_traced(counts)
    values = np.asarray(counts) if is_concrete else host_values_or_none(counts)
    if values is not None and values.max() > num_segments:
        raise ValueError(
            f"num_segments={num_segments} is less than the {values.max()} documents in a row"
        )
    return xp.where(exists, numbers, -1), xp.any(counts > num_segments), num_segments


def _check_segments(segments, shape):
    """Check that segments, the numbers of the documents of packed tokens, are integers of a shape.

    Args:
        segments: The array.
        shape: (examples, tokens); one row (tokens,) for all examples is allowed, too.

    Raises:
        ValueError: Another dtype or shape.
    """
    is_whole = str(segments.dtype).rpartition(".")[2].startswith(("int", "uint", "bool"))
    refuse_if(
        not is_whole or tuple(segments.shape) not in (shape, shape[1:]),
        f"segments of dtype {segments.dtype} and shape {tuple(segments.shape)} are not integers of "
        f"shape {shape[1:]} or {shape}",
    )


def measure_documents(
    measure: Callable[[Any], dict[str, Any]], x: AnyArray, num_segments: int
) -> dict[str, AnyArray]:
    """Measure one document of every row after the other, which takes only the memory of one
    document.

    Args:
        measure: measure(i) of the documents i: {name: [..., b, ...]}.
        x: Array that decides the framework.
        num_segments: Number of segments.

    Returns:
        {name: [documents, ...]}, a first axis for the documents.
    """
    if is_jax_array(x):
        from rank_collapse.measures import on_jax

        return on_jax.map_numbers(measure, num_segments)
    results = [measure(number) for number in range(num_segments)]
    return {name: namespace(x).stack([r[name] for r in results]) for name in results[0]}
