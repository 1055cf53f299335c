"""Where tensors come from: the linear maps behind queries and keys, and the tokens that maps read.

While a measured pass runs, each tensor has a `Tag`. Tags say which linear maps made a tensor, and,
if asked, which row of which map's input each of its entries belongs to. That is computed by moving
numbers through the same views, so no shape is guessed. No tensor is changed.

Axis letters: n queries, m keys, k width; others as in an equation of `einsum`.
"""

import functools
import math
import string
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from rank_collapse.watch.recorder import LeftOut

KEPT = 32  # inputs of the last maps that are kept, those of one layer


def _named(*names):
    """The functions of these names, of `torch` and of tensors."""
    every = [getattr(place, name, None) for name in names for place in (torch, Tensor)]
    return {function for function in every if function is not None}


CONVOLUTIONS = {functional.conv1d, functional.conv2d, functional.conv3d}
PRODUCTS = _named("matmul", "mm", "bmm", "baddbmm", "einsum", "__matmul__")
MAPS = PRODUCTS | CONVOLUTIONS | {functional.linear} | _named("addmm")
JOINS = _named("cat", "concat", "stack", "hstack", "vstack")
MOVES = JOINS | _named(
    "view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "squeeze",
    "unsqueeze", "expand", "chunk", "split", "split_with_sizes", "tensor_split", "unbind",
    "__getitem__", "narrow", "select", "movedim", "swapaxes", "swapdims", "repeat", "tile",
    "repeat_interleave", "broadcast_to", "roll", "flip", "index_select", "expand_as", "view_as",
    "moveaxis",
)  # fmt: skip
MOVES |= {Tensor.T.__get__, Tensor.mT.__get__}


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Gives the tensors among arguments or results, also of tuples, lists and mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple) and not isinstance(values, torch.Size):
        for value in values:
            yield from tensors_in(value)


class Origin:
    """A linear map that ran, or a tensor that no map made: its `source` is None.

    Attributes:
        number: In the order of running.
        source: The `Tag` of the tensor that the map read.
        depth: Of maps one after the other, 0 for none.
        parameters: ((parameter, axis of its outputs or −1), ...); None for a part of one.
        frames: Numbers of the modules that ran then.
        start: The first of the numbers of its outputs, start + row · width + feature.
        rows, width: How many tokens it read, and how many features it gave of each.
    """

    def __init__(self, number, source=None, parameters=(), frames=(), start=0, rows=0, width=1):
        self.number, self.source, self.parameters = number, source, parameters
        self.depth = 1 + max((o.depth for o in source.origins), default=0) if source else 0
        self.frames, self.start, self.rows, self.width = frames, start, rows, width


class Tag:
    """What is said of one tensor.

    Attributes:
        origins: The maps that made it, without those behind them.
        past: Names of the attentions that it comes from.
        parameters: If it comes from parameters alone, which.
        scores: If it comes from products of queries and keys, those.
        places: A function that gives the number of the map's output at each entry, or None.
        is_exact: Whether `places` has all that made it.
        parts: Where it has not, tags of the arguments; None where only a part of them is in it.
    """

    def __init__(self, origins=frozenset(), past=frozenset(), parameters=(), places=None):
        self.origins, self.past, self.parameters, self.places = origins, past, parameters, places
        self.scores: Scores | None = None
        self.is_exact, self.parts = places is not None, ()

    def maps(self) -> list[Origin]:
        """Gives the linear maps among its origins, in order."""
        return sorted((o for o in self.origins if o.source is not None), key=_number)


class Scores:
    """Products of queries and keys, and what a softmax made of them.

    Attributes:
        terms: The products, which are added.
        number: Of the softmax; equal for all that comes from it.
        weights: What the softmax gave, [..., n, m].
        allowed: Bool like it, which keys a query may attend to.
    """

    def __init__(self, terms, number=None, weights=None, allowed=None):
        self.terms, self.number, self.weights, self.allowed = terms, number, weights, allowed


class Term:
    """A product of queries and keys: its letters, their sizes, and the tags of both factors."""

    def __init__(self, letters, sizes, query, key):
        self.letters, self.sizes, self.query, self.key = letters, sizes, query, key


