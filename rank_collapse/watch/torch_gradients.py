"""Norms of the gradients of the parameters that make queries, keys and values of tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rank_collapse.watch.names import PARTS
from rank_collapse.watch.recorder import LeftOut
from rank_collapse.watch.torch_followers import find_features
from rank_collapse.watch.torch_tags import Map, Source, Tag

UNKNOWN = "the part of a parameter that made it is unknown"


class Share(NamedTuple):
    """A parameter, or a part of it.

    Attributes:
        parameter: None where it is not known which part counts.
        axis: Axis of the outputs; −1 if unknown.
        first: Its first output that the map has.
        features: Bool [width], which outputs from there on count.
    """

    parameter: Any
    axis: int
    first: int
    features: Tensor | None


def choose_shares(
    tags: Sequence[Tag], sources: Sequence[Source], frame: int
) -> dict[str, list[Share]]:
    """Chooses the parameters of the linear maps between tokens and queries, keys and values.

    Args:
        tags: Tags of queries, keys and values.
        sources: Sources of the tokens.
        frame: Number of the module that a map has to run in.
    """
    maps_by_name = {
        name: _find_maps(tag, sources, frame) for name, tag in zip(PARTS, tags, strict=True)
    }
    shares: dict[str, list[Share]] = {name: [] for name in PARTS}
    for name, maps in maps_by_name.items():
        for linear_map, results in maps.items():
            parts = [find_features(tag, linear_map) for tag in results]
            is_known = all(part is not None for part in parts)
            features = torch.stack(parts).any(dim=0) if is_known else None
            for parameter, axis, first in linear_map.parameters:
                shares[name].append(Share(parameter if is_known else None, axis, first, features))
    return shares


def _find_maps(tag, sources, frame):
    """Finds the linear maps between tokens and a tensor, going back from the tensor map by map.

    Args:
        tag: Tag of the tensor, the record of its origin.
        sources: Tensors of tokens, at which the search ends.
        frame: Number of the module that a map has to run in.

    Returns:
        {linear map: tags of the tensors that contain its outputs}.
    """
    maps: dict[Map, list[Tag]] = {}
    pending = [(tag, linear_map) for linear_map in tag.maps]
    while pending:
        result, linear_map = pending.pop()
        if frame in linear_map.frames:
            if linear_map not in maps and linear_map.source not in sources:
                behind = linear_map.source.tag
                pending += [(behind, earlier) for earlier in behind.maps]
            maps.setdefault(linear_map, []).append(result)
    return maps


def measure_gradient(shares: Sequence[Share]) -> Tensor:
    """Computes the norm of the gradient of the parameters of queries, of keys or of values.

    Args:
        shares: Shares of all products of an attention; several where each is a head.

    Raises:
        LeftOut: It is not known which part of a parameter counts, or no parameter has a gradient.
    """
    if any(share.parameter is None for share in shares):
        raise LeftOut(UNKNOWN)
    shares_by_parameter: dict[Any, list[Share]] = {}
    for share in shares:
        if share.parameter.grad is not None:
            shares_by_parameter.setdefault(share.parameter, []).append(share)
    if not shares_by_parameter:
        raise LeftOut("no parameter of it has one")
    squares = [_square_gradient(*same) for same in shares_by_parameter.items()]
    return torch.stack(squares).sum().sqrt()


def _square_gradient(parameter, shares):
    """Computes Σ g² over the entries of a parameter's gradient that belong to queries, to keys or
    to values.

    Args:
        parameter: The parameter.
        shares: Which outputs of it count, for each product of the attention.

    Raises:
        LeftOut: It is unknown which part counts.
    """
    gradient, axis = parameter.grad.float(), shares[0].axis
    parts = [share.features for share in shares]
    if axis < 0 and any(part.all() for part in parts):
        return gradient.square().sum()
    places = torch.cat([share.first + share.features.nonzero()[:, 0] for share in shares]).unique()
    if axis < 0 or places[-1] >= gradient.shape[axis]:
        raise LeftOut(UNKNOWN)
    return gradient.index_select(axis, places.to(gradient.device)).square().sum()
