"""The tokens that the queries of a product are made of, example by example.

Axis letters: g examples and heads as one, e examples, h heads, n queries, m keys, d width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rank_collapse.watch.recorder import LeftOut
from rank_collapse.watch.torch_origins import Origins, Tag, Term, along, common_sources, locate


class Tokens(NamedTuple):
    """What was read to make queries, and where each token stands.

    Attributes:
        matrix: All rows that were read, [rows, d].
        index: Which row query i of example e is, [e, n].
        keys: Which row each key is, [e, m], −1 for none of them; None if unknown.
        order: Of [g], so that it is [e, h]; None where it is.
        is_cross: Whether keys are of other tokens.
        sources: Tags of what was read.
        shape: Of what was read.
    """

    matrix: Tensor
    index: Tensor
    keys: Tensor | None
    order: Tensor | None
    is_cross: bool
    sources: tuple[Tag, ...]


def choose_term(terms: Sequence[Term]) -> tuple[Term, list[Tag] | None]:
    """Gives the first product with keys of the same tokens, or the first; and `common_sources`."""
    pairs = [(term, common_sources(term.query, term.key)) for term in terms]
    return next((pair for pair in pairs if pair[1] is not None), pairs[0])


def read_tokens(origins: Origins, terms: Sequence[Term], count: int) -> Tokens:
    """Reads the tokens of a product of queries and keys.

    Args:
        origins: Of the pass.
        terms: Products of queries and keys, which were added.
        count: Of the examples and heads of the weights, g.

    Raises:
        LeftOut: It cannot be said which tokens queries are of.
    """
    term, common = choose_term(terms)
    first, second, both = term.letters
    maps = term.query.maps()
    if not maps:
        raise LeftOut("no linear map made its queries")
    places = along(first, both[:-1], term.query, term.sizes)
    sources = common or [o.source for o in maps]
    if places is not None:
        which, rows = locate(places, term.query)
        read = [maps[i].source for i in which.unique().tolist() if i >= 0]
        if set(read) <= set(sources):
            sources = read
    by_source = _origins_of(term.query, sources)
    matrices = [origins.rows_of(o) for o in by_source.values()]
    if len({matrix.shape[1] for matrix in matrices}) != 1:
        raise LeftOut("its queries are of tensors of several widths")
    offsets, total = {}, 0
    for source, matrix in zip(by_source, matrices, strict=True):
        offsets[source], total = total, total + len(matrix)
    matrix = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
    if places is None:
        rows = _rows_by_shape(origins, next(iter(by_source.values())), count, term.sizes[both[-2]])
    else:
        rows = _rows(which, rows, maps, offsets, total)
    if rows is None or (rows < 0).any():
        raise LeftOut("which tokens its queries are of is not known")
    rows = rows.reshape(-1, rows.shape[-1])
    if len(rows) != count:
        raise LeftOut(f"{count} matrices of weights for {len(rows)} of queries")
    keys = None
    if common is not None:
        keys = _key_rows(term, second, both, offsets, total)
    index, keys, order = _by_example(rows, keys)
    return Tokens(matrix, index, keys, order, common is None, tuple(by_source))


def _origins_of(tag, sources):
    """{source: a map that read it}, of maps that made a tensor, or what those read."""
    result: dict[Tag, Any] = dict.fromkeys(sources)
    maps, steps = tag.maps(), 0
    while maps and steps < 1000:
        origin, steps = maps.pop(), steps + 1
        if origin.source in result and result[origin.source] is None:
            result[origin.source] = origin
        if None in result.values():
            maps = origin.source.maps() + maps
    if None in result.values():
        raise LeftOut("which tokens its queries are of is not known")
    return result


def _rows(which, rows, maps, offsets, total):
    """Rows among all sources of (index of a map, row it read); −1 for none; None if unknown."""
    result = torch.full_like(rows, -1)
    for i, origin in enumerate(maps):
        mine = which == i
        if origin.source in offsets:
            result = torch.where(mine, rows + offsets[origin.source], result)
        elif len(offsets) == 1 and origin.rows == total:  # maps one after the other
            result = torch.where(mine, rows, result)
        elif mine.any():
            return None
    return result


def _key_rows(term, letters, both, offsets, total):
    places = along(letters, both[:-2] + both[-1], term.key, term.sizes)
    if places is None:
        return None
    rows = _rows(*locate(places, term.key), term.key.maps(), offsets, total)
    return None if rows is None else rows.reshape(-1, rows.shape[-1])


def _rows_by_shape(origins, origin, count, n):
    """Rows of [b, n, d] or [n, b, d], where queries were made by what torch does not show."""
    shape = origin.shape[:-1]
    b = origin.rows // n
    if b == 0 or origin.rows != b * n or count % b or shape not in ((b, n), (n, b), (b * n,), (n,)):
        return None
    if shape == (b, n) == (n, b) and b > 1:
        return None
    rows = torch.arange(b * n, device=origins.rows_of(origin).device)
    rows = rows.reshape(n, b).T if shape == (n, b) and b > 1 else rows.reshape(b, n)
    return rows.repeat_interleave(count // b, dim=0)


def _by_example(rows, keys):
    """(rows [e, n], keys [e, m] or None, order [g] or None): heads of one example read its rows."""
    _, example = rows[:, 0].unique(return_inverse=True)
    e = int(example.max()) + 1
    order = example.argsort(stable=True)
    rows = rows[order]
    if len(rows) % e or not torch.equal(
        rows, rows[:: len(rows) // e].repeat_interleave(len(rows) // e, 0)
    ):
        raise LeftOut("its heads have different tokens")
    if keys is not None:
        keys = keys[order][:: len(rows) // e]
    is_sorted = torch.equal(order, torch.arange(len(order), device=order.device))
    return rows[:: len(rows) // e], keys, None if is_sorted else order


def allowed_among(tokens: Tokens, allowed: Tensor | None) -> Tensor | None:
    """Gives Bool [e or 1, n, n], which token a token may attend to; None if all or unknown.

    Args:
        tokens: Of the queries.
        allowed: Bool [e or 1, n, m], which key a query may attend to.
    """
    if allowed is None or tokens.is_cross or tokens.keys is None:
        return None
    n, m = allowed.shape[-2:]
    if tokens.keys.shape == tokens.index.shape and torch.equal(tokens.keys, tokens.index):
        return allowed
    match = tokens.keys[:, None] == tokens.index[:, :, None]
    if not match.any(dim=-1).all():
        return None
    place = match.int().argmax(dim=-1)[:, None].expand(-1, n, -1)
    return allowed.expand(len(place), n, m).gather(2, place)
