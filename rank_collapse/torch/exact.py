"""How one operator acts on values in the exact derivative, in which nothing is frozen."""

import warnings
from typing import Any

import torch

from rank_collapse.torch.calls import Call, has_floating, split_results
from rank_collapse.torch.frozen_values import list_sources
from rank_collapse.torch.operators import CONSTANTS, KERNELS, MOVES, PRODUCTS, SUMS
from rank_collapse.torch.refusals import refuse_kernel, refuse_operator
from rank_collapse.torch.values import Value, is_floating


def differentiate_call(call: Call, result: object) -> Any:
    """Return the values of an operator's results, each with its derivative at this input.

    Args:
        call: The operator.
        result: Result of the model's own computation.

    Raises:
        ValueError: An operator without a derivative reads a value that depends on the state.
    """
    if not call.dependent or call.name in CONSTANTS or not has_floating(result):
        return call.constant(result)
    if call.name in KERNELS:
        refuse_kernel(call)
    linear = MOVES.get(call.name) or SUMS.get(call.name)
    values = []
    for index, array in split_results(result):
        if not is_floating(array):
            values.append(call.constant(array))
            continue
        batched = True
        if linear is not None:
            sources, push = _differentiate_linear(call, linear, index)
        elif call.name in PRODUCTS:
            sources, push = _differentiate_product(call)
            batched = PRODUCTS[call.name].batched
        elif "::" in call.name:
            refuse_operator(call)
        else:
            sources, push = _differentiate_any(call, index)
        values.append(Value(array, 1, sources=sources, push=push, batched=batched))
    return values if isinstance(result, list | tuple) else values[0]


def _differentiate_linear(call, positions, index):
    """Differentiate a linear operator.

    Args:
        call: The call.
        positions: Positions of the arguments in which the operator is linear.
        index: Which of several results; None for the only one.

    Returns:
        (sources, push): the arguments that depend on the input, and the function that applies the
        operator to their tangents.
    """
    sources = list_sources(call, positions)

    def push(*tangents):
        result = call.compute_linear(positions, sources, tangents)
        return result if index is None else result[index]

    return sources, push


def _differentiate_product(call):
    """Differentiate left · right + added: each argument in turn, the others held.

    Returns:
        (sources, push): the arguments that depend on the input, and the function that applies the
        derivative to their tangents.
    """
    rule = PRODUCTS[call.name]
    positions = [p for p in (rule.left, rule.right, rule.added) if p is not None]
    depends = [p for p in positions if isinstance(call.get(p), Value) and call.get(p).degree]
    sources = tuple(call.get(p) for p in depends)
    added = call.get(rule.added) if rule.added is not None else None
    no_bias = {rule.added: torch.zeros_like(added.array)} if isinstance(added, Value) else {}

    def push(*tangents):
        """Sums the derivatives with respect to each argument, by the product rule."""
        terms = []
        for position, tangent in zip(depends, tangents, strict=True):
            if position == rule.added:
                left = torch.zeros_like(call.get(rule.left).array)
                terms.append(call.compute_with({rule.left: left, position: tangent}))
            else:
                terms.append(call.compute_with(no_bias | {position: tangent}))
        return sum(terms[1:], terms[0])

    return sources, push


def _differentiate_any(call, index):
    """Differentiate an operator by its forward-mode rule.

    Args:
        call: The call.
        index: Which of several results; None for the only one.

    Returns:
        (sources, push): the arguments that depend on the input, and the function that applies the
        derivative to their tangents.
    """
    sources = tuple(v for v in call.dependent if is_floating(v.array))

    def push(*tangents):
        """Applies the operator's Jacobian to tangents, by forward mode."""

        def function(*arrays):
            result = call.compute_replacing(sources, arrays)
            return result if index is None else result[index]

        with warnings.catch_warnings():  # of what torch itself imports for forward mode
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.func.jvp(function, tuple(v.array for v in sources), tangents)[1]

    return sources, push
