"""Rules of products, quotients and contractions: which factor carries paths, which is fixed.

The kinds and forms of values (constant, frozen, state, gate, factor, product; functions of a root)
are defined in `values`.
"""

from collections.abc import Sequence

import numpy as np

from rank_collapse.paths.traced.equation import PRODUCT, Equation
from rank_collapse.paths.traced.programs import bind
from rank_collapse.paths.traced.values import (
    Kind,
    Value,
    compute_quotient,
    make_frozen,
    make_gate,
    make_state,
    resolve_state,
)


def negate(equation: Equation, values: Sequence[Value]) -> Value:
    """Negate one value."""
    return scale(equation, values, 0)


def scale(equation: Equation, values: Sequence[Value], position: int) -> Value:
    """Multiply or divide one argument by the others, which are constants on all paths.

    The sums over paths of the argument are multiplied by the same factor. A gate (a function f(h)
    of the entries of a state h) stays a gate, except that an exponential times a frozen value is
    frozen.

    Args:
        equation: The product or quotient.
        values: The arguments.
        position: Index of the argument that passes paths.
    """
    arrays = [v.array for v in values]
    array = bind(equation.eqn, arrays)[0]
    value = values[position]
    factors = [v for i, v in enumerate(values) if i != position]
    is_frozen = any(v.kind != Kind.CONSTANT for v in factors)
    if value.kind in (Kind.FACTOR, Kind.PRODUCT):
        return value.replace(array=array)
    if value.kind == Kind.GATE and value.is_exponential and is_frozen:
        return make_frozen(array)

    def scale_quotient(parts):
        """Return the scaled quotient of the argument at the position, or None for f(h)/h."""
        part = parts[position]
        if part.quotient is None and not part.is_exact:
            return None

        def compute():
            """Compute the quotient g of the result, where g h is the result, at the call."""
            arguments = list(arrays)
            arguments[position] = compute_quotient(value, part)
            return bind(equation.eqn, arguments)[0]

        return compute

    fixed = [make_frozen(v.array).replace(fill=v.fill) for v in values]
    fixed[position] = value
    forms = equation.make_forms(fixed, scale_quotient) if value.forms else ()
    if value.kind == Kind.GATE and forms:
        return make_gate(array, forms, **equation.shared_flags(fixed))
    sums = equation.pass_through(values, position)
    if value.kind == Kind.GATE:  # of several states: it has sums instead of forms
        return value.replace(array=array, sums=sums)
    if is_frozen:
        return make_state(array, sums, is_shifted=value.is_shifted)
    return Value(array, Kind.STATE, sums, forms, is_shifted=value.is_shifted)


def multiply(equation: Equation, values: Sequence[Value]) -> Value:
    """Multiply two values, entry by entry, at least one of which depends on the input.

    If one is a constant, it scales the other. If both are functions of the entries of one state h,
    the product is a gate: a function of h as well. If one is a gate and the other a state, which
    passes paths, the gate is frozen and scales the state's sums over paths. Otherwise the product
    passes no paths: it is a `Kind.FACTOR`, or a `Kind.PRODUCT`, which later rules refuse or freeze.

    Args:
        equation: The product.
        values: Its two factors.
    """
    dependent = [i for i, v in enumerate(values) if v.depends]
    if len(dependent) == 1:
        return scale(equation, values, dependent[0])
    array = bind(equation.eqn, [v.array for v in values])[0]
    if any(v.kind == Kind.PRODUCT for v in values):
        return equation.make_product(array, values)

    def multiply_quotients(parts):
        """Find the quotient g of the product p(h) of two functions of one state h, with g h =
        p(h).

        If a factor f has f(0) = 0, g is f(h)/h times the other factor.

        Args:
            parts: The factors as functions of h, two `Form`s.

        Returns:
            A function that computes g; None if neither factor is 0 where h is 0.
        """
        exact = [i for i in (0, 1) if parts[i].is_exact and not values[i].is_step]
        if not exact:
            return None
        one, other = exact[0], 1 - exact[0]

        def compute():
            """Compute f(h)/h of the first factor f with f(0) = 0, times the other factor."""
            return compute_quotient(values[one], parts[one]) * values[other].array

        return compute

    forms = equation.make_forms(values, multiply_quotients)
    if forms:
        return make_gate(array, forms, **equation.shared_flags(values) | {"is_exponential": False})
    state = _find_state(equation, values, _is_scale)
    if state is None:
        return equation.make_factor(array, "a product of two functions of x")
    if state < 0:
        return equation.make_product(array, reason=PRODUCT)
    return _weigh(equation, values, state)


def _find_state(equation, values, is_frozen):
    """Return which of two factors passes paths, while the other factor is a gate.

    Args:
        equation: The product.
        values: The factors.
        is_frozen: Function of a gate: whether it is frozen where the other factor is a gate as
            well.

    Returns:
        0 or 1; −1 if both factors could pass paths; None if neither can.
    """
    kinds = [v.kind for v in values]
    if kinds.count(Kind.STATE) == 2:
        return -1
    if Kind.STATE in kinds:
        return kinds.index(Kind.STATE)
    gates = [i for i, v in enumerate(values) if v.kind == Kind.GATE and v.passes_whole]
    if len(gates) == 2:
        gates = [i for i in gates if not is_frozen(values[i])]
        if len(gates) != 1:
            return -1
    return gates[0] if gates else None


