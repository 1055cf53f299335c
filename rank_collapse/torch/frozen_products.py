"""Sums, products and quotients of two values: which one carries paths, and which one is frozen.

Values have degree 0 (constant or frozen), 1 (paths pass them) or 2 (a product of two values of
degree 1), see `values`.
"""

from typing import Any

import torch

from rank_collapse.torch.frozen_values import (
    apply_entrywise,
    evaluate_at_zero,
    make_gate,
    make_scores,
    make_value,
    push_through,
    widen,
)
from rank_collapse.torch.operators import (
    PRODUCTS,
)
from rank_collapse.torch.refusals import describe
from rank_collapse.torch.values import Value


def add(call, result):
    """Return a sum or difference of two arguments.

    A sum of entrywise functions of one value h, of its shape, is such a function again; a number
    added to exp(-h) belongs to the function, as in a sigmoid, while a number added to gelu(h) is a
    bias. A sum with attention scores gives scores.

    Args:
        call: The operator, with its arguments.
        result: Its result.
    """
    dependent, (left, right) = call.dependent, (call.get(0), call.get(1))
    if call.product is not None:
        return make_scores(call, result)
    value = dependent[0]
    keeps_shape = all(v.shape == result.shape for v in dependent)
    if not keeps_shape or len({v.base for v in dependent}) > 1:
        return push_through(call, result, (0, 1))
    gate = next((v.gate_of for v in dependent if v.is_gate), None)
    if len(dependent) == 1:
        other = right if value is left else left
        is_scalar = not isinstance(other, Value) or other.shape == ()
        if value.is_weight and is_scalar:
            return make_gate(call, result, gate, value.base)
        if value.summed_base is not None and is_scalar:
            total = push_through(call, result, (0, 1))
            total.summed_base = value.summed_base
            return total
    total = push_through(call, result, (0, 1), bases=[value.base], roots=[gate])
    total.at_zero = None if gate is None else evaluate_at_zero(call)
    return total


def negate(call, result):
    """Return a value with the opposite sign; an entrywise function f(h) becomes −f(h).

    Args:
        call: The operator, with its argument.
        result: Its result.
    """
    value = call.get(0)
    negated = push_through(call, result, (0,), bases=[value.base], roots=[value.gate_of])
    negated.at_zero = None if value.at_zero is None else -value.at_zero
    return negated


def multiply(call, result):
    """Return a product of two arguments, plus a third for operators such as addmm.

    A constant scales the other factor. Of a gate, a non-linear entrywise function such as sigmoid,
    and another value, the gate is frozen and the other passes paths; two functions of one value h
    make a function of h. Other products, such as queries times keys, are scores: no path passes
    them.

    Args:
        call: The operator, with its arguments.
        result: Its result.
    """
    rule = PRODUCTS[call.name]
    left, right = (call.get(i) for i in (rule.left, rule.right))
    depends = [isinstance(v, Value) and v.degree > 0 for v in (left, right)]
    if any(v.degree == 2 for v in call.dependent):
        return make_scores(call, result)
    if not all(depends):
        position = rule.right if depends[1] else rule.left
        return _scaled(call, result, rule, position)
    if not rule.entrywise:
        if left.is_weight != right.is_weight:  # weights that are written out, not yet divided
            return _carry(call, result, rule, rule.right if left.is_weight else rule.left)
        return make_scores(call, result, describe(call))
    if left.base == right.base and left.shape == right.shape:
        # The product of two functions of the same value is one, and a gate.
        position = rule.right if left.is_gate and not right.is_gate else rule.left
        carrier = call.get(position)
        root = next((v.gate_of for v in (left, right) if v.is_gate), carrier)
        fields = {"base": left.base, "gate_of": root, "at_zero": evaluate_at_zero(call)}
        return _carry(call, result, rule, position, **fields)
    is_scale = [v.is_gate for v in (left, right)]
    if all(is_scale):  # sigmoid(a) tanh(b): that with f(0) ≠ 0 scales the activation
        is_scale = [left.is_weight, right.is_weight]
    if is_scale[0] != is_scale[1]:
        position = rule.right if is_scale[0] else rule.left
        if call.get(position).shape == result.shape:
            return _carry(call, result, rule, position)
    return make_scores(call, result, describe(call))


