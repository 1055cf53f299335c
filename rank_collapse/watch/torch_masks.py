"""The masks that meet scores: which keys they hide, whatever the content is.

A mask counts where content does not decide it. Keys that are hidden because their scores are small,
as in top-k attention, show nothing about which tokens exist.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rank_collapse.watch.torch_functions import PRODUCTS, SOFTMAX, tensors_in

HIDDEN = -700.0  # scores below it are of keys that a mask leaves out
_SUMS = {"add": 1, "add_": 1, "sub": -1, "sub_": -1, "subtract": -1}
_HIDING = {*_SUMS, "__rsub__", "masked_fill", "masked_fill_", "where", "__setitem__"}
_FACTORS = {"mul", "mul_", "multiply", "multiply_"}
_BOTH = {"logical_and", "logical_and_", "__and__", "__iand__", "bitwise_and", "bitwise_and_"}
_EITHER = {"logical_or", "logical_or_", "__or__", "__ior__", "bitwise_or", "bitwise_or_"}
_INVERSIONS = {"__invert__", "logical_not", "logical_not_", "bitwise_not", "bitwise_not_"}
_EQUALITIES = {"eq", "eq_", "__eq__"}
_INEQUALITIES = {"ne", "ne_", "__ne__", "not_equal", "not_equal_"}
_DISJUNCTIONS = {"logical_xor", "logical_xor_", "bitwise_xor", "bitwise_xor_"}  # exclusive ones
_DISJUNCTIONS |= {"__xor__", "__rxor__", "__ixor__"}
_NUMBERS = {"full", "zeros", "ones", "empty", "rand", "randn", "randint"}  # also "zeros_like", ...
_OPERATIONS = ("add", "sub", "mul", "truediv", "and", "or", "xor")
SIDES = ("allowed", "left out")


class Mask(NamedTuple):
    """What may hide scores.

    Attributes:
        operand: The tensor that does it; None for numbers.
        keep: Makes Bool, which scores it leaves; None where that is not known.
        name: "allowed", or "left out" of a Bool tensor that is true where keys are hidden.
    """

    operand: Tensor | None
    keep: Callable[[], Tensor] | None
    name: str = "allowed"


def is_allowed(mask: Tensor) -> Tensor:
    """Returns a mask as Bool; it may be of whole numbers 0 and 1, or of floats added to scores."""
    return mask > HIDDEN if mask.is_floating_point() else mask != 0


def makes_numbers(function: object) -> bool:
    """Returns whether a function of torch takes from a tensor at most its shape."""
    return _get_name(function).removesuffix("_like").removeprefix("new_") in _NUMBERS


def is_in_place(function: object) -> bool:
    """Returns whether a function changes its first argument."""
    name = _get_name(function)
    is_method = name.endswith("_") and not name.startswith("__")
    return is_method or name in {f"__i{operation}__" for operation in _OPERATIONS}


def inverts(function: object, args: object) -> bool:
    """Returns whether a function exchanges true and false: "not", "equals 0" or "differs from 1".

    "Exclusive or" with 1 is the same as "differs from 1". A number may be a tensor without axes.
    """
    name = _get_name(function)
    numbers = [a for a in args if not isinstance(a, Tensor) or a.ndim == 0]
    if len(numbers) == 1 and name in _EQUALITIES:
        return bool(numbers[0] == 0)
    if len(numbers) == 1 and name in _INEQUALITIES | _DISJUNCTIONS:
        return bool(numbers[0] == 1)
    return name in _INVERSIONS


def _get_name(function):
    """Returns the name of a function; "" if it has none."""
    return getattr(function, "__name__", "")


def hides_keys(function: object, result: Tensor) -> bool:
    """Returns whether a function may have written numbers into floats that hide keys."""
    is_candidate = _get_name(function) in _HIDING and result.is_floating_point()
    return is_candidate and bool((result <= HIDDEN).any())


def read_masks(function: object, args: object, kwargs: object, result: Tensor) -> Iterator[Mask]:
    """Yields what may hide some of the scores that a function gives.

    Args:
        function: Function of torch.
        args, kwargs, result: Args, kwargs and result of its call.
    """
    name = _get_name(function)
    values = [*args, *kwargs.values()]
    if result.dtype == torch.bool:
        yield from _read_logic(name, tensors_in(values))
    elif name in ("masked_fill", "masked_fill_"):
        mask, value = values[1:3]
        if _is_hiding(value, result):
            yield Mask(mask, lambda: ~mask.bool(), "left out")
    elif name == "where" and len(values) == 3:
        (condition,) = [a for a in values if isinstance(a, Tensor) and a.dtype == torch.bool][:1]
        first, second = [a for a in values if a is not condition]
        if _is_hiding(second, result):
            yield Mask(condition, lambda: condition)
        elif _is_hiding(first, result):
            yield Mask(condition, lambda: ~condition, "left out")
    elif name == "__setitem__":
        yield from _read_assignment(*args, result)
    elif name in _SUMS or name in ("__rsub__", "baddbmm"):
        addends = [(-1 if name == "__rsub__" else 1, args[0])]
        addends += [] if name == "baddbmm" else [(_SUMS.get(name, 1), a) for a in values[1:2]]
        for sign, addend in addends:
            if isinstance(addend, Tensor) and addend.is_floating_point():
                yield from _read_addend(addend, sign)
    elif name in _FACTORS:
        for factor in tensors_in(values):
            if factor.numel() < result.numel() and factor.ndim > 1 and _is_positive(result):
                yield Mask(factor, lambda factor=factor: factor != 0)
    elif function not in PRODUCTS | SOFTMAX:
        if name == "pad" and _is_hiding(kwargs.get("value", [*args, None, None, None][3]), result):
            yield Mask(None, None)
        for operand in tensors_in(values):
            yield Mask(operand, None)


def _read_logic(name, operands):
    """Yields masks that a logical function joins to a Bool result.

    "and" leaves a key where all operands leave it; "or" is used for masks that are true where keys
    are hidden.

    Args:
        name: Name of the function.
        operands: Tensors among its arguments.
    """
    for operand in operands:
        if operand.dtype == torch.bool and name in _BOTH | _FACTORS:
            yield Mask(operand, lambda operand=operand: operand)
        elif operand.dtype == torch.bool and name in _EITHER:
            yield Mask(operand, lambda operand=operand: ~operand, "left out")


def _read_addend(addend, sign):
    """Yields a mask that is added to scores, or subtracted, if it hides any key.

    Args:
        addend: Floats; a key is hidden where what is added to its score is `HIDDEN` or below.
        sign: 1 if it is added, −1 if it is subtracted.
    """
    if bool((sign * addend <= HIDDEN).any()):
        yield Mask(addend, lambda: is_allowed(sign * addend))


def _read_assignment(scores, index, value, result):
    """Yields what `scores[index] = value` hides.

    Args:
        scores, index, value: The parts of the assignment.
        result: The scores after it.
    """
    if not _is_hiding(value, result):
        return
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        axes = (None,) * (scores.ndim - index.ndim)
        yield Mask(index, lambda: ~index[(..., *axes)], "left out")
    else:
        for operand in tensors_in(index) or [None]:
            yield Mask(operand, None)


def _is_hiding(value, result):
    """Returns whether writing this value into `result` masks a key.

    A value far below 0 masks a key in a tensor of scores. The value 0 masks a key in a tensor of
    weights, which has no entry below 0.

    Args:
        value: The written value: a number, or a tensor, of which the largest entry decides.
        result: The scores or weights after the value was written.
    """
    if isinstance(value, Tensor):
        value = float(value.max()) if value.numel() and not value.is_complex() else math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value <= HIDDEN or (value == 0 and _is_positive(result))


def _is_positive(tensor):
    """Returns whether a tensor has entries, and none of them is below 0."""
    return tensor.numel() > 0 and not bool((tensor < 0).any())
