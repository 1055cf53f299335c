"""Where tensors come from: the linear maps behind queries and keys, and the tokens that maps read.

While a measured pass runs, each tensor has a `Tag`. It names the linear maps that made the tensor.
Its followers are moved through the same views as the tensor, once somebody asks: the numbers of the
map's outputs, or the softmax behind weights. So no shape is guessed, and no tensor is changed.

Axis letters: n queries, m keys, k width; others as in an equation of `einsum`.
"""

import collections
import dataclasses
import functools
import math
import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from rank_collapse.watch.torch_products import is_allowed

NUM_INPUTS = 32  # of the last maps, whose inputs are held: those of one layer


def _find_functions(*names):
    """Finds the functions of these names, of `torch` and of tensors."""
    candidates = [getattr(place, name, None) for name in names for place in (torch, Tensor)]
    return {function for function in candidates if function is not None}


CONVOLUTIONS = {functional.conv1d, functional.conv2d, functional.conv3d}
EINSUM = _find_functions("einsum")
PRODUCTS = EINSUM | _find_functions("matmul", "mm", "bmm", "baddbmm", "__matmul__")
MAPS = PRODUCTS | CONVOLUTIONS | {functional.linear} | _find_functions("addmm")
SOFTMAX = {functional.softmax, torch.softmax, Tensor.softmax}
EXPONENTIALS = {torch.exp, Tensor.exp}
JOINS = _find_functions("cat", "concat", "stack", "hstack", "vstack")
MOVES = JOINS | _find_functions(
    "view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "squeeze",
    "unsqueeze", "expand", "chunk", "split", "split_with_sizes", "tensor_split", "unbind",
    "__getitem__", "narrow", "select", "movedim", "swapaxes", "swapdims", "repeat", "tile",
    "repeat_interleave", "broadcast_to", "roll", "flip", "index_select", "expand_as", "view_as",
    "moveaxis", "view_as_complex", "view_as_real",
)  # fmt: skip
MOVES |= {Tensor.T.__get__, Tensor.mT.__get__}


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yields the tensors among arguments or results, also of tuples, lists and mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple) and not isinstance(values, torch.Size):
        for value in values:
            yield from tensors_in(value)


def floats_in(values: Any) -> list[Tensor]:
    """Lists the tensors of real or complex floats among arguments or results."""
    return [a for a in tensors_in(values) if a.is_floating_point() or a.is_complex()]


@dataclasses.dataclass(eq=False)
class Map:
    """A linear map that ran; its outputs are numbered start + row · width + feature.

    Attributes:
        source: The `Tag` of the tensor that it read.
        parameters: ((parameter, axis of its outputs or −1), ...); None for a part of one.
        frames: Numbers of the modules that ran then.
        start: The first number.
        rows, width: How many tokens it read, and how many features it gave of each.
    """

    source: "Tag"
    parameters: tuple[tuple[Any, int], ...]
    frames: tuple[int, ...]
    start: int
    rows: int
    width: int


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


class Scores(NamedTuple):
    """Products of queries and keys, which are added, and whether a softmax came after them."""

    terms: tuple[Term, ...]
    is_softmax: bool


@dataclasses.dataclass(eq=False)
class Tag:
    """What is said of one tensor.

    Attributes:
        origins: The maps that made it, without those behind them, and roots: what no map made.
        past: Names of the attentions that it comes from.
        parameters: If it comes from parameters alone, which.
        scores: If it comes from products of queries and keys, those.
        followers: {name: a function that gives a tensor of the same shape}: "numbers" of map
            outputs, −1 for no map's; "allowed", Bool, the keys of a query; "softmax".
        matrix: [rows, d], if a map read it lately.
    """

    origins: frozenset[Any] = frozenset()
    past: frozenset[str] = frozenset()
    parameters: tuple[Any, ...] = ()
    scores: Scores | None = None
    followers: dict[str, Callable[[], Tensor]] = dataclasses.field(default_factory=dict)
    matrix: Tensor | None = None

    @property
    def maps(self) -> list[Map]:
        """Lists the linear maps among its origins, in order."""
        maps = [origin for origin in self.origins if isinstance(origin, Map)]
        return sorted(maps, key=lambda linear_map: linear_map.start)


class Product(NamedTuple):
    """A product of two tensors by letters: of the first, of the second, of the result."""

    first: Tensor
    second: Tensor
    letters: tuple[str, str, str]

    def swap(self) -> "Product":
        """Returns the same product with its factors in the other order."""
        first, second, result = self.letters
        return Product(self.second, self.first, (second, first, result))


