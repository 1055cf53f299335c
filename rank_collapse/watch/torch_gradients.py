"""Norms of the gradients of what makes queries, keys and values of tokens."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rank_collapse.watch.torch_origins import Tag, features

NAMES = ("query", "key", "value")


class Share(NamedTuple):
    """A parameter, or a part of it.

    Attributes:
        parameter: A weak reference; None for one that is used in parts.
        axis: Of the outputs; −1 if unknown.
        features: Bool [width], which outputs count; None for all.
    """

    parameter: Any
    axis: int
    features: Tensor | None


Parts = dict[str, list[Share]]


def choose_parts(tags: Sequence[Tag], sources: Sequence[Tag], frame: int) -> Parts:
    """Chooses the parameters of the linear maps between tokens and queries, keys and values.

    Args:
        tags: Of queries, keys and values.
        sources: Of the tokens.
        frame: Number of the module that a map has to run in.
    """
    made: dict[str, dict[Any, list[Tag]]] = {name: {} for name in NAMES}
    for name, tag in zip(NAMES, tags, strict=True):
        pending = [(tag, origin) for origin in tag.maps()]
        while pending and len(made[name]) < 100:
            result, origin = pending.pop()
            if frame in origin.frames:
                if origin.source not in sources and origin not in made[name]:
                    pending += [(origin.source, before) for before in origin.source.maps()]
                made[name].setdefault(origin, []).append(result)
    shared = {o for o in made["query"] | made["key"] | made["value"]
              if sum(o in origins for origins in made.values()) > 1}  # fmt: skip
    parts: Parts = {}
    for name, origins in made.items():
        parts[name] = []
        for origin, results in origins.items():
            chosen = [features(tag, origin) for tag in results] if origin in shared else []
            unknown = any(own is None for own in chosen)
            every = functools.reduce(torch.logical_or, chosen) if chosen and not unknown else None
            for parameter, axis in origin.parameters:
                is_plain = parameter is not None and not unknown
                reference = weakref.ref(parameter) if is_plain else None
                parts[name].append(Share(reference, axis, every))
    return parts


def parts_of_heads(named: dict[str, Any]) -> Parts:
    """Chooses those of the arguments of `multi_head_attention_forward`."""
    width = named["embed_dim_to_check"]
    result: Parts = {}
    for i, name in enumerate(NAMES):
        third = torch.arange(3).repeat_interleave(width) == i
        fused = [named.get("in_proj_weight"), named.get("in_proj_bias")]
        shares = [Share(weakref.ref(p), 0, third) for p in fused if p is not None]
        single = named.get(f"{name[0]}_proj_weight")
        result[name] = shares + ([] if single is None else [Share(weakref.ref(single), 0, None)])
    return result


def norms(parts: Sequence[Parts]) -> tuple[dict[str, Tensor], str]:
    """Computes ({name: the norm of its gradient}, why one is left out, or "").

    Args:
        parts: Of an attention; several where each is a head.
    """
    result, why = {}, ""
    for name in NAMES:
        shares = [share for own in parts for share in own.get(name, [])]
        squares = [_square(share) for share in shares]
        if None in [share.parameter for share in shares] or any(
            s is NotImplemented for s in squares
        ):
            why = f"which part of a parameter its {name} is of is not known"
            continue
        squares = [square for square in squares if square is not None]
        if squares:
            result[name] = torch.stack(squares).sum().sqrt()
        else:
            why = why or f"no parameter of {name} has one"
    return result, why


def _square(share):
    """Σ g² of a share; None without a gradient."""
    parameter = share.parameter and share.parameter()
    if parameter is None or parameter.grad is None:
        return None
    gradient = parameter.grad.float()
    if share.features is None or share.features.all():
        return gradient.square().sum()
    if share.axis < 0 or gradient.shape[share.axis] != len(share.features):
        return NotImplemented
    chosen = share.features.to(gradient.device).nonzero()[:, 0]
    return gradient.index_select(share.axis, chosen).square().sum()


def parameters_of(parts: Sequence[Parts]) -> set[Any]:
    """Gives weak references to the parameters of an attention."""
    shares = [share for own in parts for every in own.values() for share in every]
    return {share.parameter for share in shares if share.parameter is not None}