class Product:
    """A product of two tensors by letters: of the first, of the second, of the result."""

    def __init__(self, first, second, *letters):
        self.first, self.second, self.letters = first, second, letters


def _number(origin):
    return origin.number


def read_product(function: Any, args: Any, kwargs: Any) -> Product | None:
    """Reads which two tensors are multiplied, or None where that is not a product of matrices."""
    tensors = list(tensors_in([args, kwargs]))
    if function in _named("einsum"):
        return _read_einsum(args, tensors)
    if function in CONVOLUTIONS:
        x, weight = tensors[:2]
        space = string.ascii_lowercase[: x.ndim - 2]
        return Product(x, weight, f"xy{space}", "", f"xz{space}") if x.ndim == weight.ndim else None
    if function is functional.linear:
        x, weight = tensors[:2]
        letters = string.ascii_lowercase[: x.ndim - 1]
        return Product(x, weight, letters + "y", "zy", letters + "z") if weight.ndim == 2 else None
    a, b = tensors[-2:] if len(tensors) > 1 else (tensors[0], tensors[0])
    if min(a.ndim, b.ndim) < 2:
        return None
    count = max(a.ndim, b.ndim) - 2
    letters = string.ascii_lowercase[:count]
    of_a, of_b = letters[count - a.ndim + 2 :], letters[count - b.ndim + 2 :]
    return Product(a, b, of_a + "xy", of_b + "yz", letters + "xz")


def _read_einsum(args, tensors):
    if not isinstance(args[0], str) or "->" not in args[0] or len(tensors) != 2:
        return None
    inputs, result = args[0].replace(" ", "").split("->")
    letters = inputs.split(",")
    free = [c for c in string.ascii_uppercase if c not in args[0]]
    count = max(
        t.ndim - len(own.replace("...", "")) for t, own in zip(tensors, letters, strict=True)
    )
    for i, tensor in enumerate(tensors):
        dots = free[:count][count - (tensor.ndim - len(letters[i].replace("...", ""))) :]
        letters[i] = letters[i].replace("...", "".join(dots))
    result = result.replace("...", "".join(free[:count]))
    return Product(*tensors, *letters, result)