def _scaled(call, result, rule, position):
    """Return a product with a constant, which scales the path sums of the other factor.

    An entrywise function f(h) times a number is another function of h (`gate_of`), with its own
    f(0).

    Args:
        call, result: The product and its result.
        rule: Positions of its arguments.
        position: Position of the factor that paths pass; the other one is the constant.
    """
    other_position = rule.right if position == rule.left else rule.left
    value, factor = call.get(position), call.get(other_position)
    if not rule.entrywise:
        return _carry(call, result, rule, position)
    is_scalar = not isinstance(factor, Value) or factor.shape == ()
    keeps_shape = value.shape == result.shape
    root = widen(call, value.gate_of, result.shape)
    if root is None and keeps_shape and isinstance(factor, Value) and factor.base == value.base:
        root = value
    fields = {"gate_of": root, "summed_base": value.summed_base if is_scalar else None}
    if keeps_shape:
        fields["base"] = value.base
    if root is value:
        fields["at_zero"] = 0.0
    elif root is not None:
        fields["at_zero"] = evaluate_at_zero(call) if is_scalar else value.at_zero
    return _carry(call, result, rule, position, **fields)


def _carry(call, result, rule, position, **fields):
    """Return a product in which the argument at `position` carries paths, while the other is
    frozen.

    The path sums of the argument are multiplied by the other factor; those of a summand (as in
    addmm) are added.

    Args:
        call: The product, with its arguments.
        result: Its result, a tensor.
        rule: Positions of its factors and of its summand.
        position: Position of the argument that carries paths.
        **fields: Further attributes of the resulting `Value`.
    """
    carrier = call.get(position)
    added = None if rule.added is None else call.get(rule.added)
    sources = tuple(v for v in (carrier, added) if isinstance(v, Value) and v.degree)

    def push(*tangents):
        """Applies the product to the tangents of the carrier and of the summand."""
        arrays = {position: torch.zeros_like(carrier.array)}
        if rule.added is not None and isinstance(added, Value):
            arrays[rule.added] = torch.zeros_like(added.array)
        places = [position] if carrier in sources else []
        places += [rule.added] if added in sources else []
        return call.compute_with(arrays | dict(zip(places, tangents, strict=True)))

    batched = rule.batched
    return make_value(call, result, sources=sources, push=push, batched=batched, **fields)


def divide(call, result):
    """Return a quotient; a denominator that depends on the state is frozen.

    exp(h) over its sum, a softmax that is written out, is a constant, and a quotient of two
    entrywise functions of one value h is such a function.

    Args:
        call: The operator, with its arguments.
        result: Its result.
    """
    above, below = call.get(0), call.get(1)
    if call.kwargs.get("rounding_mode") is not None:
        return apply_entrywise(call, result, 0)
    if not (isinstance(above, Value) and above.degree):
        return apply_entrywise(call, result, 1)
    if above.degree == 2:
        return make_scores(call, result)
    fields: dict[str, Any] = {"gate_of": widen(call, above.gate_of, result.shape)}
    keeps_shape = above.shape == result.shape
    if isinstance(below, Value) and below.degree:
        if above.is_gate and below.summed_base == above.base:
            return call.constant(result)  # a softmax that is written out
        if below.base == above.base and below.shape == above.shape:
            root = next((v.gate_of for v in (above, below) if v.is_gate), above)
            fields = {"gate_of": root, "base": above.base, "at_zero": evaluate_at_zero(call)}
    elif keeps_shape:
        fields["base"] = above.base
        is_function = isinstance(below, Value) and below.base == above.base
        fields["gate_of"] = above.root if is_function else above.gate_of
        if above.is_gate:
            fields["at_zero"] = above.at_zero
        if not isinstance(below, Value) or below.shape == ():
            fields["summed_base"] = above.summed_base

    def push(tangent):
        """Divides the numerator's path sums by the frozen denominator."""
        return call.compute_with({0: tangent})

    return make_value(call, result, sources=(above,), push=push, **fields)