def read_product(function: Any, args: Any, kwargs: Any) -> Product | None:
    """Reads which two tensors a function multiplies; None where they are no matrices.

    Args:
        function: One of `MAPS`.
        args, kwargs: Of its call.
    """
    tensors = list(tensors_in([args, kwargs]))
    if function in EINSUM:
        return _read_einsum(args, tensors)
    if function in CONVOLUTIONS or function is functional.linear:
        x, weight = tensors[:2]
        axes = string.ascii_lowercase[: x.ndim - 2]
        if function in CONVOLUTIONS:
            letters = f"xy{axes}", "", f"xz{axes}"
            return Product(x, weight, letters) if x.ndim == weight.ndim else None
        axes += "x" if x.ndim > 1 else ""
        return Product(x, weight, (f"{axes}y", "zy", f"{axes}z")) if weight.ndim == 2 else None
    a, b = tensors[-2:] if len(tensors) > 1 else (tensors[0], tensors[0])
    if min(a.ndim, b.ndim) < 2:
        return None
    axes = string.ascii_lowercase[: max(a.ndim, b.ndim) - 2]
    first, second = (axes[len(axes) - tensor.ndim + 2 :] for tensor in (a, b))
    return Product(a, b, (f"{first}xy", f"{second}yz", f"{axes}xz"))


def _read_einsum(args, tensors):
    if not isinstance(args[0], str) or "->" not in args[0] or len(tensors) != 2:
        return None
    inputs, result = args[0].replace(" ", "").split("->")
    unused = "".join(c for c in string.ascii_uppercase if c not in args[0])
    letters, longest = inputs.split(","), ""
    for i, tensor in enumerate(tensors):
        dots = unused[: tensor.ndim - len(letters[i].replace("...", ""))][::-1]
        letters[i] = letters[i].replace("...", dots)
        longest = max(longest, dots, key=len)
    return Product(*tensors, (*letters, result.replace("...", longest)))


