"""One operator of a model's graph with its arguments, and how to run it on path sums.

Values have degree 0 (constant or frozen), 1 (paths pass them) or 2 (a product of two values of
degree 1), see `values`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rank_collapse.annotations import Tree
from rank_collapse.torch.values import Bases, Value, is_floating


def _slice_scatter(array, values, dim=0, start=None, end=None, step=1):
    """Write values into a slice; `torch.func.vmap` takes only a slice inside of the array."""
    start, end, step = slice(start, end, step).indices(array.shape[dim])
    return torch.slice_scatter(array, values, dim, start, max(start, end), step)


# A view needs strides that path sums may not have.
_FOR_SUMS = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
    torch.ops.aten.slice_scatter.default: _slice_scatter,
}


def map_nested(fn: Callable[[Tensor], Tree], tree: Tree) -> Tree:
    """Apply a function to what lists, tuples and dicts hold, and keep their structure."""
    if isinstance(tree, list | tuple):
        return type(tree)(map_nested(fn, element) for element in tree)
    if isinstance(tree, dict):
        return {key: map_nested(fn, element) for key, element in tree.items()}
    return fn(tree)


def list_values(tree: Tree) -> list[Value]:
    """List the values that lists, tuples and dicts hold."""
    values: list[Value] = []
    map_nested(lambda leaf: values.append(leaf) if isinstance(leaf, Value) else None, tree)
    return values


@dataclasses.dataclass(eq=False)
class Call:
    """An operator and its arguments.

    Attributes:
        name: Name of the operator, without overload: "mul"; with its namespace unless it is aten's.
        target: Function that computes the operator.
        args: Arguments in the order of the operator's schema: `Value`s, lists of them, numbers.
        kwargs: The others.
        place: The module and the line of code that call it, for messages.
        bases: Bases of the whole graph.
    """

    name: str
    target: Callable
    args: Sequence[object]
    kwargs: dict[str, object]
    place: str
    bases: Bases

    @property
    def values(self) -> list[Value]:
        return list_values([self.args, self.kwargs])

    @property
    def dependent(self) -> list[Value]:
        """The values of degree 1 or 2 among the arguments, each once."""
        return list({id(v): v for v in self.values if v.degree}.values())

    def get(self, position: int) -> Tree:
        """Return an argument, None where it is left out."""
        return self.args[position] if position < len(self.args) else None

    def argument(self, position: int, default: object) -> Tree:
        """Return the array or number of an argument, or its default."""
        value = self.get(position)
        return default if value is None else value.array if isinstance(value, Value) else value

    def compute(self) -> Tree:
        """Compute the operator as the model does."""
        return self.target(*_arrays(self.args), **_arrays(self.kwargs))

    def compute_with(self, arguments: Mapping[int, Tensor | Sequence[Tensor]]) -> Tree:
        """Compute the operator with other arrays at some positions."""
        args = [_arrays(arguments.get(i, arg)) for i, arg in enumerate(self.args)]
        return _FOR_SUMS.get(self.target, self.target)(*args, **_arrays(self.kwargs))

    def compute_linear(
        self, positions: tuple[int, ...], sources: tuple[Value, ...], tangents: tuple[Tensor, ...]
    ) -> Tree:
        """Compute an operator that is linear in some arguments together.

        Args:
            positions: Positions of these arguments.
            sources: The values among them that depend on the state; all else in them is 0 here.
            tangents: Tangents that replace the sources.
        """
        arrays = {id(value): tangent for value, tangent in zip(sources, tangents, strict=True)}

        def replace(leaf):
            """Replaces the sources by tangents, and other tensors and numbers by 0."""
            array = leaf.array if isinstance(leaf, Value) else leaf
            if id(leaf) in arrays:
                return arrays[id(leaf)]
            return torch.zeros_like(array) if isinstance(array, Tensor) else 0

        linear = {i: map_nested(replace, self.args[i]) for i in positions if i < len(self.args)}
        return self.compute_with(linear)

    def compute_replacing(self, values: tuple[Value, ...], arrays: tuple[Tensor, ...]) -> Tree:
        """Compute the operator with other arrays for some values, wherever they stand."""
        replacement = {id(value): array for value, array in zip(values, arrays, strict=True)}

        def replace(leaf):
            return replacement.get(id(leaf), leaf)

        args, kwargs = map_nested(replace, self.args), map_nested(replace, self.kwargs)
        return _FOR_SUMS.get(self.target, self.target)(*_arrays(args), **_arrays(kwargs))

    def move_key(self) -> tuple[object, ...]:
        """Return what identifies a move of entries, apart from the values that it moves.

        Returns:
            (text of the operator, text of its arguments).
        """

        def identify(leaf):
            if isinstance(leaf, Value):
                return "value" if leaf.degree or leaf.base is not None else id(leaf.array)
            return repr(leaf)

        return (str(self.target), str(map_nested(identify, [self.args, self.kwargs])))

    def constant(self, result: object, base: int | None = None, product: str | None = None) -> Tree:
        """Return the result as a value of degree 0, which no path passes; a list for several.

        Args:
            result: Result of the model's own computation.
            base: Base of the value; this value is a frozen function of it.
            product: Product behind a frozen function, where that product was computed.
        """
        if isinstance(result, list | tuple):
            return [self.constant(element, base, product) for element in result]
        product = product if is_floating(result) else None
        return Value(result, base=base, product=product)

    @property
    def product(self) -> str | None:
        """Where a product was computed that an argument is, or is a frozen function of."""
        return next((v.product for v in self.values if v.product is not None), None)


def split_results(result: object) -> Iterator[tuple[int | None, Tensor]]:
    """Yield (index, array) of each result of an operator; the index is None for a single one."""
    if isinstance(result, list | tuple):
        yield from enumerate(result)
    else:
        yield None, result


def has_floating(result: object) -> bool:
    """Whether any result of an operator has a derivative."""
    return any(is_floating(array) for _, array in split_results(result))


def _arrays(tree: Tree) -> Tree:
    return map_nested(lambda leaf: leaf.array if isinstance(leaf, Value) else leaf, tree)
