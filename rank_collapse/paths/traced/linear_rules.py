"""Rules of linear operations: entries in other places, joins, and sums.

The kinds and forms of values (constant, frozen, state, gate, factor, product; functions of a root)
are defined in `values`.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array

from rank_collapse.paths.traced import primitives
from rank_collapse.paths.traced.equation import Equation, move_entries
from rank_collapse.paths.traced.programs import bind
from rank_collapse.paths.traced.values import (
    Kind,
    Value,
    is_inexact,
    make_frozen,
    make_gate,
    make_state,
    resolve_state,
)


def move(equation: Equation, value: Value) -> list[Value]:
    """Move, copy or reshape the entries of a value, together with its sums over paths.

    A gate (a function of the entries of a state h) becomes the same function of the moved h. Values
    that pass no paths keep their kind.

    Args:
        equation: The operation.
        value: Its argument.

    Returns:
        The results: one, or several for a split.
    """
    eqn = equation.eqn
    arrays = bind(eqn, [value.array])
    if value.kind in (Kind.FACTOR, Kind.PRODUCT):
        return [value.replace(array=a) for a in arrays]
    if value.kind == Kind.STATE and not is_inexact(arrays[0]):
        return [make_frozen(a) for a in arrays]
    is_identity = equation.name in primitives.IDENTITIES
    moved = []
    for i, array in enumerate(arrays):
        key = (equation.name, repr(sorted(eqn.params.items(), key=str)), i)
        move_array = (lambda a: a) if is_identity else (lambda a, i=i: bind(eqn, [a])[i])
        moved.append(move_entries(value, move_array, key, equation.slots).replace(array=array))
    return moved


def choose(equation: Equation, values: Sequence[Value]) -> Value:
    """Choose entries of several arrays, such as a concatenation or an update of a slice.

    If all arguments that depend on the input are gates (functions of the entries of a state), the
    result is a gate, too, but it is no longer known of which state. Otherwise it is a state, whose
    sums over paths are chosen alike.

    Args:
        equation: The operation.
        values: Its arguments.
    """
    array = bind(equation.eqn, [v.array for v in values])[0]
    return join(equation, array, values, keep_gates=True)


def join(
    equation: Equation, array: Array, values: Sequence[Value], *, keep_gates: bool = False
) -> Value:
    """Return a result that is linear in all its arguments that pass paths (states) together.

    Gates, functions f(h) of the entries of a state h, are taken as states: f(h)/h times h. Frozen
    arguments add nothing to the sums over paths. What may only multiply or weigh others (a factor)
    cannot be added to a state: the result is then a product, which later rules refuse.

    Args:
        equation: The operation.
        array: Its result.
        values: Its arguments.
        keep_gates: Whether the result is a gate if all dependent arguments are; otherwise it is a
            state.
    """
    dependent = [v for v in values if v.depends]
    if any(v.kind == Kind.PRODUCT for v in dependent):
        return equation.make_product(array, [v for v in dependent if v.kind == Kind.PRODUCT])
    flags = equation.shared_flags(values)
    all_gates = all(v.kind == Kind.GATE for v in dependent)
    resolved = [resolve_state(v, equation.slots) for v in values]
    kinds = {v.kind for v in resolved if v.depends}
    if not kinds:
        return make_frozen(array)
    if Kind.FACTOR in kinds:
        factors = [v for v in resolved if v.kind == Kind.FACTOR]
        if kinds == {Kind.FACTOR}:
            return factors[0].replace(array=array)
        return equation.make_product(array, factors)
    sums = equation.push_sums(resolved)
    if all_gates and keep_gates:
        passes_whole = any(v.passes_whole for v in dependent)
        flags |= {"is_step": False, "is_exponential": False}
        return Value(array, Kind.GATE, sums, passes_whole=passes_whole, **flags)
    return make_state(array, sums, is_shifted=flags["is_shifted"] and keep_gates)


def add_up(equation: Equation, values: Sequence[Value]) -> Value:
    """Return the result of an operation that is linear in all its arguments together."""
    array = bind(equation.eqn, [v.array for v in values])[0]
    return join(equation, array, values)


def add(equation: Equation, values: Sequence[Value]) -> Value:
    """Add two values.

    A sum of functions of one root is a function of that root. A state plus a frozen value is a
    new state; a state plus a number stays a function of its root. Other sums of dependent values
    are gates if they have forms, else they are joined linearly. A product or a factor stays one.
    """
    array = bind(equation.eqn, [v.array for v in values])[0]
    dependent = [v for v in values if v.depends]
    if any(v.kind in (Kind.FACTOR, Kind.PRODUCT) for v in dependent):
        return join(equation, array, values)
    adds_frozen = any(v.kind == Kind.FROZEN for v in values)
    flags = equation.shared_flags(values)
    flags["is_shifted"] |= adds_frozen
    forms = equation.make_forms(values, lambda parts: _add_quotients(equation, values, parts))
    if all(v.kind == Kind.STATE for v in dependent):
        sums = equation.push_sums(values)
        if adds_frozen:
            forms = ()  # the sum is a new state, and no function of a root
        shifted = flags["is_shifted"]
        if forms and all(v.depends or v.fill is not None for v in values):
            # A number is part of the function of a root, not a bias: h + 3 is no new state.
            return Value(array, Kind.STATE, sums, forms, is_shifted=shifted)
        return make_state(array, sums, forms, is_shifted=shifted)
    if forms:
        if any(v.kind == Kind.STATE for v in dependent):
            flags |= {"is_exponential": False, "is_step": False, "is_weight": False}
        return make_gate(array, forms, **flags)
    return join(equation, array, values, keep_gates=True)


def _add_quotients(equation, values, parts):
    """Return the quotient g of a sum of functions f(h): the sum of their quotients.

    An added constant has no quotient, and adds 0 to the sum.

    Args:
        equation: The sum.
        values: Its arguments.
        parts: The arguments as functions of one root, `Form`s; None for a constant.

    Returns:
        A function that computes g; None if the quotient of an argument is only known as f(h)/h. The
        quotient of the sum is then f(h)/h too (`Form.quotient`).
    """
    functions = [part for part in parts if part is not None]
    if not all(part.is_exact or part.quotient is not None for part in functions):
        return None

    def combine(*quotients):
        """Add the quotients g of the arguments, with g h = f(h); that of a constant is None."""
        example = next(q for q in quotients if q is not None)
        terms = [jnp.zeros_like(example) if q is None else q for q in quotients]
        return bind(equation.eqn, terms)[0]

    return equation.compute_lazily(combine, values, parts)
