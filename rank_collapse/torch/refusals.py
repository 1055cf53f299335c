"""One-line messages about operations that cannot be frozen: their place, and what to change."""

from typing import NoReturn

import torch

from rank_collapse.torch.calls import Call
from rank_collapse.torch.exporting import describe_place
from rank_collapse.torch.values import Value


def refuse_operator(call: Call) -> NoReturn:
    """Refuse an operator that is in no table."""
    raise ValueError(
        f"{describe(call)} reads a value that depends on the start, and no rule says how to freeze "
        "it: write it with other operators, or freeze its result with .detach()"
    )


def refuse_derivative(value: Value, error: Exception) -> NoReturn:
    """Refuse an operator that torch cannot differentiate in forward mode."""
    raise ValueError(
        f"aten.{value.operator} in {describe_place(value.node)} has no derivative in forward mode "
        "of torch: write it with other operators, or freeze its result with .detach()"
    ) from error


def refuse_argument(call: Call) -> NoReturn:
    """Refuse an operator that depends on the state through an argument that no rule has."""
    raise ValueError(
        f"{describe(call)} depends on the start through several arguments or an unusual one, and "
        "no rule says how to freeze it: freeze an argument with .detach()"
    )


def refuse_kernel(call: Call) -> NoReturn:
    """Refuse attention that is computed in one operator."""
    raise ValueError(
        f"{describe(call)} computes attention in one kernel, which has no weights to freeze: build "
        "the model with attn_implementation='eager' or 'sdpa', or use "
        "torch.nn.functional.scaled_dot_product_attention"
    )


def refuse_hidden_modules(call: Call) -> NoReturn:
    """Refuse a graph that is called outside of all branches, and may contain some."""
    raise ValueError(
        f"{describe(call)} is outside of all branches, and torch.export forgets the names of the "
        "modules in it, so that their branches cannot be counted: call it inside of a branch"
    )


def describe(call: Call) -> str:
    """Name an operator and its place."""
    is_named = "::" in call.name or isinstance(call.target, torch._ops.HigherOrderOperator)
    name = call.name if is_named else f"aten.{call.name}"
    return f"{name} in {call.place}"


def refuse_random(call: Call) -> NoReturn:
    """Refuse an operator that draws random numbers."""
    raise ValueError(
        f"{describe(call)} draws random numbers, such as those of dropout: call model.eval() first"
    )


def refuse_batch_statistics(call: Call) -> NoReturn:
    """Refuse a batch norm that takes its statistics from the batch."""
    raise ValueError(f"{describe(call)} takes statistics of the batch: call model.eval() first")


def refuse_product(product: str) -> NoReturn:
    """Refuse an output that depends on a product of two values of degree 1."""
    raise ValueError(
        f"{product} multiplies two values that depend on the start; neither is a gate, and the "
        "product is not frozen by a softmax: freeze one of them with .detach()"
    )


def refuse_failure(call: Call, error: Exception) -> NoReturn:
    """Refuse arguments that an operator does not take."""
    message = " ".join(str(error).split())
    raise ValueError(f"{describe(call)} fails on these inputs: {message[:200]}") from error
