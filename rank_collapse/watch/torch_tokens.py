"""The tokens that the queries of a product are made of, example by example.

Axis letters: g examples and heads as one, e examples, h heads, n queries, m keys, d width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rank_collapse.watch.recorder import LeftOut
from rank_collapse.watch.torch_origins import Tag, Term, find_shared_sources, locate_numbers


class Tokens(NamedTuple):
    """What was read to make queries, and where each token stands.

    Attributes:
        matrix: All rows that were read, [rows, d].
        index: Which row query i of example e is, [e, n].
        keys: Which row each key is, [e, m], −1 for none of them; None if unknown.
        order: Of [g], so that it is [e, h].
        is_cross: Whether keys are of other tokens.
        sources: Tags of what was read.
    """

    matrix: Tensor
    index: Tensor
    keys: Tensor | None
    order: Tensor
    is_cross: bool
    sources: tuple[Tag, ...]


def choose_term(terms: Sequence[Term]) -> Term:
    """Chooses the first product with keys of the same tokens, or the first."""
    for term in terms:
        if find_shared_sources(term.query.maps, term.query, term.key) is not None:
            return term
    return terms[0]


def read_tokens(term: Term, count: int) -> Tokens:
    """Reads the tokens of queries: the input of the linear maps that made them.

    Args:
        term: The product of queries and keys.
        count: Of the examples and heads of the weights, g.

    Raises:
        LeftOut: It cannot be said which tokens queries are of.
    """
    (first, second, result), maps = term.letters, term.query.maps
    located = _locate_rows(term.query, first, result[:-1], term.sizes)
    if not maps or located is None:
        raise LeftOut("which linear map made its queries is not known")
    used = [maps[i] for i in located[0].unique().tolist() if i >= 0]
    shared = find_shared_sources(used, term.query, term.key)
    sources = shared or list(dict.fromkeys(linear_map.source for linear_map in used))
    matrices = [source.matrix for source in sources]
    if any(matrix is None for matrix in matrices):
        raise LeftOut("what made its queries ran in another layer")
    if len({matrix.shape[1] for matrix in matrices}) != 1:
        raise LeftOut("its queries are of tensors of several widths")
    matrix = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
    rows = _join_rows(located, maps, sources)
    if rows is None or (rows < 0).any():
        raise LeftOut("which tokens its queries are of is not known")
    if len(rows) != count:
        raise LeftOut(f"{count} matrices of weights for {len(rows)} of queries")
    keys = _locate_rows(term.key, second, result[:-2] + result[-1], term.sizes)
    keys = None if keys is None or shared is None else _join_rows(keys, term.key.maps, sources)
    _, example = rows[:, 0].unique(return_inverse=True)
    e, order = int(example.max()) + 1, example.argsort(stable=True)
    heads, index = len(rows) // e, rows[order][:: len(rows) // e]
    if len(rows) % e or not torch.equal(rows[order], index.repeat_interleave(heads, 0)):
        raise LeftOut("its heads have different tokens")
    keys = None if keys is None else keys[order][::heads]
    return Tokens(matrix, index, keys, order, shared is None, tuple(sources))


def _locate_rows(tag, letters, wanted, sizes):
    """Finds the rows of a factor of a product of queries and keys.

    Args:
        tag: Of the factor.
        letters: Of its axes.
        wanted: Of the axes of the result: of batches, and of queries or keys.
        sizes: Of the letters.

    Returns:
        [index among its maps, row], both [wanted]; None if unknown.

    Raises:
        LeftOut: A row of weights is of several tokens, as in attention among features.
    """
    if "numbers" not in tag.followers or not tag.maps:
        return None
    axes = [c for c in wanted if c in letters]
    summed = [c for c in letters if c not in wanted]
    numbers = tag.followers["numbers"]().permute([letters.index(c) for c in axes + summed])
    numbers = numbers.flatten(len(axes)) if summed else numbers[..., None]
    first, last = (locate_numbers(numbers[..., i], tag.maps) for i in (0, -1))
    if not ((first[1] == last[1]) | (first[1] < 0)).all():
        raise LeftOut("its softmax is over something else than the keys of tokens")
    size = dict(zip(axes, numbers.shape, strict=False))
    shapes = [size.get(c, 1) for c in wanted], [sizes[c] for c in wanted]
    return [part.reshape(shapes[0]).expand(shapes[1]) for part in first]


def _join_rows(located, maps, sources):
    """Joins rows of several sources, which stand one after the other.

    Args:
        located: As `_locate_rows` gives it.
        maps: The maps that it names.
        sources: Tags of what was read.

    Returns:
        Rows [g, n], −1 for none; None if unknown.
    """
    map_index, rows = located
    result, total = torch.full_like(rows, -1), sum(len(source.matrix) for source in sources)
    for i, linear_map in enumerate(maps):
        if linear_map.source in sources:
            before = sources[: sources.index(linear_map.source)]
            offset = sum(len(source.matrix) for source in before)
        elif len(sources) == 1 and linear_map.rows == total:  # maps one after the other
            offset = 0
        elif (map_index == i).any():
            return None
        else:
            continue
        result = torch.where(map_index == i, rows + offset, result)
    return result.reshape(-1, result.shape[-1])


def find_allowed_tokens(tokens: Tokens, allowed: Tensor | None) -> Tensor | None:
    """Finds Bool [e or 1, n, n], which token a token may attend to; None if all or unknown.

    Args:
        tokens: Of the queries.
        allowed: Bool [e or 1, n, m], which key a query may attend to.
    """
    if allowed is None or tokens.is_cross or tokens.keys is None:
        return None
    if tokens.keys.shape == tokens.index.shape and torch.equal(tokens.keys, tokens.index):
        return allowed
    match = tokens.keys[:, None] == tokens.index[:, :, None]
    if not match.any(dim=-1).all():
        return None
    n, m = allowed.shape[-2:]
    place = match.int().argmax(dim=-1)[:, None].expand(-1, n, -1)
    return allowed.expand(len(place), n, m).gather(2, place)
