"""Path sums of every length, carried from the state to the output through the recorded values."""

from collections import Counter

import torch
from torch import Tensor

from rank_collapse.torch.refusals import refuse_derivative
from rank_collapse.torch.values import Value


def carry_sums(
    output: Value, start: Value, direction: Tensor, num_axes: int, longest: int | None
) -> Tensor:
    """Compute the sum of all paths of each length from `start` to `output`, applied to a direction.

    Args:
        output: Output of degree 1.
        start: The value that paths start from.
        direction: Direction of its shape.
        num_axes: Along how many axes lengths are counted.
        longest: Lengths above it are summed in one entry, longest + 1; None for no limit.

    Returns:
        [lengths of axis 0, …, *output]; an axis has as many entries as there are lengths, at most
        longest + 2.
    """
    order = sort_sources(output)
    readers = Counter(id(source) for value in order for source in value.sources)
    lengths = (1,) * num_axes
    sums = {id(start): direction.reshape(*lengths, *direction.shape)}
    for value in order:
        if value is start:
            continue
        sources = _align([sums[id(source)] for source in value.sources], num_axes)
        if value.axis is not None:
            sums[id(value)] = _move_lengths(sources[0], value.axis, longest)
        else:
            sums[id(value)] = _push(value, sources, num_axes)
        for source in value.sources:
            readers[id(source)] -= 1
            if not readers[id(source)] and source is not value:
                sums.pop(id(source), None)
    return sums[id(output)]


def sort_sources(output: Value) -> list[Value]:
    """List all values that an output's path sums need, each after its sources."""
    order, visited, stack = [], set(), [(output, False)]
    while stack:
        value, is_done = stack.pop()
        if is_done:
            order.append(value)
        elif id(value) not in visited:
            visited.add(id(value))
            stack.append((value, True))
            stack.extend((source, False) for source in value.sources)
    return order


def _align(sums, num_axes):
    """Pad path sums [*lengths, ...] with zeros so that all have the same numbers of lengths.

    Args:
        sums: The path sums of several values.
        num_axes: Number of axes of lengths.
    """
    sizes = [max(s.shape[axis] for s in sums) for axis in range(num_axes)]
    return [_pad(s, sizes) for s in sums]


def _pad(sums, sizes):
    """Pad path sums [*lengths, ...] with zeros for lengths that no path has.

    Args:
        sums: The path sums.
        sizes: The new size of each axis of lengths, at least the present one.
    """
    for axis, size in enumerate(sizes):
        missing = size - sums.shape[axis]
        if missing:
            shape = (*sums.shape[:axis], missing, *sums.shape[axis + 1 :])
            sums = torch.cat([sums, sums.new_zeros(shape)], axis)
    return sums


def _move_lengths(sums, axis, longest):
    """Count one branch more along an axis: the sums of length k become those of length k + 1.

    Args:
        sums: [*lengths, ...].
        axis: The axis of lengths.
        longest: Lengths above it share one entry, which has the index longest + 1; None for no
            limit.
    """
    no_paths = torch.zeros_like(sums.narrow(axis, 0, 1))  # of length 0
    moved = torch.cat([no_paths, sums], axis)
    if longest is None or moved.shape[axis] <= longest + 2:
        return moved
    by_length = moved.narrow(axis, 0, longest + 1)
    longer = moved.narrow(axis, longest + 1, 2).sum(axis, keepdim=True)
    return torch.cat([by_length, longer], axis)


def _push(value, sources, num_axes):
    """Apply a value's linear map to the path sums of its sources, length by length.

    Args:
        value: The value, with its map `push`.
        sources: Path sums [*lengths, ...] of its sources, with the same lengths.
        num_axes: Number of axes of lengths.
    """
    lengths = sources[0].shape[:num_axes]
    flat = [s.flatten(0, num_axes - 1) for s in sources]
    try:
        if value.batched:
            pushed = torch.func.vmap(value.push)(*flat)
        else:
            pushed = torch.stack([value.push(*tangents) for tangents in zip(*flat, strict=True)])
    except NotImplementedError as error:
        refuse_derivative(value, error)
    return pushed.unflatten(0, lengths)