class Origins:
    """The tags of one pass.

    Args:
        running: A function that gives the numbers of the modules that run.
    """

    def __init__(self, running: Callable[[], tuple[int, ...]]):
        self._running = running
        self._tags: Any = WeakIdKeyDictionary()
        self._inputs: collections.deque[Tag] = collections.deque()
        self._next = 0

    def tag(self, tensor: Tensor) -> Tag:
        """Returns the tag of a tensor, made where it has none: of a parameter, or of a root."""
        if tensor not in self._tags:
            is_parameter = isinstance(tensor, nn.Parameter)
            roots = frozenset() if is_parameter else frozenset([object()])
            self._tags[tensor] = Tag(roots, parameters=(tensor,) if is_parameter else ())
        return self._tags[tensor]

    def begin(self, tensor: Tensor, past: frozenset[str]) -> None:
        """Makes a tensor one that no map made, such as the result of an attention.

        Args:
            tensor: It.
            past: Names of the attentions that it comes from.
        """
        self._tags[tensor] = Tag(frozenset([object()]), past)

    def has(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has a tag."""
        return tensor in self._tags

    def forget_inputs(self) -> None:
        """Drops the inputs of maps, which a checkpointed layer does not hold either."""
        while self._inputs:
            self._inputs.popleft().matrix = None

    def see_function(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Records where the results of a function come from.

        Args:
            function: Of torch.
            args, kwargs, result: Of its call.
        """
        outputs = floats_in(args[0] if function is Tensor.__setitem__ else result)
        inputs = floats_in([args, kwargs])
        if not outputs or not inputs:
            return
        product = read_product(function, args, kwargs) if function in MAPS else None
        if product is not None and self._see_product(function, product, inputs, outputs[0]):
            return
        self._derive_tags(function, args, kwargs, inputs, outputs)
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
        tensors = floats_in(inputs)
        if not tensors:
            return
        x, parameters = tensors[0], list(module.parameters())
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        axes = string.ascii_lowercase[: x.ndim - 1]
        if matrices and x.shape[:-1] == output.shape[:-1] and not [*module.children()]:
            product = Product(x, matrices[0], (f"{axes}y", "", f"{axes}z"))
            self._see_map(product, parameters, output)
        else:
            self._derive_tags(None, (), {}, tensors, [output])

    def _see_product(self, function, product, inputs, output):
        """Records a linear map, or a product of queries and keys; returns whether it is one."""
        is_weight = [self._is_weight(factor) for factor in product[:2]]
        if function not in PRODUCTS or any(is_weight):
            if is_weight == [True, False] and function in PRODUCTS:
                product = product.swap()
            if self.tag(product.first).scores is not None:
                return False  # heads are mixed
            self._see_map(product, [a for a in inputs if a is not product.first], output)
            return True
        if product.letters[2][-2] not in product.letters[0]:
            product = product.swap()
        query, key = self.tag(product.first), self.tag(product.second)
        if query.scores is not None or key.scores is not None:
            return False
        sizes = dict(zip(product.letters[2], output.shape, strict=True))
        scores = Scores((Term(product.letters, sizes, query, key),), False)
        self._tags[output] = Tag(query.origins | key.origins, query.past | key.past, (), scores)
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
        source = self.tag(x)
        axes = [c for c in read if c in result]
        features = [c for c in result if c not in read]
        order = [read.index(c) for c in axes + [c for c in read if c not in result]]
        rows = math.prod(x.shape[i] for i in order[: len(axes)])
        sizes = dict(zip(result, output.shape, strict=True))
        shape = [sizes[c] for c in axes + features]
        permutation = [(axes + features).index(c) for c in result]
        start, width, device = self._next, output.numel() // max(rows, 1), x.device
        axis = weight.find(features[0]) if weight and len(features) == 1 else -1 if weight else 0
        shares = tuple(self._read_parameter(a, axis) for a in parameters)
        linear_map = Map(source, shares, self._running(), start, rows, width)
        self._tags[output] = tag = Tag(frozenset([linear_map]), source.past)
        if rows * width == output.numel() == math.prod(shape):
            self._next += output.numel()

            def number_outputs():
                numbers = torch.arange(start, start + rows * width, device=device)
                return numbers.reshape(shape).permute(permutation)

            tag.followers["numbers"] = functools.cache(number_outputs)
        source.matrix = x.detach().permute(order).reshape(rows, x.numel() // max(rows, 1))
        if source not in self._inputs:
            self._inputs.append(source)
        if len(self._inputs) > NUM_INPUTS:
            self._inputs.popleft().matrix = None

    def _read_parameter(self, tensor, axis):
        """Returns (parameter, axis of its outputs or −1) of a weight; (None, −1) of a part."""
        if isinstance(tensor, nn.Parameter):
            return tensor, 0 if tensor.ndim == 1 else axis
        parameters = self._tags.get(tensor, Tag()).parameters
        is_full = len(parameters) == 1 and parameters[0].numel() == tensor.numel()
        return (parameters[0] if is_full else None), -1

    def _derive_tags(self, function, args, kwargs, inputs, outputs):
        """Records another function: its results come from where its arguments come from.

        Args:
            function, args, kwargs: The call.
            inputs, outputs: Its tensors of floats.
        """
        tagged = [(self.tag(a), a) for a in inputs if self.has(a) or self._is_weight(a)]
        pairs = [(tag, a) for tag, a in tagged if not tag.parameters]
        if not pairs and len(tagged) == len(inputs):
            parameters = tuple(dict.fromkeys(p for tag, _ in tagged for p in tag.parameters))
            for output in outputs:
                self._tags[output] = Tag(parameters=parameters)
            return
        pairs = pairs or [(self.tag(a), a) for a in inputs if not self._is_weight(a)]
        origins = frozenset().union(*(tag.origins for tag, _ in pairs))
        past = frozenset().union(*(tag.past for tag, _ in pairs))
        names = dict.fromkeys(name for tag, _ in pairs for name in tag.followers)
        is_move = function in MOVES and (len(pairs) == 1 or function in JOINS)
        for i, output in enumerate(outputs):
            tag = Tag(origins, past, scores=_merge_scores(pairs, output))
            for name in names:
                if is_move:
                    arguments = self._substitute_followers(name, (args, kwargs))
                    tag.followers[name] = functools.cache(
                        functools.partial(_move_follower, function, arguments, i)
                    )
                else:
                    alike = [t for t, a in pairs if name in t.followers and a.shape == output.shape]
                    tag.followers |= {name: alike[0].followers[name]} if alike else {}
            self._tags[output] = tag

    def _substitute_followers(self, name, arguments):
        """Returns a function that gives the arguments with followers instead of tensors.

        Args:
            name: Of the followers.
            arguments: A tensor, or lists and dictionaries of tensors and other values.
        """
        if isinstance(arguments, Tensor) and floats_in(arguments):
            follower = self._tags.get(arguments, Tag()).followers.get(name)
            options = {"size": arguments.shape, "fill_value": -1, "device": arguments.device}
            return follower or functools.partial(torch.full, **options)
        if isinstance(arguments, dict):
            values = {
                key: self._substitute_followers(name, value) for key, value in arguments.items()
            }
            return lambda: {key: value() for key, value in values.items()}
        if type(arguments) in (list, tuple):
            parts = [self._substitute_followers(name, part) for part in arguments]
            return lambda: type(arguments)(part() for part in parts)
        return lambda: arguments

    def _see_softmax(self, function, x, dim, result):
        """Records a softmax, or the exponentials of one that is computed by hand.

        Args:
            function: Of `SOFTMAX` or `EXPONENTIALS`.
            x, result: Scores, and what it makes of them.
            dim: Over which it sums.
        """
        scores, tag = self.tag(x).scores, self.tag(result)
        if function in SOFTMAX:
            tag.scores = Scores(scores.terms if scores else (), True)
            tag.followers = {}
        if scores is None or not scores.terms:
            return
        if function in EXPONENTIALS:
            tag.scores = Scores(scores.terms, False)
        allowed, softmax = is_allowed(x.detach()), result.detach()
        if function in EXPONENTIALS or dim in (-1, x.ndim - 1):
            tag.followers["allowed"] = lambda: allowed
        if function in SOFTMAX and dim in (-1, x.ndim - 1):
            tag.followers["softmax"] = lambda: softmax


def _move_follower(function, arguments, i):
    """Applies a function that moves entries to followers.

    Args:
        function: Of `MOVES`.
        arguments: As `Origins._substitute_followers` gives them.
        i: Which of several results.
    """
    args, kwargs = arguments()
    if function is torch.view_as_complex:
        args = tuple(a.double() for a in args)
    result = function(*args, **kwargs)
    result = result if isinstance(result, Tensor) else result[i]
    return result.long() if function is torch.view_as_real else result


def _merge_scores(pairs, output):
    """Returns the scores that a result still has: it has their size, or their queries.

    Args:
        pairs: (tag, tensor) of each argument.
        output: The result.
    """
    scores = []
    for tag, x in pairs:
        if tag.scores is None or output.ndim < 2 or x.ndim < 2:
            continue
        if output.numel() == x.numel() or output.shape[-2] == x.shape[-2]:
            scores.append(tag.scores)
    if not scores:
        return None
    terms = dict.fromkeys(term for other in scores for term in other.terms)
    return Scores(tuple(terms), any(other.is_softmax for other in scores))


def find_sources(tag: Tag) -> tuple[set[Tag], set[Any]]:
    """Finds all tensors that the maps behind a tensor read, and its roots."""
    sources: set[Tag] = set()
    roots: set[Any] = set()
    pending = [tag]
    while pending:
        origins = pending.pop().origins
        maps = {origin for origin in origins if isinstance(origin, Map)}
        roots |= origins - maps
        behind = {linear_map.source for linear_map in maps} - sources
        sources |= behind
        pending += behind
    return sources, roots


def find_shared_sources(maps: list[Map], query: Tag, key: Tag) -> list[Tag] | None:
    """Finds the tensors that both queries and keys are made of.

    Args:
        maps: The linear maps that gave the queries.
        query, key: Tags of both.

    Returns:
        Those behind the fewest maps; [] if both have the same roots by ways of their own, such as
        two norms; None if keys are of other tokens.
    """
    (_, query_roots), (key_sources, key_roots) = find_sources(query), find_sources(key)
    while maps:
        sources = list(dict.fromkeys(linear_map.source for linear_map in maps))
        shared = [source for source in sources if source in key_sources]
        if shared:
            return shared
        maps = list(dict.fromkeys(linear_map for source in sources for linear_map in source.maps))
    return [] if query_roots == key_roots else None


def locate_numbers(numbers: Tensor, maps: list[Map]) -> tuple[Tensor, Tensor]:
    """Finds which map gave numbers, and of which row.

    Args:
        numbers: Of outputs, see `Map`; −1 for no map's.
        maps: In order.

    Returns:
        (index among the maps, row that it read), −1 for no map's.
    """
    starts = torch.tensor([linear_map.start for linear_map in maps], device=numbers.device)
    widths = torch.tensor([linear_map.width for linear_map in maps], device=numbers.device)
    index = (torch.searchsorted(starts, numbers.contiguous(), right=True) - 1).clamp(min=0)
    rows = (numbers - starts[index]) // widths[index]
    return index.masked_fill(numbers < 0, -1), rows.masked_fill(numbers < 0, -1)


def find_features(tag: Tag, linear_map: Map) -> Tensor | None:
    """Finds Bool [width], the features of a map's output in a tensor; None if unknown.

    Args:
        tag: Of the tensor.
        linear_map: The map.
    """
    if "numbers" not in tag.followers:
        return None
    numbers = tag.followers["numbers"]().flatten() - linear_map.start
    inside = (numbers >= 0) & (numbers < linear_map.rows * linear_map.width)
    features = torch.zeros(linear_map.width, dtype=torch.bool, device=numbers.device)
    features[numbers[inside] % linear_map.width] = True
    return features if features.any() else None
