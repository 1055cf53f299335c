"""What is recorded of every value of a model's graph: how it depends on the state paths start from.

With the choices of the pass frozen, each value is one of three:

degree 0  a constant: it does not depend on the state, or it is frozen.
degree 1  affine in the state: paths pass it.
degree 2  a product of two values of degree 1, such as attention scores. No path passes it. It may
          only end in a softmax or another function whose result is frozen.

An entrywise function f of a value h of degree 1 is the gate f(h)/h, frozen, times h. Composed or
written out by hand it is the same function, so a value also records its `base`, shared by all
values that are entrywise functions of the same h, and the h itself, as `gate_of`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor or number of the graph.

    Attributes:
        array: Tensor or Python number that the model computes.
        degree: 0, 1 or 2, as above.
        base: A number shared by values that are entrywise functions of the same value, or None.
        gate_of: The value of degree 1 that this is a non-linear entrywise function of, or None.
        at_zero: The number f(0) for a gate f(h), or None where it is not known.
        summed_base: The base of the summands, for a sum over entries.
        product: In a value of degree 2, the product that was computed. In a value of degree 0 it
            means that this is a frozen function of a product, such as exp of scores, which may
            weigh values of degree 1 but may not be added to them.
        sources: The values of degree 1 that `push` needs the path sums of.
        push: Maps the path sums of one length in `sources` to the path sums of this value.
        batched: Whether `push` may run under `torch.func.vmap`.
        axis: Axis of a value that leaves a branch: which axis of path lengths this moves by one.
        branch: The call of a branch in which this was computed, or None.
        operator: The name of the operator that computed this.
        node: The node of that operator in the graph.
    """

    array: Any
    degree: int = 0
    base: int | None = None
    gate_of: "Value | None" = None
    at_zero: float | None = None
    summed_base: int | None = None
    product: str | None = None
    sources: "tuple[Value, ...]" = ()
    push: Callable[..., Tensor] | None = None
    batched: bool = True
    axis: int | None = None
    branch: Any = None
    operator: str = ""
    node: Any = None

    @property
    def is_gate(self) -> bool:
        """Whether this is a non-linear entrywise function of a value of degree 1."""
        return self.degree == 1 and self.gate_of is not None

    @property
    def is_weight(self) -> bool:
        """Whether this is a gate with f(0) ≠ 0, such as exp or sigmoid, and so no activation."""
        return self.is_gate and self.at_zero not in (None, 0)

    @property
    def root(self) -> "Value":
        """The value of degree 1 that this is an entrywise function of: itself, if it is linear."""
        return self if self.gate_of is None else self.gate_of

    @property
    def shape(self) -> torch.Size:
        return self.array.shape if isinstance(self.array, Tensor) else torch.Size()


class Bases:
    """Numbers the bases; the same move of entries of the same base gives the same number."""

    def __init__(self):
        self._count = itertools.count()
        self._numbers: dict[Hashable, int] = {}

    def new(self) -> int:
        """Return a number that no value has."""
        return next(self._count)

    def after(self, operation: Hashable, *bases: int | None) -> int:
        """Return the base of what an operation makes of values of these bases."""
        key = (operation, *bases)
        if key not in self._numbers:
            self._numbers[key] = self.new()
        return self._numbers[key]


def is_floating(array: Any) -> bool:
    """Whether an array has real or complex entries, so that derivatives exist."""
    return isinstance(array, Tensor) and (array.is_floating_point() or array.is_complex())
