"""Attentions that run where torch hides values: they are not measured, and get a reason.

torch shows neither the values inside of a transformation of `torch.func`, nor the functions that an
operator such as `torch.cond` calls.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from rank_collapse.watch.recorder import Notes
from rank_collapse.watch.torch_functions import PRODUCTS, SOFTMAX, floats_in, tensors_in

TRANSFORMED = "ran inside of torch.func (grad, vmap), whose tensors hide values"


class HiddenCalls:
    """The calls of one step whose values torch hides.

    Args:
        notes: Notes about metrics that are left out.
    """

    def __init__(self, notes: Notes):
        self._notes = notes
        self._weighted = WeakIdKeyDictionary()  # made of a softmax inside of torch.func

    def see(self, name: str, function: Callable[..., Any], arguments: object, result: Any) -> None:
        """Notes an attention that a call hides.

        Args:
            name: Dotted name of the module that runs.
            function, arguments, result: The function of torch, and arguments and result of its
                call.
        """
        if isinstance(function, HigherOrderOperator):
            self._see_operator(name, function, result)
        if is_transformed():
            self._see_transformed(name, function, arguments, result)

    def _see_operator(self, name, operator, result):
        """Notes an operator that calls functions, in which attention may run.

        Args:
            name, operator, result: See `see`.
        """
        if any(a.ndim > 1 for a in floats_in(result)):
            kind = operator.name().removesuffix("_impl")
            reason = "torch does not show what runs there"
            self._notes.leave_out(name, f"layer inside of {kind}", reason)

    def _see_transformed(self, name, function, arguments, result):
        """Notes a product of weights and values inside of `torch.func`.

        Args:
            name, function, arguments, result: See `see`.
        """
        is_weighted = any(a in self._weighted for a in tensors_in(arguments))
        is_product = function in PRODUCTS and is_weighted
        if is_product or function is functional.scaled_dot_product_attention:
            self._notes.leave_out(name, "layer", f"its attention {TRANSFORMED}")
        elif function in SOFTMAX or is_weighted:
            self._weighted.update((a, None) for a in tensors_in(result))


def is_transformed() -> bool:
    """Returns whether code runs inside of a transformation of `torch.func`."""
    return torch._C._functorch.peek_interpreter_stack() is not None
