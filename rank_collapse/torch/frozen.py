"""How one operator acts on values when the choices of the pass are frozen.

Softmax weights, norm statistics and denominators are constants. A non-linear entrywise function is
the frozen gate f(h)/h times h, and f'(0) times h where h is 0. If a gate is multiplied with another
value, entry by entry, the gate is frozen. Other products of two values have degree 2.
"""

from typing import Any

from torch import Tensor

from rank_collapse.torch.calls import Call, has_floating
from rank_collapse.torch.frozen_entries import choose_entries, move_entries
from rank_collapse.torch.frozen_norms import apply_norm
from rank_collapse.torch.frozen_products import add, divide, multiply, negate
from rank_collapse.torch.frozen_values import apply_entrywise, apply_power, push_through
from rank_collapse.torch.operators import (
    CHOICES,
    COMPARISONS,
    CONSTANTS,
    ENTRYWISE,
    KERNELS,
    MOVES,
    NORMS,
    PRODUCTS,
    STATISTICS,
    SUMS,
)
from rank_collapse.torch.refusals import refuse_kernel, refuse_operator

_KEEPS_ENTRIES = COMPARISONS | {"mul", "add", "sub", "div", "where", "_to_copy", "clone", "alias"}


def freeze_call(call: Call, result: object) -> Any:
    """Return the values of an operator's results, by the rule of its kind.

    A value has degree 1 if paths pass it. The rules freeze the other factors: softmax weights, norm
    statistics, and the quotients f(h)/h of nonlinear functions.

    Args:
        call: The operator; at least one of its arguments or results is a tensor.
        result: Result of the model's own computation.

    Raises:
        ValueError: An operator that is in no table reads a value that depends on the state.
    """
    name = call.name
    if not call.dependent:
        product = None if name in STATISTICS or name in CONSTANTS else call.product
        return call.constant(result, _base_of_constant(call, result), product)
    if name in CONSTANTS or not has_floating(result):
        return call.constant(result, _base_of_constant(call, result))
    if name in STATISTICS:
        return call.constant(result)
    if name in KERNELS:
        refuse_kernel(call)
    if name == "pow":
        return apply_power(call, result)
    if name in ENTRYWISE:
        return apply_entrywise(call, result, ENTRYWISE[name][0])
    if name == "div":
        return divide(call, result)
    if name in ("add", "sub", "rsub"):
        return add(call, result)
    if name == "neg":
        return negate(call, result)
    if name in MOVES:
        return move_entries(call, result)
    if name in SUMS:
        return push_through(call, result, SUMS[name], summed=name == "sum")
    if name in PRODUCTS:
        return multiply(call, result)
    if name in CHOICES:
        return choose_entries(call, result)
    if name in NORMS:
        return apply_norm(call, result)
    return refuse_operator(call)


def _base_of_constant(call, result):
    """Return which value h a frozen result is an entrywise function of, such as the mask h > 0.

    Args:
        call: The operator, with its arguments.
        result: Its result.

    Returns:
        The number which all entrywise functions of h share, the base; None if there is no such h.
    """
    bases = {v.base for v in call.values if v.base is not None}
    if len(bases) != 1 or not isinstance(result, Tensor):
        return None
    (base,) = bases
    if call.name in ENTRYWISE or call.name in _KEEPS_ENTRIES:
        shapes = {v.shape for v in call.values if v.base == base}
        return base if shapes == {result.shape} else None
    if call.name in MOVES:
        return call.bases.after(call.move_key(), base)
    return None
