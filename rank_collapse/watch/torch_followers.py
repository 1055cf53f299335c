"""Followers of a tensor: numbers of its entries, masks and softmax, moved and joined as it is.

Axis letters: as in an equation of `einsum`.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rank_collapse.watch.torch_masks import (
    SIDES,
)
from rank_collapse.watch.torch_tags import PAIR, Map, Tag, Term, join_pasts, join_streams

Follower = Callable[[], Tensor]  # a tensor of numbers, of the shape of the one that it follows


def keep_follower(tensor: Tensor) -> Follower:
    """Returns a function without arguments that gives a tensor, as followers of tensors are
    kept."""
    return functools.cache(lambda: tensor)


def intersect_masks(first: Follower | None, second: Follower, shape: Sequence[int]) -> Tensor:
    """Returns which keys a query may attend to by both of two masks.

    Args:
        first, second: Functions without arguments that return a mask, Bool; the first may be None.
        shape: Shape to which the second is expanded, that of the first.
    """
    allowed = second().bool().expand(shape)
    return allowed if first is None else first() & allowed


def join_tags(tags: Sequence[Tag]) -> Tag:
    """Joins the records of the origin of several tensors, for a value that is made of them.

    What depends on shapes, such as numbers of entries and masks, is left out.
    """
    maps = frozenset().union(*(tag.maps for tag in tags))
    behind = frozenset().union(*(tag.behind for tag in tags))
    is_content = any(tag.is_content for tag in tags)
    return Tag(maps, behind, join_pasts(tags), join_streams(tags), is_content=is_content)


def join_followers(tags: Sequence[Tag]) -> dict[str, Follower]:
    """Joins the followers of summands of one shape: tensors that follow their shape and places.

    A mask follows several summands as the intersection of their masks. Numbers of entries that
    another summand brings are added under names of their own, such as "entries 2".

    Args:
        tags: Tags of the summands.
    """
    followers: dict[str, Follower] = {}
    for tag in tags:
        for name, follower in tag.followers.items():
            if name in SIDES and name in followers:
                parts = followers[name], follower
                followers[name] = functools.cache(lambda parts=parts: parts[0]() & parts[1]())
            else:
                followers.setdefault(name, follower)
    numbered = [tag for tag in tags if "entries" in tag.followers]
    covered = numbered[0].maps if numbered else frozenset()
    for tag in numbered[1:]:
        if not tag.maps <= covered:
            covered |= tag.maps
            for name in [name for name in tag.followers if name.startswith("entries")]:
                place = next(i for i in itertools.count(2) if f"entries {i}" not in followers)
                followers[f"entries {place}"] = tag.followers[name]
    return followers


def move_followers(function: Callable, arguments: object, i: int) -> Tensor:
    """Moves numbers of entries as a function of torch moves the entries of the tensor they belong
    to.

    Args:
        function: Function of `MOVES`, such as a view, a slice or a concatenation.
        arguments: (args, kwargs) of its call, in which each tensor is replaced by a function that
            returns the numbers of its entries.
        i: Index among several results.
    """
    args, kwargs = pytree.tree_map(lambda a: a() if callable(a) else a, arguments)
    if function is Tensor.contiguous:
        return args[0]
    if function is Tensor.view:  # followers may lie otherwise in memory
        function = Tensor.reshape
    if function is torch.view_as_complex:
        args = [a.double() for a in args]
    result = function(*args, **kwargs)
    result = result if isinstance(result, Tensor) else result[i]
    return result.long() if function is torch.view_as_real else result


def find_changes(tag: Tag, axes: Sequence[int]) -> tuple[bool, bool] | None:
    """Finds whether the scores that differ along some axes have different queries, and different
    keys.

    Each score q_i · k_j has the number i · PAIR + j of its pair, which follows it through views
    ("pairs" of its tag; −1 where it is not known).

    Args:
        tag: Tag of the scores, the record of their origin.
        axes: Numbers of the axes; the others are held fixed.

    Returns:
        (whether the query changes, whether the key changes); None if the pairs are not known.
    """
    if "pairs" not in tag.followers:
        return None
    pairs = tag.followers["pairs"]()
    if not pairs.numel():
        return None
    # One entry along the axes of stride 0, along which all entries are the same.
    pairs = pairs[tuple(slice(0, None if step else 1) for step in pairs.stride())]
    largest = pairs.amax(dim=axes, keepdim=True) if axes else pairs
    is_known = pairs >= 0
    query_changes = (pairs // PAIR != largest // PAIR) & is_known
    key_changes = (pairs % PAIR != largest % PAIR) & is_known
    return query_changes.any().item(), key_changes.any().item()


def sums_tokens(term: Term, letter: str) -> bool:
    """Returns whether a product sums over tokens of its first factor, along this letter.

    The first and the last entry along the letter's axis are compared: they come from different rows
    (tokens) of the linear maps' inputs, or from the same one.

    Args:
        term: The product, with letters of the axes of both factors.
        letter: Letter of the axis over which it sums.
    """
    if "entries" not in term.query.followers:
        return False
    numbers, axis = term.query.followers["entries"](), term.letters[0].index(letter)
    ends = [numbers.select(axis, i).flatten()[:1] for i in (0, -1)]
    rows = [[m.find_rows(end).item() for m in term.query.list_maps()] for end in ends]
    return rows[0] != rows[1]


def has_same_rows(tag: Tag, axes: Sequence[int]) -> bool:
    """Returns whether the entries along some axes of a tensor are known to be features of one
    token.

    The first and the last entry along these axes then come from the same row of the input of each
    linear map. False if the origin of the entries is unknown.

    Args:
        tag: Tag of the tensor, the record of its origin.
        axes: Numbers of the axes.
    """
    if "entries" not in tag.followers or not tag.maps:
        return False
    numbers = tag.followers["entries"]()
    if not numbers.numel():
        return False
    rows = []
    for ends in ([], axes):
        entry = numbers[tuple(-1 if i in ends else 0 for i in range(numbers.ndim))]
        rows.append([m.find_rows(entry).item() for m in tag.list_maps()])
    return rows[0] == rows[1] and max(rows[0]) >= 0


def find_features(tag: Tag, linear_map: Map) -> Tensor | None:
    """Finds which features (outputs) of a linear map a tensor contains, such as the keys' part of a
    joint map of queries, keys and values.

    The tag of the tensor has the numbers of the map outputs that it was copied from ("entries", and
    "entries 2", ... for further summands); output number s + row · width + feature belongs to a map
    whose numbers begin with s.

    Args:
        tag: Tag of the tensor, the record of its origin.
        linear_map: The map.

    Returns:
        Bool [width]; None if none of the tensor's entries is known to come from the map.
    """
    width, parts = linear_map.width, []
    for name in [name for name in tag.followers if name.startswith("entries")]:
        entries = tag.followers[name]() - linear_map.start
        is_inside = (entries >= 0) & (entries < linear_map.count)
        part = torch.zeros(width + 1, dtype=torch.bool, device=entries.device)
        part[torch.where(is_inside, entries % width, width)] = True
        parts.append(part[:-1])
    features = torch.stack(parts).any(dim=0) if parts else None
    return features if features is not None and features.any() else None
