"""Norms of the gradients of what makes queries, keys and values of tokens."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rank_collapse.watch.torch_origins import Map, Tag, find_features

NAMES = ("query", "key", "value")


class Share(NamedTuple):
    """A parameter, or a part of it.

    Attributes:
        parameter: A weak reference; None where it is not known which part counts.
        axis: Of the outputs; −1 if unknown.
        features: Bool [width], which outputs count; None for all.
    """

    parameter: Any
    axis: int
    features: Tensor | None


def choose_shares(
    tags: Sequence[Tag], sources: Sequence[Tag], frame: int
) -> dict[str, list[Share]]:
    """Chooses the parameters of the linear maps between tokens and queries, keys and values.

    Args:
        tags: Of queries, keys and values.
        sources: Of the tokens.
        frame: Number of the module that a map has to run in.
    """
    maps_by_name: dict[str, dict[Map, list[Tag]]] = {name: {} for name in NAMES}
    for name, tag in zip(NAMES, tags, strict=True):
        pending = [(tag, linear_map) for linear_map in tag.maps]
        while pending:
            result, linear_map = pending.pop()
            if frame not in linear_map.frames:
                continue
            if linear_map not in maps_by_name[name] and linear_map.source not in sources:
                source = linear_map.source
                pending += [(source, earlier) for earlier in source.maps]
            maps_by_name[name].setdefault(linear_map, []).append(result)
    parameters = {
        name: {parameter for linear_map in maps for parameter, _ in linear_map.parameters}
        for name, maps in maps_by_name.items()
    }
    shares: dict[str, list[Share]] = {name: [] for name in NAMES}
    for name, maps in maps_by_name.items():
        for linear_map, results in maps.items():
            for parameter, axis in linear_map.parameters:
                is_shared = sum(parameter in part for part in parameters.values()) > 1
                parts = [find_features(tag, linear_map) for tag in results] if is_shared else []
                is_known = parameter is not None and all(part is not None for part in parts)
                features = functools.reduce(torch.logical_or, parts) if parts and is_known else None
                reference = weakref.ref(parameter) if is_known else None
                shares[name].append(Share(reference, axis, features))
    return shares


def measure_gradients(products: Sequence[dict[str, list[Share]]]) -> tuple[dict[str, Tensor], str]:
    """Computes ({name: the norm of its gradient}, why one is left out, or "").

    Args:
        products: Shares of each product of an attention; several where each is a head.
    """
    norms, reason = {}, ""
    for name in NAMES:
        shares = [share for product in products for share in product[name]]
        squares = [_sum_squares(share) for share in shares]
        if any(square is NotImplemented for square in squares):
            reason = f"which part of a parameter its {name} is of is not known"
        elif any(square is not None for square in squares):
            norms[name] = torch.stack([s for s in squares if s is not None]).sum().sqrt()
        else:
            reason = reason or f"no parameter of {name} has one"
    return norms, reason


def _sum_squares(share):
    """Computes Σ g² of a share; None without a gradient, NotImplemented if its part is unknown."""
    if share.parameter is None:
        return NotImplemented
    parameter = share.parameter()
    if parameter is None or parameter.grad is None:
        return None
    gradient = parameter.grad.float()
    if share.features is None or share.features.all():
        return gradient.square().sum()
    if share.axis < 0 or gradient.shape[share.axis] != len(share.features):
        return NotImplemented
    chosen = share.features.to(gradient.device).nonzero()[:, 0]
    return gradient.index_select(share.axis, chosen).square().sum()


def find_parameters(products: Sequence[dict[str, list[Share]]]) -> set[Any]:
    """Finds weak references to the parameters of an attention.

    Args:
        products: Shares of each of its products.
    """
    shares = [share for product in products for part in product.values() for share in part]
    return {share.parameter for share in shares if share.parameter is not None}
