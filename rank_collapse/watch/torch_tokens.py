"""The tokens that the queries of a product are made of, example by example.

The `Tag` of a tensor describes where it comes from; its rows are the axes along which tokens
differ, its features the others (`torch_tags`). A product has one letter for each axis of its
factors and of its result.

Axis letters: g examples and heads as one, e examples, h heads, n queries, m keys, d width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rank_collapse.watch.recorder import LeftOut
from rank_collapse.watch.torch_tags import Map, Source, Tag, Term


class Tokens(NamedTuple):
    """The tensors from which queries were made, and the place of each token in them.

    Attributes:
        matrix: All rows of these tensors, [rows, d].
        index: Row of query i in example e, [e, n].
        keys: Row of each key, [e, m], −1 for none of them; None if unknown.
        order: Order in which [g] becomes [e, h].
        is_cross: Whether the keys come from other tokens.
        sources: The tensors themselves.
    """

    matrix: Tensor
    index: Tensor
    keys: Tensor | None
    order: Tensor
    is_cross: bool
    sources: tuple[Source, ...]

    def has_own_keys(self) -> bool:
        """Returns whether keys are the tokens of the queries, and no others."""
        return self.keys is not None and torch.equal(self.keys, self.index)


def choose_term(terms: Sequence[Term]) -> Term:
    """Chooses the first product with keys of the same tokens, or the first of the latest layer.

    Terms with the latest queries come first, because scores may contain terms of an earlier layer.
    If all keys are of other tokens, queries of the latest layer come from the most attentions.
    """
    latest = sorted(terms, key=lambda term: -max((m.start for m in term.query.maps), default=-1))
    for term in latest:
        if find_shared_sources(term.query.list_maps(), term.query, term.key) is not None:
            return term

    def rank_layer(term):
        is_held = all(m.source.matrix is not None for m in term.query.maps)
        return is_held, len(term.query.past)

    return max(terms, key=rank_layer)


def read_tokens(term: Term) -> Tokens:
    """Reads the tokens of queries: the rows of the input of the linear maps that made the queries.

    The maps may follow each other; the tokens are then the tensors from which both queries and keys
    come. Keys from other tensors make it cross-attention.

    Args:
        term: The product of queries and keys, with the origins of both.

    Raises:
        LeftOut: The tokens of the queries cannot be identified.
    """
    maker, entries = _find_maker(term)
    used = _list_maps(maker, entries)
    shared = find_shared_sources(used, term.query, term.key)
    sources = shared or list(dict.fromkeys(linear_map.source for linear_map in used))
    if any(source.matrix is None for source in sources):
        raise LeftOut("its queries were made in another layer")
    if len({source.matrix.shape[1] for source in sources}) != 1:
        raise LeftOut("its queries were made from tensors of several widths")
    rows = _find_places(entries, used, sources)
    if rows is None or (rows < 0).any():
        raise LeftOut("the tokens of its queries are unknown")
    index, order, heads = _split_heads(rows)
    keys = _read_keys(term)
    if keys is not None:
        keys = _find_places(keys, _list_maps(term.key, keys), sources)
    keys = None if keys is None or shared is None else keys[order][::heads]
    matrix = torch.cat([source.matrix for source in sources])
    return Tokens(matrix, index, keys, order, shared is None, tuple(sources))


def _find_maker(term):
    """Finds the factor of a product whose entries a linear map made: the queries, or else the keys.

    Queries may be tokens as they are. If keys come from the same tokens, the map of the keys then
    tells which.

    Args:
        term: The product of queries and keys.

    Returns:
        (tag of the factor, numbers of its entries, see `_read_entries`).

    Raises:
        LeftOut: No map is known.
    """
    first, _, result = term.letters
    queries = _read_entries(term.query, first, result[:-1], term.sizes)
    if queries is not None and _list_maps(term.query, queries):
        return term.query, queries
    if not term.query.stream.isdisjoint(term.key.stream):
        keys = _read_keys(term)
        if keys is not None and keys.shape[-2] == term.sizes[result[-2]]:
            return term.key, keys
    raise LeftOut("the linear map that made its queries is unknown")


def _split_heads(rows):
    """Splits the rows of examples and heads into examples, each with its heads.

    Args:
        rows: Row of every query [g, n].

    Returns:
        Rows of each example's queries [e, n], the order in which [g] becomes [e, h], and h.

    Raises:
        LeftOut: The heads of an example have different tokens.
    """
    _, example = rows[:, 0].unique(return_inverse=True)
    e, order = int(example.max()) + 1, example.argsort(stable=True)
    heads, index = len(rows) // e, rows[order][:: len(rows) // e]
    if len(rows) % e or not torch.equal(rows[order], index.repeat_interleave(heads, 0)):
        raise LeftOut("its heads have different tokens")
    return index, order, heads


def join_tokens(tokens: Tokens, parts: Sequence[Term], allowed: Tensor) -> Tokens:
    """Joins the tokens of several products of queries and keys whose weights stand in one tensor,
    such as one product for each document; each example appears once.

    Args:
        tokens: Tokens of one of the products.
        parts: All products.
        allowed: Bool [g or 1, n, m], which key a query may attend to.

    Returns:
        `tokens` if it has the tokens of all products. Otherwise the tokens of all examples, where
        keys are the tokens of the queries.

    Raises:
        LeftOut: The products use different tensors, or it is unknown which example has which keys.
    """
    joined = [read_tokens(part) for part in parts]
    index = torch.cat([part.index for part in joined]).unique(dim=0)
    if torch.equal(index, tokens.index.unique(dim=0)):
        return tokens
    is_alike = all(part.sources == tokens.sources and part.has_own_keys() for part in joined)
    if not is_alike or not (allowed == allowed[:1]).all():
        raise LeftOut("its products have different tokens")
    order = torch.arange(len(index), device=index.device)
    return tokens._replace(index=index, keys=index, order=order)


def _read_keys(term):
    """Reads which outputs of linear maps the keys of a product are made of, as `_read_entries`
    does.

    Args:
        term: The product of queries and keys.

    Returns:
        Int [batches, m, 2], numbers for the first and the last feature of each key; None if
        unknown.
    """
    _, second, result = term.letters
    return _read_entries(term.key, second, result[:-2] + result[-1], term.sizes)


def _read_entries(tag, letters, wanted, sizes):
    """Reads which outputs of linear maps a factor of a product of queries and keys is made of.

    Args:
        tag: Tag of the factor, the record of its origin.
        letters: Letters of the axes of the factor.
        wanted: Letters of the axes that the result has: of batches, and of queries or keys.
        sizes: Sizes of the axes by letter.

    Returns:
        Numbers [*sizes of `wanted`, 2] of the map outputs in the first and the last feature, −1 for
        entries that no map made; None if unknown.
    """
    if "entries" not in tag.followers or not tag.maps:
        return None
    axes = [c for c in wanted if c in letters]
    summed = [c for c in letters if c not in wanted]
    numbers = tag.followers["entries"]().permute([letters.index(c) for c in axes + summed])
    numbers = numbers.flatten(len(axes)) if summed else numbers[..., None]
    size = dict(zip(axes, numbers.shape, strict=False))
    numbers = numbers[..., [0, -1]].reshape([size.get(c, 1) for c in wanted] + [2])
    return numbers.expand([sizes[c] for c in wanted] + [2])


def _list_maps(tag, entries):
    """Lists the linear maps of which a tensor contains one of these outputs.

    Args:
        tag: Tag of the tensor, the record of its origin.
        entries: Numbers of the outputs, Int of any shape; −1 for none.
    """
    return [m for m in tag.list_maps() if (m.find_rows(entries) >= 0).any()]


def _find_places(entries, used, sources):
    """Finds for each token the row that it comes from, counted over all sources together.

    Args:
        entries: Numbers of entries of the maps' outputs, for the first and the last feature of each
            token [..., n, 2].
        used: The maps that gave them.
        sources: The sources; the rows of the second are counted after those of the first.

    Returns:
        Places [g, n], −1 for none; None if a map that is used reads none of them.

    Raises:
        LeftOut: A row of weights belongs to several tokens, as in attention among features.
    """
    offsets, total = {}, 0
    for source in sources:
        offsets[source], total = total, total + source.count
    places = _trace_entries(entries, used, offsets, total)
    if places is None:
        return None
    first, last = places.unbind(dim=-1)
    if ((first != last) & (first >= 0) & (last >= 0)).any():
        raise LeftOut("its softmax is not taken over the keys of tokens")
    return places.amax(dim=-1).reshape(-1, places.shape[-2])


def _trace_entries(entries, maps, offsets, total):
    """Traces entries to the rows of several sources, also through maps one after the other.

    Args:
        entries: Numbers of any shape.
        maps: Maps that may have made them.
        offsets: {source: number of rows before its own}.
        total: Number of rows.

    Returns:
        Places of that shape, −1 for none; None if a map reads none of the sources.
    """
    places = torch.full_like(entries, -1)
    for linear_map in maps:
        rows, source = linear_map.find_rows(entries), linear_map.source
        if source in offsets:
            places = torch.where(rows < 0, places, rows + offsets[source])
        elif (rows >= 0).any():
            earlier = _trace_source(source, offsets, total)
            if earlier is None:
                return None
            places = torch.where(rows < 0, places, earlier[rows.clamp(min=0)])
    return places


def _trace_source(source, offsets, total):
    """Traces the rows of a source to the rows of others.

    Args:
        source: Tensor of tokens, row by row.
        offsets: {one of the others: number of rows before its own in the joined rows}.
        total: Number of joined rows.

    Returns:
        Places of the rows of the source among the joined rows; None if they are unknown.
    """
    entries = source.read_entries()
    if entries is not None:
        places = _trace_entries(entries, source.tag.list_maps(), offsets, total)
        if places is not None and (places >= 0).all() and (places[:, 0] == places[:, 1]).all():
            return places[:, 0]
    if len(offsets) == 1 and source.count == total:  # one row for each
        device = next(iter(offsets)).matrix.device
        return torch.arange(total, device=device)
    return None


def find_allowed_tokens(tokens: Tokens, allowed: Tensor) -> Tensor | None:
    """Finds which token a token may attend to, where the keys may stand in another order than the
    queries.

    Args:
        tokens: Tokens of the queries, and which of them each key is.
        allowed: Bool [e or 1, n, m], which key a query may attend to.

    Returns:
        Bool [e or 1, n, n]; None for cross-attention, or if a token has no key or keys are unknown.
    """
    if tokens.is_cross or tokens.keys is None:
        return None
    if tokens.has_own_keys():
        return allowed
    match = tokens.keys[:, None] == tokens.index[:, :, None]
    if not match.any(dim=-1).all():
        return None
    n, m = allowed.shape[-2:]
    place = match.int().argmax(dim=-1)[:, None].expand(-1, n, -1)
    return allowed.expand(len(place), n, m).gather(2, place)


def find_shared_sources(maps: Sequence[Map], query: Tag, key: Tag) -> list[Source] | None:
    """Finds the tensors from which both queries and keys are made.

    Args:
        maps: Linear maps that gave the queries.
        query, key: Tags of both.

    Returns:
        The tensors behind the fewest maps. [] if both have the same roots but separate ways from
        them, such as two norms, or if keys come from the same rows of the stream in an earlier
        layer. None if keys come from other tokens.
    """
    read = [linear_map.source for linear_map in maps]
    read_by_keys = [linear_map.source for linear_map in key.list_maps()]
    is_same_rows = {source.count for source in read} == {source.count for source in read_by_keys}
    if is_same_rows and _list_makers(read) == _list_makers(read_by_keys):
        return [source for source in dict.fromkeys(read) if source in read_by_keys]
    while maps:
        sources = list(dict.fromkeys(linear_map.source for linear_map in maps))
        shared = [source for source in sources if source in key.behind]
        if any(source.matrix is None for source in shared):
            break  # of another layer
        if shared:
            return shared
        maps = [earlier for source in sources for earlier in source.tag.list_maps()]
    if _list_roots(query) == _list_roots(key):
        return []
    is_earlier = set(key.past) <= set(query.past) and not query.stream.isdisjoint(key.stream)
    return [] if is_earlier and is_same_rows else None


def _list_makers(sources):
    """List the linear maps, and the tensors that no map made, from which tensors of tokens directly
    come."""
    return {a for source in sources for a in source.tag.maps | source.tag.behind}


def _list_roots(tag):
    """Lists the tensors that no linear map made, such as embedded tokens, behind a tensor."""
    return {tensor for tensor in tag.behind if not isinstance(tensor, Source)}
