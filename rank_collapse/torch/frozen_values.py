"""Values that carry paths: of linear operators, entrywise functions as frozen gates, and scores.

Values have degree 0 (constant or frozen), 1 (paths pass them) or 2 (a product of two values of
degree 1), see `values`.
"""

import torch
from torch import Tensor

from rank_collapse.torch.calls import Call, list_values, split_results
from rank_collapse.torch.refusals import refuse_argument
from rank_collapse.torch.values import Value, is_floating


def make_value(call, array, degree=1, **fields):
    """Make a value that depends on the state, with a new base unless one is named."""
    fields.setdefault("base", call.bases.new())
    return Value(array, degree, **fields)


def make_scores(call, array, product=None):
    """Make a value of degree 2."""
    return make_value(call, array, 2, product=product or call.product)


def push_through(call, result, positions, *, summed=False, bases=None, roots=None):
    """Return the results of an operator that is linear in the arguments at `positions`.

    Args:
        summed: Whether it is a sum over entries.
        bases, roots: For each result the base, and the value of which it is a gate, or None.
    """
    sources = list_sources(call, positions)
    values = []
    for index, array in split_results(result):
        fields = {} if bases is None else {"base": bases[index or 0]}
        if not is_floating(array):
            values.append(call.constant(array))
        elif call.product is not None:
            values.append(make_scores(call, array))
        else:
            root = None if roots is None else roots[index or 0]
            summed_base = sources[0].base if summed and len(sources) == 1 else None
            push = push_linear(call, positions, sources, index)
            fields |= {"gate_of": root, "summed_base": summed_base}
            values.append(make_value(call, array, sources=sources, push=push, **fields))
    return values if isinstance(result, list | tuple) else values[0]


def list_sources(call: Call, positions: tuple[int, ...]) -> tuple[Value, ...]:
    """List the values that an operator depends on, all of them among the arguments at `positions`.

    Raises:
        ValueError: Another argument depends on the state too.
    """
    linear = [arg for i, arg in enumerate(call.args) if i in positions]
    sources = {id(v): v for v in list_values(linear) if v.degree}
    if len(sources) != len(call.dependent):
        refuse_argument(call)
    return tuple(sources.values())


def push_linear(call, positions, sources, index):
    """Makes the function that applies a linear operator to tangents.

    Args:
        call: The call.
        positions: Positions of the arguments in which the operator is linear.
        sources: Values whose tangents are passed.
        index: Which of several results; None for the only one.
    """

    def push(*tangents):
        result = call.compute_linear(positions, sources, tangents)
        return result if index is None else result[index]

    return push


def make_gate(call, result, root, base, slope=None):
    """Return a non-linear entrywise function of `root`: a frozen quotient times it.

    Args:
        slope: Computes the derivative of the function, for where `root` is 0.
    """
    at_zero = evaluate_at_zero(call)

    def push(tangent):
        """Multiplies a tangent of the root by result/root, or by the slope where the root is 0."""
        is_zero = root.array == 0
        quotient = result / torch.where(is_zero, torch.ones_like(root.array), root.array)
        slopes = torch.zeros_like(quotient) if slope is None else slope()
        return (tangent * torch.where(is_zero, slopes, quotient)).to(result.dtype)

    fields = {"base": base, "gate_of": root, "at_zero": at_zero}
    return make_value(call, result, sources=(root,), push=push, **fields)


def evaluate_at_zero(call):
    """Compute an entrywise function of one value h where h is 0; None if that is not known."""
    dependent = call.dependent
    numbers = [0.0 if v.gate_of is None else v.at_zero for v in dependent]
    if None in numbers or any(v.shape != () for v in call.values if not v.degree):
        return None
    zeros = [v.array.new_full((), n) for v, n in zip(dependent, numbers, strict=True)]
    result = call.compute_replacing(tuple(dependent), tuple(zeros))
    is_known = not result.is_complex() and bool(torch.isfinite(result))
    return float(result) if is_known else None


def apply_entrywise(call, result, position):
    """Return f(h), a non-linear entrywise function of the argument h at `position`.

    It is the frozen gate f(h)/h times h, see `frozen`; `slope` computes f'(h) for entries where h
    is 0. Of a product of two values (scores) it is a constant.
    """
    dependent = call.dependent
    value = call.get(position)
    if len(dependent) != 1 or dependent[0] is not value:
        refuse_argument(call)
    if value.degree == 2:
        return call.constant(result, product=value.product)
    slope = None
    if value.gate_of is None:

        def slope():
            """Computes f'(h) of each entry by reverse mode."""

            def function(array):
                return call.compute_with({position: array})

            slopes, pull = torch.func.vjp(function, value.array)
            return pull(torch.ones_like(slopes))[0]

    base = value.base if value.shape == result.shape else call.bases.new()
    return make_gate(call, result, value.root, base, slope)


def apply_power(call, result):
    """Return a power: linear for exponent 1, a constant for 0, else a gate.

    A gate multiplies h by the frozen quotient f(h)/h, see `apply_entrywise`.
    """
    exponent = call.argument(1, None)
    if isinstance(call.get(1), Value) and call.get(1).degree:
        if isinstance(call.get(0), Value) and call.get(0).degree:
            refuse_argument(call)
        return apply_entrywise(call, result, 1)
    if not isinstance(exponent, Tensor) and exponent == 1:
        bases, roots = [call.get(0).base], [call.get(0).gate_of]
        return push_through(call, result, (0,), bases=bases, roots=roots)
    if not isinstance(exponent, Tensor) and exponent == 0:
        return call.constant(result)
    return apply_entrywise(call, result, 0)