class Origins:
    """The tags of one pass.

    Args:
        frames: A function that gives the numbers of the modules that run.
    """

    def __init__(self, frames: Callable[[], tuple[int, ...]]):
        self._frames = frames
        self._tags: Any = WeakIdKeyDictionary()
        self._inputs: OrderedDict[int, Tensor] = OrderedDict()
        self._count, self._next = 0, 0

    def tag(self, tensor: Tensor) -> Tag:
        """Gives the tag of a tensor; a new one without origins where it has none."""
        tag = self._tags.get(tensor)
        if tag is None:
            is_parameter = isinstance(tensor, nn.Parameter)
            tag = Tag(parameters=(tensor,)) if is_parameter else Tag(frozenset([self._origin()]))
            self._tags[tensor] = tag
        return tag

    def begin(self, tensor: Tensor, past: frozenset[str]) -> None:
        """Makes a tensor one that no map made, such as the result of an attention."""
        self._tags[tensor] = Tag(frozenset([self._origin()]), past)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor has a tag."""
        return tensor in self._tags

    def see_module(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Tags what a module gave by code that torch does not show."""
        floats = [a for a in tensors_in(inputs) if a.is_floating_point()]
        if not floats:
            return
        x, matrices = floats[0], [p for p in module.parameters() if p.ndim > 1]
        letters = string.ascii_lowercase[: x.ndim - 1]
        if matrices and x.shape[:-1] == output.shape[:-1] and not [*module.children()]:
            product = Product(x, matrices[0], letters + "y", "", letters + "z")
            self._see_map(product, [*module.parameters()], {}, output)
        else:
            self._derive(None, (), {}, floats, [output])

    def forget(self) -> None:
        """Lets go of the inputs of maps."""
        self._inputs.clear()

    def rows_of(self, origin: Origin) -> Tensor:
        """Gives what a map read, [rows, d].

        Raises:
            LeftOut: It ran too long ago.
        """
        if origin.number not in self._inputs:
            raise LeftOut("what made its queries ran in another layer")
        return self._inputs[origin.number]

    def see(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Tags the results of a function of torch."""
        result = args[0] if function is Tensor.__setitem__ else result
        outputs = [a for a in tensors_in(result) if a.is_floating_point() or a.is_complex()]
        if not outputs:
            return
        product = read_product(function, args, kwargs) if function in MAPS else None
        if product is not None and self._see_product(function, product, args, kwargs, outputs[0]):
            return
        inputs = [a for a in tensors_in([args, kwargs]) if a.is_floating_point() or a.is_complex()]
        if inputs:
            self._derive(function, args, kwargs, inputs, outputs)

    def _origin(self, *what):
        self._count += 1
        return Origin(self._count, *what)

    def _see_product(self, function, product, args, kwargs, output):
        """Whether a product is a linear map or one of queries and keys, which is tagged."""
        is_weight = [self._is_weight(a) for a in (product.first, product.second)]
        if function not in PRODUCTS or any(is_weight):
            if is_weight == [True, False] and function in PRODUCTS:
                of_first, of_second, result = product.letters
                product = Product(product.second, product.first, of_second, of_first, result)
            if self.tag(product.first).scores is not None:
                return False  # heads are mixed
            self._see_map(product, args, kwargs, output)
            return True
        tags = self.tag(product.first), self.tag(product.second)
        if any(tag.scores is not None for tag in tags):
            return False
        first, second, both = product.letters
        sizes = dict(zip(both, output.shape, strict=True))
        term = Term((first, second, both), sizes, *tags)
        if both[-2] not in first:
            term = Term((second, first, both), sizes, *tags[::-1])
        past = tags[0].past | tags[1].past
        self._tags[output] = tag = Tag(tags[0].origins | tags[1].origins, past)
        tag.scores = Scores((term,))
        return True

    def _is_weight(self, tensor):
        tag = self._tags.get(tensor)
        return isinstance(tensor, nn.Parameter) or (tag is not None and bool(tag.parameters))

    def _see_map(self, product, args, kwargs, output):
        """Tags the output of a linear map, and keeps what it read."""
        (read, weight, result), x = product.letters, product.first
        source = self.tag(x)
        kept = [c for c in read if c in result]
        features = [c for c in result if c not in read]
        order = [read.index(c) for c in kept + [c for c in read if c not in result]]
        rows = math.prod(x.shape[i] for i in order[: len(kept)])
        sizes = dict(zip(result, output.shape, strict=True))
        shape, letters = [sizes[c] for c in kept + features], kept + features
        width, start = output.numel() // max(rows, 1), self._next
        axis = weight.find(features[0]) if weight and len(features) == 1 else -1 if weight else 0
        parameters = [self._parameter_of(a, axis) for a in tensors_in([args, kwargs]) if a is not x]
        origin = self._origin(source, tuple(parameters), self._frames(), start, rows, width)
        places = None
        if rows * width == output.numel() == math.prod(shape):
            self._next += output.numel()
            device, moved = x.device, [letters.index(c) for c in result]

            def places():
                numbers = torch.arange(start, start + rows * width, device=device)
                return numbers.reshape(shape).permute(moved)

            places = functools.cache(places)
        matrix = x.detach().permute(order).reshape(rows, x.numel() // max(rows, 1))
        self._inputs[origin.number] = matrix
        if len(self._inputs) > KEPT:
            self._inputs.popitem(last=False)
        self._tags[output] = Tag(frozenset([origin]), source.past, places=places)

    def _parameter_of(self, tensor, axis):
        """(parameter, axis of its outputs or −1) of a weight; (None, −1) of a part of one."""
        if isinstance(tensor, nn.Parameter):
            return tensor, 0 if tensor.ndim == 1 else axis
        tag = self._tags.get(tensor)
        parameters = tag.parameters if tag else ()
        same = len(parameters) == 1 and parameters[0].numel() == tensor.numel()
        return (parameters[0] if same else None), -1

    def _derive(self, function, args, kwargs, inputs, outputs):
        """Tags what some other function makes: it comes from where its arguments come from."""
        tags = [self.tag(a) if self._is_weight(a) else self._tags.get(a) for a in inputs]
        if all(tag is not None and tag.parameters for tag in tags):
            parameters = tuple(dict.fromkeys(p for tag in tags for p in tag.parameters))
            for output in outputs:
                self._tags[output] = Tag(parameters=parameters)
            return
        if not any(tag is not None and not tag.parameters for tag in tags):
            tags = [tag or self.tag(a) for tag, a in zip(tags, inputs, strict=True)]
        pairs = [(t, a) for t, a in zip(tags, inputs, strict=True) if t and not t.parameters]
        origins = frozenset().union(*(tag.origins for tag, _ in pairs))
        past = frozenset().union(*(tag.past for tag, _ in pairs))
        scores = self._scores_of(pairs)
        moves = function in MOVES and (len(pairs) == 1 or function in JOINS)
        for i, output in enumerate(outputs):
            places = self._places_of(function, args, kwargs, pairs, output, i, moves)
            self._tags[output] = tag = Tag(origins, past, places=places)
            tag.scores = scores if scores is not None and _is_like(output, pairs) else None
            is_same = len(pairs) == 1 and pairs[0][1].shape == output.shape
            tag.is_exact = (moves or is_same) and all(part.is_exact for part, _ in pairs)
            is_part = moves and function not in JOINS and output.numel() < pairs[0][1].numel()
            tag.parts = None if is_part else tuple(part for part, _ in pairs)

    @staticmethod
    def _scores_of(pairs):
        every = list(dict.fromkeys(tag.scores for tag, _ in pairs if tag.scores is not None))
        if len(every) < 2:
            return every[0] if every else None
        numbered = [scores for scores in every if scores.number is not None]
        if len(numbered) == 1:
            return numbered[0]
        terms = tuple(dict.fromkeys(term for scores in every for term in scores.terms))
        if not numbered:
            return Scores(terms)
        return Scores(terms, numbered[0].number, None, numbered[0].allowed)

    def _places_of(self, function, args, kwargs, pairs, output, i, moves):
        """A function that gives the places of a result, or None."""
        if function in JOINS:
            return self._places_of_join(function, args, kwargs)
        tag, x = next(((t, a) for t, a in pairs if t.places is not None), (None, None))
        if tag is None:
            return None
        if moves:
            rest, places = args[1:], tag.places
            return functools.cache(lambda: _nth(function(places(), *rest, **kwargs), i))
        if function is torch.view_as_complex:
            return functools.cache(lambda: tag.places()[..., 0])
        if function is torch.view_as_real:
            return functools.cache(lambda: tag.places()[..., None].expand(*x.shape, 2))
        same = (t.places for t, a in pairs if t.places is not None and a.shape == output.shape)
        return next(same, None)

    def _places_of_join(self, function, args, kwargs):
        """Those of joined tensors: −1 where what is joined comes from no map."""
        pieces = [(self._tags.get(a), a.shape, a.device) for a in tensors_in([args, kwargs])]
        if not any(tag and tag.places for tag, _, _ in pieces):
            return None
        rest = args[1:]
        named = {name: value for name, value in kwargs.items() if name in ("dim", "axis")}

        def places():
            numbers = [
                tag.places() if tag and tag.places else torch.full(shape, -1, device=device)
                for tag, shape, device in pieces
            ]
            return function(numbers, *rest, **named)

        return functools.cache(places)

    def see_softmax(self, args: Any, kwargs: Any, result: Tensor, hidden: float) -> None:
        """Tags what a softmax made, after `see`; scores below `hidden` are of no key."""
        x = next(tensors_in([args, kwargs]))
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        scores = self.tag(x).scores
        self._count += 1
        tag = self.tag(result)
        tag.scores = Scores(scores.terms if scores else (), self._count)
        if scores is not None and dim in (-1, x.ndim - 1):
            tag.scores.weights, tag.scores.allowed = result.detach(), x.detach() > hidden

    def see_exponential(self, x: Tensor, result: Tensor, hidden: float) -> None:
        """Tags exponentials of scores, of a softmax by hand: which keys a mask leaves out."""
        scores = self.tag(x).scores
        if scores is not None and scores.terms and x.ndim > 2:
            self.tag(result).scores = Scores(scores.terms, None, None, x.detach() > hidden)


def _nth(result, i):
    return result if isinstance(result, Tensor) else result[i]


def _is_like(output, pairs):
    """Whether a result may still be scores [..., n, m]: of their size, or with other keys."""
    for tag, x in pairs:
        if tag.scores is None or output.ndim < 2:
            continue
        turned = output.shape[-2:] == x.shape[:-3:-1]
        if output.numel() == x.numel() or turned or output.shape[-2] == x.shape[-2]:
            return True
    return False


def common_sources(queries: Tag, keys: Tag) -> list[Tag] | None:
    """Gives the tensors that both queries and keys are made of; None if keys are of other tokens.

    [] if both come from the same tensor by ways of their own, such as two norms.
    """
    a, b = set(queries.maps()), set(keys.maps())
    both = {o.source for o in a} & {o.source for o in b}
    if both:
        return list(dict.fromkeys(o.source for o in queries.maps() if o.source in both))
    return meet(a, b)


def meet(a: set[Origin], b: set[Origin]) -> list[Tag] | None:
    """Follows maps to what they read until both sets are of the same tensors, see above."""
    a, b = set(a), set(b)
    for _ in range(1000):
        sources = {o.source or o for o in a}
        if sources == {o.source or o for o in b} and any(isinstance(s, Tag) for s in sources):
            read = sorted((o for o in a if o.source is not None), key=_number)
            return list(dict.fromkeys(o.source for o in read))
        if a == b:
            return []
        last = max(a ^ b, key=lambda origin: origin.depth)
        if last.source is None:
            return None
        for side in (a, b):
            if last in side:
                side.remove(last)
                side |= last.source.origins
    return None


def along(letters: str, wanted: str, tag: Tag, sizes: dict[str, int]) -> Tensor | None:
    """Gives the places [wanted] of a factor; None if unknown.

    Args:
        letters: Of the factor's axes.
        wanted: Those of the result, batch axes and queries or keys.
        tag: Of the factor.
        sizes: Of the letters.

    Raises:
        LeftOut: A row of weights is of several tokens, as in attention among features.
    """
    if tag.places is None:
        return None
    kept = [c for c in wanted if c in letters]
    summed = [c for c in letters if c not in wanted]
    numbers = tag.places().permute([letters.index(c) for c in kept + summed])
    numbers = numbers.flatten(len(kept)) if summed else numbers[..., None]
    first, last = numbers[..., 0], numbers[..., -1]
    if not _same_rows(first, last, tag):
        raise LeftOut("its softmax is over something else than the keys of tokens")
    size = dict(zip(kept, numbers.shape, strict=False))
    return first.reshape([size.get(c, 1) for c in wanted]).expand([sizes[c] for c in wanted])


def _same_rows(first, last, tag):
    origins, rows = locate(first, tag)
    others, other_rows = locate(last, tag)
    pieces = len(tag.maps()) > 1  # side by side, as the two parts of keys in MLA
    return bool((((origins == others) | pieces) & (rows == other_rows) | (first < 0)).all())


def locate(numbers: Tensor, tag: Tag) -> tuple[Tensor, Tensor]:
    """Gives (index among the maps of a tag, row that it read) of places; −1 for no map's."""
    maps = tag.maps()
    starts = torch.tensor([o.start for o in maps], device=numbers.device)
    widths = torch.tensor([o.width for o in maps], device=numbers.device)
    index = (torch.searchsorted(starts, numbers.contiguous(), right=True) - 1).clamp(min=0)
    rows = (numbers - starts[index]) // widths[index]
    outside = numbers < 0
    return index.masked_fill(outside, -1), rows.masked_fill(outside, -1)


def features(tag: Tag, origin: Origin) -> Tensor | None:
    """Gives Bool [width], the features of a map's output in a tensor; None: unknown."""
    if tag.is_exact:
        numbers = tag.places().flatten()
        inside = (numbers >= origin.start) & (numbers < origin.start + origin.rows * origin.width)
        chosen = torch.zeros(origin.width, dtype=torch.bool, device=numbers.device)
        chosen[(numbers[inside] - origin.start) % origin.width] = True
        return chosen
    parts = [features(part, origin) for part in tag.parts or () if origin in part.origins]
    if not parts or any(part is None for part in parts):
        return None
    return functools.reduce(torch.logical_or, parts)
