"""Documents in packed rows: several texts in one example, none of which attends to another."""

from typing import Any, NamedTuple

import numpy as np

from rank_collapse.measures.arrays import (
    as_array,
    is_traced,
    match_framework,
    namespace,
    on_host,
)
from rank_collapse.struct import refuse_if


class Documents(NamedTuple):
    """Where the tokens of each document stand; k documents, n tokens of the longest.

    Attributes:
        row: Int [k, 1], the example.
        place: Int [k, n], the tokens in it.
        exists: Bool [k, n]; shorter documents are filled up at the end.
    """

    row: np.ndarray
    place: np.ndarray
    exists: np.ndarray

    def _match_indices(self, x):
        """Return `row` and `place` as arrays of the framework of x."""
        return match_framework(x, self.row)[1], match_framework(x, self.place)[1]

    def split_tokens(self, x: Any) -> Any:
        """Split tokens [..., b, n, d] into [..., k, n, d]."""
        row, place = self._match_indices(x)
        return x[..., row, place, :]

    def split_heads(self, q: Any) -> Any:
        """Split queries or keys of heads [..., b, h, n, d] into [..., k, h, n, d]."""
        row, place = self._match_indices(q)
        xp = namespace(q)
        return xp.moveaxis(xp.moveaxis(q, -3, -2)[..., row, place, :, :], -2, -3)

    def split_weights(self, p: Any) -> Any:
        """Split attention weights [..., b, h, n, n] into [..., k, h, n, n]."""
        xp = namespace(p)
        row, place = self._match_indices(p)
        pairs = xp.moveaxis(p, -3, -1)[..., row[:, None], place[:, :, None], place[:, None, :], :]
        exists = match_framework(p, self.exists)[1]
        return xp.where(exists[:, None, None, :], xp.moveaxis(pairs, -1, -3), 0)


def split_documents(segments: Any, mask: Any, shape: tuple[int, int]) -> Documents:
    """Split a batch into its documents, in the order in which they begin.

    Args:
        segments: Int [n] or [b, n]: tokens of an example with one number are a document. Known
            values, since the number of documents is a shape.
        mask: Bool [n] or [b, n], the tokens that exist; None for all.
        shape: (b, n).

    Raises:
        ValueError: Traced or other numbers, another shape, or no document.
    """
    refuse_if(
        is_traced(segments) or is_traced(mask),
        "segments and their mask are not traced: their values say how many documents there are",
    )
    segments = np.asarray(on_host(as_array(segments)))
    refuse_if(
        segments.dtype.kind not in "iub" or segments.shape not in (shape, shape[1:]),
        f"segments of dtype {segments.dtype} and shape {segments.shape} are not integers of "
        f"{shape[1:]} or {shape}",
    )
    exists = np.ones(shape, bool) if mask is None else np.asarray(on_host(mask))
    rows, places = [], []
    for row in range(shape[0]):
        numbers = np.broadcast_to(segments, shape)[row]
        row_exists = np.broadcast_to(exists, shape)[row]
        for number in dict.fromkeys(numbers[row_exists].tolist()):
            rows.append(row)
            places.append(np.flatnonzero((numbers == number) & row_exists))
    refuse_if(not rows, "the mask leaves no document")
    lengths = np.array([len(place) for place in places])
    longest = max(2, lengths.max())
    place = np.stack([np.pad(place, (0, longest - len(place))) for place in places])
    return Documents(np.array(rows)[:, None], place, np.arange(longest) < lengths[:, None])
