"""Linear maps as they run: the input of each, its parameters, and the numbers of its entries.

The `Tag` of a tensor describes where it comes from (`torch_tags`). A product has one letter for
each axis of its factors and of its result.

Axis letters: n queries, m keys, k width; others as in an equation of `einsum`.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rank_collapse.watch.torch_functions import Product
from rank_collapse.watch.torch_tag_table import TagTable
from rank_collapse.watch.torch_tags import Map, Source, Tag


def see_map(
    table: TagTable, product: Product, parameters: Sequence[Tensor], output: Tensor
) -> None:
    """Records a linear map: gives its output a tag that names the map, the input and the
    parameters.

    The entries of the outputs of all maps are numbered through the pass. The numbers ("entries" of
    the tag) follow the output through later views, so that the rows of the input, the tokens, can
    be found behind any tensor that is made of it.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        product: The product of an input and a weight, with one letter for each axis of the input,
            the weight and the output. Axes of the input that the output has too are rows.
        parameters: Tensors of its call except for the input.
        output: Result of the map.
    """
    (read, weight, result), x = product.letters, product.first
    nested = output if output.is_nested else None
    if nested is not None:  # one row of tokens after the other
        (read, result), x, output = ("ay", "az"), x.values(), output.values()
        table.tags[x] = table.tag(product.first)
    axes = [c for c in read if c in result]
    features = [c for c in result if c not in read]
    source = _read_source(table, x, [read.index(c) for c in axes])
    sizes = dict(zip(result, output.shape, strict=True))
    shape = [sizes[c] for c in axes + features]
    has_rows = [x.shape[read.index(c)] for c in axes] == shape[: len(axes)]
    axis = weight.find(features[0]) if len(features) == 1 else -1
    shares = tuple(share for a in parameters for share in _read_parameters(table, a, axis))
    running = tuple(frame.number for frame in table.frames)
    entries = table.num_entries, output.numel(), math.prod(shape[len(axes) :]), has_rows
    linear_map = Map(source, shares, running, *entries)
    table.num_entries += output.numel()
    tag = Tag(frozenset([linear_map]), source.tag.behind | {source}, source.tag.past)
    tag.stream, tag.is_content = source.tag.stream, True

    def number_entries():
        """Numbers the entries of the output, in its layout."""
        numbers = torch.arange(linear_map.count, device=output.device).reshape(shape)
        order = [(axes + features).index(c) for c in result]
        numbers = (numbers + linear_map.start).permute(order)
        return numbers if nested is None else _nest(numbers, nested)

    tag.followers["entries"] = functools.cache(number_entries)
    table.record(output if nested is None else nested, tag)


def _read_source(table: TagTable, x, axes):
    """Returns the input of a map as a matrix [rows, features].

    Args:
        table: Tags of the pass, {tensor: its origin}.
        x: The tensor.
        axes: Numbers of the axes of x that are rows; all others are features.
    """
    tag, order = table.tag(x), axes + [i for i in range(x.ndim) if i not in axes]
    count = math.prod(x.shape[i] for i in axes)
    tag.stream = tag.stream or frozenset([tag])
    if tag.source is None or tag.source.order != order:
        tag.source = Source(tag, order, count)
    tag.source.matrix = x.detach().permute(order).reshape(count, x.numel() // max(count, 1))
    table.recent.append(tag)
    return tag.source


def _read_parameters(table: TagTable, tensor, axis):
    """Reads which parameters a weight is, or is made of, and which outputs of a parameter it has.

    Args:
        table: Tags of the pass, {tensor: its origin}.
        tensor: The weight, such as a slice of a joint matrix of queries, keys and values.
        axis: Axis of the outputs in it.

    Returns:
        [(the parameter, axis of the outputs or −1, the first of them), ...]; None for the parameter
        if it is unknown; [] of a buffer.
    """
    axis = 0 if tensor.ndim == 1 else axis
    if isinstance(tensor, nn.Parameter):
        return [(tensor, axis, 0)]
    tag = table.tags.get(tensor, Tag())
    if tag.is_constant and not tag.parameters:
        return []
    if len(tag.parameters) == 1:
        (parameter,) = tag.parameters
        is_slice = tensor._base is parameter and tensor.is_contiguous()
        if parameter.numel() != tensor.numel():
            if is_slice and tensor.shape[1:] == parameter.shape[1:] and axis == 0:
                return [(parameter, axis, tensor.storage_offset() // tensor.stride(0))]
            return [(None, -1, 0)]
    if tensor._base is not None and table.tags.get(tensor._base, Tag()).joined:
        piece = _find_piece(tensor, table.tags[tensor._base].joined)
        return [(None, -1, 0)] if piece is None else _read_parameters(table, piece, axis)
    largest = max((p.numel() for p in tag.parameters), default=0)
    if largest != tensor.numel():
        return [(None, -1, 0)]
    return [(parameter, -1, 0) for parameter in tag.parameters]


def _find_piece(part, joined):
    """Finds which of several concatenated tensors a part of the result is; None if it is no whole
    one.

    Args:
        part: A view of the result, such as the bias of keys in a joint bias.
        joined: The tensors, which lie one after the other in the result.
    """
    place = 0
    for tensor in joined:
        if place == part.storage_offset() and part.is_contiguous():
            return tensor if tensor.numel() == part.numel() else None
        place += tensor.numel()
    return None


def _nest(values, nested):
    """Returns values as a jagged tensor, with the row lengths of another one.

    Args:
        values: [tokens of all rows, d].
        nested: The other jagged tensor.
    """
    return torch.nested.nested_tensor_from_jagged(values, nested.offsets(), nested.lengths())
