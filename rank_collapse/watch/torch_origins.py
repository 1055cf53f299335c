"""Where tensors come from: the linear maps behind queries and keys, and the tokens that maps read.

While a measured pass runs, each tensor has a `Tag`. It names the linear maps that made the tensor.
Its followers are moved through the same views as the tensor, once somebody asks: the numbers of the
entries that a map gave, or the softmax behind weights. So no shape is guessed, and no tensor is
changed.

Axis letters: n queries, m keys, k width; others as in an equation of `einsum`.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from rank_collapse.watch.torch_functions import (
    EXPONENTIALS,
    JOINS,
    MOVES,
    PRODUCTS,
    SOFTMAX,
    Product,
    floats_in,
)
from rank_collapse.watch.torch_products import is_allowed


@dataclasses.dataclass(eq=False)
class Source:
    """A tensor as linear maps read it: a matrix.

    Attributes:
        tag: Of the tensor.
        order: Of its axes, those of rows first.
        count: How many rows there are.
        matrix: [count, d]; None after the layer that read it.
    """

    tag: "Tag"
    order: list[int]
    count: int
    matrix: Tensor | None = None


@dataclasses.dataclass(eq=False)
class Map:
    """A linear map that ran.

    Attributes:
        source: What it read.
        parameters: ((parameter, axis of its outputs or −1, the first of them), ...); None for a
            part of one.
        frames: Numbers of the modules that ran then.
        start, count: The number of its first entry, and how many there are, row by row.
        width: How many of them are of one row.
        has_rows: Whether its rows are those of its source.
    """

    source: Source
    parameters: tuple[tuple[Any, int, int], ...]
    frames: tuple[int, ...]
    start: int
    count: int
    width: int
    has_rows: bool

    def find_rows(self, entries: Tensor) -> Tensor:
        """Finds the row of the source of each entry; −1 for those of other maps."""
        is_inside = (entries >= self.start) & (entries < self.start + self.count) & self.has_rows
        return torch.where(is_inside, (entries - self.start) // self.width, -1)


@dataclasses.dataclass(eq=False)
class Term:
    """A product of queries and keys.

    Attributes:
        letters: Of the axes of queries, of keys and of their product.
        sizes: Of the letters.
        query, key: Tags of both.
    """

    letters: tuple[str, str, str]
    sizes: dict[str, int]
    query: "Tag"
    key: "Tag"


@dataclasses.dataclass(eq=False)
class Tag:
    """What is said of one tensor.

    Attributes:
        maps: Those that made it, without those behind them.
        behind: What all maps behind it read, and its roots: what no map made.
        past: Names of the attentions that it comes from, the first that ran first.
        parameters: If it comes from parameters alone, which.
        terms: The products of queries and keys whose sum it is, or comes from.
        is_softmax: Whether a softmax came after them.
        followers: {name: a function that gives a tensor of the same shape}: numbers of "entries",
            −1 for no map's; "allowed", Bool, the keys of a query; "softmax".
        source: It, if a map read it.
    """

    maps: frozenset[Map] = frozenset()
    behind: frozenset[Any] = frozenset()
    past: tuple[str, ...] = ()
    parameters: tuple[Any, ...] = ()
    terms: tuple[Term, ...] = ()
    is_softmax: bool = False
    followers: dict[str, Callable[[], Tensor]] = dataclasses.field(default_factory=dict)
    source: Source | None = None

    def list_maps(self) -> list[Map]:
        """Lists the maps that made it, in order."""
        return sorted(self.maps, key=lambda linear_map: linear_map.start)


def join_pasts(tags: Iterable[Tag]) -> tuple[str, ...]:
    """Lists the names of the attentions that tensors come from."""
    return tuple(dict.fromkeys(name for tag in tags for name in tag.past))


def _join_tags(tags, terms=(), is_softmax=False):
    """Returns the tag of what comes from several tensors."""
    maps = frozenset().union(*(tag.maps for tag in tags))
    behind = frozenset().union(*(tag.behind for tag in tags))
    return Tag(maps, behind, join_pasts(tags), terms=terms, is_softmax=is_softmax)


class Origins:
    """The tags of one pass.

    Args:
        frames: Of the modules that run, each with its `number`.
    """

    def __init__(self, frames: Sequence[Any]):
        self._frames = frames
        self._tags: Any = WeakIdKeyDictionary()
        self._recent: list[Tag] = []  # those of the layer that runs
        self._num_entries = 0

    def tag(self, tensor: Tensor) -> Tag:
        """Returns the tag of a tensor, made where it has none: of a parameter, or of a root."""
        if tensor not in self._tags:
            if isinstance(tensor, nn.Parameter):
                self._record(tensor, Tag(parameters=(tensor,)))
            else:
                self.begin(tensor, ())
        return self._tags[tensor]

    def _record(self, tensor, tag):
        self._tags[tensor] = tag
        self._recent.append(tag)

    def begin(self, tensor: Tensor, past: tuple[str, ...]) -> None:
        """Makes a tensor one that no map made, such as the result of an attention.

        Args:
            tensor: It.
            past: Names of the attentions that it comes from.
        """
        self._record(tensor, Tag(behind=frozenset([object()]), past=past))

    def has(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has a tag."""
        return tensor in self._tags

    def forget_layer(self) -> None:
        """Drops what a layer's maps read, and numbers; a checkpointed layer holds none either."""
        for tag in self._recent:
            tag.followers.clear()
            if tag.source is not None:
                tag.source.matrix = None
        self._recent.clear()

    def see_function(
        self, function: Any, product: Product | None, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Records where the results of a function come from.

        Args:
            function: Of torch.
            product: What it multiplies, as `read_product` reads it.
            args, kwargs, result: Of its call.
        """
        outputs = floats_in(args[0] if function is Tensor.__setitem__ else result)
        inputs = floats_in([args, kwargs])
        if not outputs or not inputs:
            return
        if product is not None and self._see_product(function, product, inputs, outputs[0]):
            return
        self._derive_tags(function, (args, kwargs), inputs, outputs)
        if function in SOFTMAX | EXPONENTIALS and outputs[0].ndim > 2:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            self._see_softmax(function, inputs[0], dim, outputs[0])

    def see_module(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Records a module whose code torch does not show: a linear map, if it can be one.

        Args:
            module: It.
            inputs: All arguments of its call.
            output: Its first tensor.
        """
        tensors, parameters = floats_in(inputs), list(module.parameters())
        if not tensors:
            return
        x, matrices = tensors[0], [parameter for parameter in parameters if parameter.ndim > 1]
        if matrices and x.shape[:-1] == output.shape[:-1] and not [*module.children()]:
            axes = string.ascii_lowercase[: x.ndim - 1]
            product = Product(x, matrices[0], (f"{axes}y", "z", f"{axes}z"))
            self._see_map(product, parameters, output)
        else:
            self._derive_tags(None, (), tensors, [output])

    def _see_product(self, function, product, inputs, output):
        """Records a linear map, or a product of queries and keys; returns whether it is one."""
        is_weight = [self._is_weight(factor) for factor in product[:2]]
        if function not in PRODUCTS or any(is_weight):
            if is_weight == [True, False] and function in PRODUCTS:
                product = product.swap()
            tag = self.tag(product.first)
            if tag.terms or tag.is_softmax:
                return False  # heads are mixed
            self._see_map(product, [a for a in inputs if a is not product.first], output)
            return True
        if product.letters[2][-2] not in product.letters[0]:
            product = product.swap()
        query, key = self.tag(product.first), self.tag(product.second)
        sizes = dict(zip(product.letters[2], output.shape, strict=True))
        terms = (Term(product.letters, sizes, query, key),)
        self._record(output, _join_tags([query, key], terms))
        return True

    def _is_weight(self, tensor):
        return isinstance(tensor, nn.Parameter) or bool(self._tags.get(tensor, Tag()).parameters)

    def _see_map(self, product, parameters, output):
        """Records a linear map, and keeps what it read.

        Args:
            product: Of its input and its weight.
            parameters: Tensors of its call but for the input.
            output: Its result.
        """
        (read, weight, result), x = product.letters, product.first
        axes = [c for c in read if c in result]
        features = [c for c in result if c not in read]
        source = self._read_source(x, [read.index(c) for c in axes])
        sizes = dict(zip(result, output.shape, strict=True))
        shape = [sizes[c] for c in axes + features]
        has_rows = [x.shape[read.index(c)] for c in axes] == shape[: len(axes)]
        axis = weight.find(features[0]) if len(features) == 1 else -1
        shares = tuple(self._read_parameter(a, axis) for a in parameters)
        running = tuple(frame.number for frame in self._frames)
        entries = self._num_entries, output.numel(), math.prod(shape[len(axes) :]), has_rows
        linear_map = Map(source, shares, running, *entries)
        self._num_entries += output.numel()
        tag = Tag(frozenset([linear_map]), source.tag.behind | {source}, source.tag.past)

        @functools.cache
        def number_entries():
            numbers = torch.arange(linear_map.count, device=output.device).reshape(shape)
            order = [(axes + features).index(c) for c in result]
            return (numbers + linear_map.start).permute(order)

        tag.followers["entries"] = number_entries
        self._record(output, tag)

    def _read_source(self, x, axes):
        """Returns what a map reads: a tensor as a matrix.

        Args:
            x: The tensor.
            axes: Those of rows.
        """
        tag, order = self.tag(x), axes + [i for i in range(x.ndim) if i not in axes]
        count = math.prod(x.shape[i] for i in axes)
        if tag.source is None or tag.source.order != order:
            tag.source = Source(tag, order, count)
        tag.source.matrix = x.detach().permute(order).reshape(count, x.numel() // max(count, 1))
        self._recent.append(tag)
        return tag.source

    def _read_parameter(self, tensor, axis):
        """Reads which parameter a weight is, or is made of.

        Args:
            tensor: The weight.
            axis: Of the outputs in it.

        Returns:
            (the parameter, axis of the outputs or −1, the first of them); (None, −1, 0) if unknown.
        """
        axis = 0 if tensor.ndim == 1 else axis
        if isinstance(tensor, nn.Parameter):
            return tensor, axis, 0
        parameters = self._tags.get(tensor, Tag()).parameters
        if len(parameters) != 1:
            return None, -1, 0
        parameter = parameters[0]
        if parameter.numel() == tensor.numel():
            return parameter, -1, 0
        is_slice = tensor._base is parameter and tensor.is_contiguous()
        if is_slice and tensor.shape[1:] == parameter.shape[1:] and axis == 0:
            return parameter, axis, tensor.storage_offset() // tensor.stride(0)
        return None, -1, 0

    def _derive_tags(self, function, arguments, inputs, outputs):
        """Records another function: its results come from where its arguments come from.

        Args:
            function, arguments: The call, with (args, kwargs).
            inputs, outputs: Its tensors of floats.
        """
        tagged = [(self.tag(a), a) for a in inputs if self.has(a) or self._is_weight(a)]
        pairs = [(tag, a) for tag, a in tagged if not tag.parameters]
        if not pairs and len(tagged) == len(inputs):
            parameters = tuple(dict.fromkeys(p for tag, _ in tagged for p in tag.parameters))
            for output in outputs:
                self._record(output, Tag(parameters=parameters))
            return
        pairs = pairs or [(self.tag(a), a) for a in inputs if not self._is_weight(a)]
        names = dict.fromkeys(name for tag, _ in pairs for name in tag.followers)
        is_move = function in MOVES and (len(pairs) == 1 or function in JOINS)
        for i, output in enumerate(outputs):
            tag = _join_tags([tag for tag, _ in pairs], *_merge_terms(pairs, output))
            for name in names:
                if is_move:
                    followers = pytree.tree_map(self._find_follower(name), arguments)
                    move = functools.partial(_move_followers, function, followers, i)
                    tag.followers[name] = functools.cache(move)
                else:
                    alike = [t for t, a in pairs if name in t.followers and a.shape == output.shape]
                    if alike:
                        tag.followers[name] = alike[0].followers[name]
            self._record(output, tag)

    def _find_follower(self, name):
        """Returns a function that gives the follower of a tensor, and other arguments as they are.

        Args:
            name: Of the followers.
        """

        def find(argument):
            if not floats_in(argument):
                return argument
            options = {"size": argument.shape, "fill_value": -1, "device": argument.device}
            followers = self._tags.get(argument, Tag()).followers
            return followers.get(name, functools.partial(torch.full, **options))

        return find

    def _see_softmax(self, function, x, dim, result):
        """Records a softmax, or the exponentials of one that is computed by hand.

        Args:
            function: Of `SOFTMAX` or `EXPONENTIALS`.
            x, result: Scores, and what it makes of them.
            dim: Over which it sums.
        """
        terms, tag = self.tag(x).terms, self.tag(result)
        if function in SOFTMAX:
            tag.terms = terms
            tag.is_softmax = True
            tag.followers = {}
        if terms and dim in (-1, x.ndim - 1):  # over keys
            allowed, softmax = is_allowed(x.detach()), result.detach()
            tag.followers["allowed"] = lambda: allowed
            if function in SOFTMAX:
                tag.followers["softmax"] = lambda: softmax


def _move_followers(function, arguments, i):
    """Applies a function that moves entries to followers.

    Args:
        function: Of `MOVES`.
        arguments: (args, kwargs) of its call, with functions that give followers.
        i: Which of several results.
    """
    args, kwargs = pytree.tree_map(lambda a: a() if callable(a) else a, arguments)
    if function is torch.view_as_complex:
        args = [a.double() for a in args]
    result = function(*args, **kwargs)
    result = result if isinstance(result, Tensor) else result[i]
    return result.long() if function is torch.view_as_real else result


def _merge_terms(pairs, output):
    """Returns the terms that a result still has, and whether it comes from a softmax.

    Of the arguments those count that have its size, or its queries.

    Args:
        pairs: (tag, tensor) of each argument.
        output: The result.
    """
    tags = []
    for tag, x in pairs:
        if x.ndim > 1 and output.ndim > 1:
            is_same_size = x.numel() == output.numel()
            if is_same_size or x.shape[-2] == output.shape[-2]:
                tags.append(tag)
    terms = dict.fromkeys(term for tag in tags for term in tag.terms)
    return tuple(terms), any(tag.is_softmax for tag in tags)


def find_shared_sources(maps: Sequence[Map], query: Tag, key: Tag) -> list[Source] | None:
    """Finds what queries and keys are both made of.

    Args:
        maps: Linear maps that gave the queries.
        query, key: Tags of both.

    Returns:
        What stands behind the fewest maps; [] if both have the same roots by ways of their own,
        such as two norms; None if keys are of other tokens.
    """
    while maps:
        sources = list(dict.fromkeys(linear_map.source for linear_map in maps))
        shared = [source for source in sources if source in key.behind]
        if shared:
            return shared
        maps = [earlier for source in sources for earlier in source.tag.list_maps()]
    return [] if _list_roots(query) == _list_roots(key) else None


def _list_roots(tag):
    """Lists what no map made, behind a tensor."""
    return {tensor for tensor in tag.behind if not isinstance(tensor, Source)}


def find_features(tag: Tag, linear_map: Map) -> Tensor | None:
    """Finds Bool [width], the features of a map's output in a tensor; None if unknown.

    Args:
        tag: Of the tensor.
        linear_map: The map.
    """
    if "entries" not in tag.followers:
        return None
    entries, width = tag.followers["entries"]() - linear_map.start, linear_map.width
    is_inside = (entries >= 0) & (entries < linear_map.count)
    features = torch.zeros(width + 1, dtype=torch.bool, device=entries.device)
    features[torch.where(is_inside, entries % width, width)] = True
    return features[:-1] if features[:-1].any() else None
