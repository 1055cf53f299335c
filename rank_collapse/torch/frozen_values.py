"""Values that carry paths: of linear operators, entrywise functions as frozen gates, and scores.

Values have degree 0 (constant or frozen), 1 (paths pass them) or 2 (a product of two values of
degree 1), see `values`.
"""

import torch
from torch import Tensor

from rank_collapse.torch.calls import Call, list_values, split_results
from rank_collapse.torch.refusals import refuse_argument
from rank_collapse.torch.values import Value


def make_value(call, array, degree=1, **fields):
    """Make a value that depends on the state from which paths start.

    Args:
        call: The operator that computed it.
        array: The tensor.
        degree: 1 for a value that paths pass, 2 for a product of two of them.
        **fields: Further attributes of `Value`. Without "base", which is one number for all
            entrywise functions of one value, the value is a function of itself alone.
    """
    fields.setdefault("base", call.bases.new())
    return Value(array, degree, **fields)


def make_scores(call, array, product=None):
    """Make a product of two values that paths pass, such as attention scores: no path passes it.

    Args:
        call: The operator that computed it.
        array: The tensor.
        product: What was multiplied, for messages; None for the product among the arguments.
    """
    return make_value(call, array, 2, product=product or call.product)


def push_through(call, result, positions, *, summed=False, bases=None, roots=None):
    """Return the results of an operator that is linear in the arguments at `positions`: it is
    applied to their path sums, too.

    Args:
        call: The operator, with its arguments.
        result: Its result, a tensor or several.
        positions: Positions of the arguments in which it is linear.
        summed: Whether it is a sum over entries.
        bases: For each result that is an entrywise function of a value h, the number that all
            functions of h share.
        roots: For each result that is a non-linear entrywise function of a value h, the value h;
            else None.
    """
    sources = list_sources(call, positions)
    values = []
    for index, array in split_results(result):
        fields = {} if bases is None else {"base": bases[index or 0]}
        if call.product is not None:
            values.append(make_scores(call, array))
        else:
            root = None if roots is None else roots[index or 0]
            summed_base = sources[0].base if summed else None
            push = push_linear(call, positions, sources, index)
            fields |= {"gate_of": root, "summed_base": summed_base}
            values.append(make_value(call, array, sources=sources, push=push, **fields))
    return values if isinstance(result, list | tuple) else values[0]


def list_sources(call: Call, positions: tuple[int, ...]) -> tuple[Value, ...]:
    """List the values that an operator depends on, all of them among the arguments at `positions`.

    Args:
        call: The operator, with its arguments.
        positions: Positions of the arguments in which it is linear.

    Raises:
        ValueError: Another argument depends on the state too.
    """
    linear = [arg for i, arg in enumerate(call.args) if i in positions]
    sources = {id(v): v for v in list_values(linear) if v.degree}
    if len(sources) != len(call.dependent):
        refuse_argument(call)
    return tuple(sources.values())


def push_linear(call, positions, sources, index):
    """Make the function that applies a linear operator to tangents, the path sums of one length.

    Args:
        call: The operator, with its arguments.
        positions: Positions of the arguments in which it is linear.
        sources: Values whose tangents are passed.
        index: Which of several results; None for the only one.
    """

    def push(*tangents):
        result = call.compute_linear(positions, sources, tangents)
        return result if index is None else result[index]

    return push


def widen(call, value, shape):
    """Expand a value to the shape of a result that has more entries, such as h to that of a
    function of h times an array.

    Args:
        call: The operator that computed the result.
        value: The value; None stays None.
        shape: Shape of the result.
    """
    if value is None or value.shape == shape:
        return value
    array = value.array.expand(shape)
    return make_value(call, array, sources=(value,), push=lambda tangent: tangent.expand(shape))


def make_gate(call, result, root, base, slope=None):
    """Return a non-linear entrywise function f(h): the quotient f(h)/h, which is frozen, times h.

    Args:
        call: The operator, with its arguments.
        result: Its result f(h).
        root: The value h.
        base: The number which all entrywise functions of h share.
        slope: Computes f′(h), the factor where h is 0; None for the factor 0 there.
    """
    at_zero, root = evaluate_at_zero(call), widen(call, root, result.shape)

    def push(tangent):
        """Multiplies a tangent of the root by result/root, or by the slope where the root is 0."""
        is_zero = root.array == 0
        quotient = result / torch.where(is_zero, torch.ones_like(root.array), root.array)
        slopes = torch.zeros_like(quotient) if slope is None else slope()
        return (tangent * torch.where(is_zero, slopes, quotient)).to(result.dtype)

    fields = {"base": base, "gate_of": root, "at_zero": at_zero}
    return make_value(call, result, sources=(root,), push=push, **fields)


def evaluate_at_zero(call):
    """Compute f(0) of an entrywise function f of one value h; None if it is not a known real
    number.

    Args:
        call: The operator; its arguments are functions of h, or numbers.
    """
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

    Its quotient f(h)/h is frozen and multiplies the path sums of h; where h is 0 it is f′(0). If h
    is itself such a function of a value, the quotient is by that value, and 0 where that value is
    0. If h is a product of two values (scores), f(h) is a constant.

    Args:
        call: The operator, with its arguments.
        result: Its result f(h).
        position: Position of h among the arguments.
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

            slopes, pull = torch.func.vjp(function, value.array.expand(result.shape))
            return pull(torch.ones_like(slopes))[0]

    base = value.base if value.shape == result.shape else call.bases.new()
    return make_gate(call, result, value.root, base, slope)


def apply_power(call, result):
    """Return a power: linear for exponent 1, a constant for 0, else an entrywise function f(h) = g
    h.

    The quotient g = f(h)/h is frozen, see `apply_entrywise`.

    Args:
        call: The operator, with base and exponent.
        result: Its result.
    """
    exponent = call.argument(1, None)
    if isinstance(call.get(1), Value) and call.get(1).degree:
        if isinstance(call.get(0), Value) and call.get(0).degree:
            refuse_argument(call)
        return apply_entrywise(call, result, 1)
    if not isinstance(exponent, Tensor) and exponent == 1:
        bases, roots = [call.get(0).base], [call.get(0).gate_of]
        power = push_through(call, result, (0,), bases=bases, roots=roots)
        power.at_zero = call.get(0).at_zero
        return power
    if not isinstance(exponent, Tensor) and exponent == 0:
        return call.constant(result)
    return apply_entrywise(call, result, 0)
