"""Aligns the tokens of two recordings: padding on either side, another order."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from rank_collapse.agree.recording import Layer, Recording
from rank_collapse.checks import refuse_if
from rank_collapse.printed import format_count

OTHER_ORDER = "the tokens stand in another order"


class Alignment(NamedTuple):
    """The pairs of tokens, one from each recording, that are compared.

    Attributes:
        first, second: Positions [b, m] of the m-th token that exists in each run.
        mask: Bool [b, m], True for tokens that exist.
        remarks: Sentences about differences in the order or padding of the tokens.
        order: "", or the kind of difference where the tokens stand in another order.
    """

    first: Int[np.ndarray, "b m"]
    second: Int[np.ndarray, "b m"]
    mask: Bool[np.ndarray, "b m"]
    remarks: tuple[str, ...] = ()
    order: str = ""

    def take(self, layer: Layer, positions: Int[np.ndarray, "b m"]) -> Layer:
        """Returns a layer with the aligned tokens alone.

        Args:
            layer: The layer of one recording.
            positions: `first` or `second`.
        """

        def gather(array):
            return np.take_along_axis(array, positions[..., None], axis=1)

        branches = {name: gather(array) for name, array in layer.branches.items()}
        return Layer(layer.index, gather(layer.before), gather(layer.after), branches)


def align_tokens(first: Recording, second: Recording) -> Alignment:
    """Align the k-th existing token of each example in one recording with the k-th in the other.

    Padding may be on either side. Where the embeddings are the same in another order, tokens are
    aligned by them.

    Args:
        first, second: The recordings.

    Raises:
        ValueError: The recordings differ in the number of examples, the number of existing tokens,
            the width, or the token ids.
    """
    (b, _, d), (b2, _, d2) = first.shape, second.shape
    refuse_if(d != d2, f"the width is {d} in {first.path.name} and {d2} in {second.path.name}")
    refuse_if(
        b != b2, f"{first.path.name} has {format_count(b, 'example')}, {second.path.name} {b2}"
    )
    masks = [first.read_mask(), second.read_mask()]
    counts = [mask.sum(axis=1) for mask in masks]
    if not np.array_equal(*counts):
        example = int(np.flatnonzero(counts[0] != counts[1])[0])
        raise ValueError(
            f"example {example} has {format_count(counts[0][example], 'token')} in "
            f"{first.path.name} and "
            f"{counts[1][example]} in {second.path.name}; `mask` says which tokens exist"
        )
    most = int(counts[0].max())
    exists = np.arange(most) < counts[0][:, None]
    # A stable sort: the tokens that exist first, each in its order.
    positions = [np.argsort(~mask, axis=1, kind="stable")[:, :most] for mask in masks]
    remarks = []
    if not np.array_equal(*masks):
        remarks.append("padding lies elsewhere; tokens are compared in their order")
    states = [_take_states(r, p) for r, p in zip((first, second), positions, strict=True)]
    order = [  # for each example, the permutation of its tokens; None where none is found
        _match_rows(first_rows, second_rows, int(count))
        for first_rows, second_rows, count in zip(*states, counts[0], strict=True)
    ]

    def changes_order(permutation):
        return (permutation != np.arange(len(permutation))).any()

    kind = ""
    if all(o is not None for o in order) and any(map(changes_order, order)):
        kind = OTHER_ORDER
        for example, permutation in enumerate(order):
            n = len(permutation)
            positions[1][example, :n] = positions[1][example, permutation]
    ids = [recording.read_token_ids() for recording in (first, second)]
    if all(i is not None for i in ids):
        aligned = [np.take_along_axis(i, p, axis=1) for i, p in zip(ids, positions, strict=True)]
        differs = (aligned[0] != aligned[1]) & exists
        if differs.any():
            example, token = (int(k[0]) for k in np.nonzero(differs))
            raise ValueError(
                f"the inputs differ: token {token} of example {example} is "
                f"{aligned[0][example, token]} in {first.path.name} and "
                f"{aligned[1][example, token]} in {second.path.name}"
            )
    return Alignment(positions[0], positions[1], exists, tuple(remarks), kind)


def _take_states(recording, positions):
    """Return the states [b, m, 2, d] before and after the first layer."""
    layer = next(recording.read_layers())
    states = np.stack([layer.before, layer.after], axis=2)
    return np.take_along_axis(states, positions[..., None, None], axis=1)


def _match_rows(x: Float[np.ndarray, "n 2 d"], y: Float[np.ndarray, "n 2 d"], count: int):
    """Return the row of y that each row of x belongs to, if this is one to one and much nearer than
    the row at the same index; None otherwise.

    Equal tokens may have equal embeddings: their own places win, or else the nearest states after
    the first layer.

    Args:
        x, y: States before and after the first layer.
        count: Number of existing rows.
    """
    distances, later = (_measure_distances(x[:count, k], y[:count, k]) for k in (0, 1))
    at_place, least = np.diagonal(distances), distances.min(axis=1)
    if (at_place <= 1.5 * least).all():
        return np.arange(count)
    is_near = distances <= 1.5 * least[:, None] + 1e-6 * at_place.max()
    nearest = np.where(is_near, later, np.inf).argmin(axis=1)
    is_order = len(set(nearest)) == count and (
        distances[np.arange(count), nearest].max() < 0.1 * at_place.max()
    )
    return nearest if is_order else None


def _measure_distances(x, y):
    """Return the distances between the rows of x and of y."""
    squares = (x * x).sum(axis=1)[:, None] + (y * y).sum(axis=1) - 2 * x @ y.T
    return np.sqrt(np.maximum(squares, 0))