def _weigh(equation, values, position):
    """Multiply the argument at a position by the other one, which is a frozen gate.

    Args:
        equation: The product.
        values: Its arguments.
        position: Index of the argument that passes paths.

    Returns:
        A state whose sums over paths are multiplied, too.
    """
    values = list(values)
    values[position] = resolve_state(values[position], equation.slots)
    array = bind(equation.eqn, [v.array for v in values])[0]
    return make_state(array, equation.pass_through(values, position))


def divide(equation: Equation, values: Sequence[Value]) -> Value:
    """Divide two values, entry by entry, at least one of which depends on the input.

    If both are functions of the entries of one state h, the quotient is a gate: a function of h as
    well. Otherwise the denominator is frozen, and scales the numerator's sums over paths. What
    passes no paths itself, such as an exponential (the numerator of a softmax), gives a frozen
    quotient; a `Kind.PRODUCT` stays one.

    Args:
        equation: The quotient.
        values: Numerator and denominator.
    """
    numerator, denominator = values
    if not denominator.depends:
        return scale(equation, values, 0)
    array = bind(equation.eqn, [v.array for v in values])[0]
    if numerator.kind == Kind.PRODUCT:
        return numerator.replace(array=array)
    has_no_function = numerator.kind == Kind.FROZEN
    has_no_function |= denominator.kind in (Kind.FACTOR, Kind.PRODUCT)
    if has_no_function and not numerator.depends:
        return make_frozen(array)

    def divide_quotients(parts):
        """Find the quotient g of f(h)/d, with g h = f(h)/d: f(h)/h over d. None unless f(0) =
        0."""
        if parts[0] is None or not parts[0].is_exact:
            return None
        return lambda: compute_quotient(numerator, parts[0]) / denominator.array

    forms = equation.make_forms(values, divide_quotients)
    if forms:
        flags = equation.shared_flags(values) | {"is_exponential": False}
        flags["is_weight"] |= not numerator.depends
        return make_gate(array, forms, **flags)
    if not numerator.depends:
        return make_frozen(array)
    if numerator.kind == Kind.FACTOR or numerator.is_exponential:
        return make_frozen(array)
    if numerator.kind == Kind.GATE and not numerator.passes_whole:
        return scale(equation, [numerator, make_frozen(denominator.array)], 0)
    return _weigh(equation, values, 0)


def contract(equation: Equation, values: Sequence[Value]) -> Value:
    """Contract two arrays, as a matrix product or a convolution does.

    If only one depends on the input, it passes its sums over paths through the contraction. If one
    is a state, which passes paths, and the other consists of weights, such as softmax weights or a
    factor for each entry, the weights are frozen. Other products, such as queries times keys, pass
    no paths: they are a `Kind.FACTOR` or a `Kind.PRODUCT`.

    Args:
        equation: The contraction.
        values: The two arrays.
    """
    dependent = [i for i, v in enumerate(values[:2]) if v.depends]
    arrays = [v.array for v in values]
    array = bind(equation.eqn, arrays)[0]
    if len(dependent) == 1:
        value = values[dependent[0]]
        resolved = list(values)
        resolved[dependent[0]] = value = resolve_state(value, equation.slots)
        if value.kind != Kind.STATE:
            return value.replace(array=array, fill=None)
        return make_state(array, equation.pass_through(resolved, dependent[0]))
    if any(v.kind == Kind.PRODUCT for v in values):
        return equation.make_product(array, values)
    state = _find_state(equation, values[:2], lambda value: value.is_weight)
    if state is None:
        return equation.make_factor(array, "a product of two functions of x")
    if state >= 0 and _is_weight(equation, values, 1 - state):
        return _weigh(equation, values, state)
    return equation.make_product(array, reason=f"{PRODUCT} ({equation.name})")


def _is_weight(equation, values, position):
    """Return whether an argument of a contraction may be frozen as the weights of the other.

    It may if it is a factor, a gate made by a transcendental function (such as the exponentials of
    a softmax), or if it has one entry for each entry of the other, so that it only multiplies.

    Args:
        equation: The contraction.
        values: Its arguments.
        position: Index of the argument.
    """
    value = values[position]
    if value.kind == Kind.FACTOR or value.is_weight:
        return True
    if equation.name != "dot_general":
        return False
    contracted, batched = equation.eqn.params["dimension_numbers"]
    shared = {*contracted[position], *batched[position]}
    return all(n == 1 for i, n in enumerate(value.array.shape) if i not in shared)


def _is_scale(value: Value) -> bool:
    """Return whether f(0) of a gate f(h) is known and not 0, as a sigmoid's: it scales an
    activation."""
    at_zero = value.forms[0].at_zero if value.forms else None
    return at_zero is not None and bool(np.any(at_zero != 0))
