"""Rules of functions of each entry, choices between two values, and statistics.

The kinds and forms of values (constant, frozen, state, gate, factor, product; functions of a root)
are defined in `values`.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from rank_collapse.paths.traced import primitives
from rank_collapse.paths.traced.channels import LazySums
from rank_collapse.paths.traced.equation import Equation
from rank_collapse.paths.traced.linear_rules import (
    join,
)
from rank_collapse.paths.traced.programs import bind, place_tangents
from rank_collapse.paths.traced.values import (
    Kind,
    Value,
    compute_quotient,
    is_inexact,
    make_frozen,
    make_gate,
    make_state,
    resolve_state,
)


def bend(equation: Equation, values: Sequence[Value]) -> Value:
    """Apply a nonlinear function to each entry.

    Of a state h, or of a gate (a function of the entries of h), the result is a gate: as a factor
    it is frozen, and as a state it is f(h)/h times h. An exponential after a statistic was
    subtracted (a softmax), and a function of values that pass no paths, are frozen.

    Args:
        equation: The function.
        values: Its arguments: one, or base and exponent of a power.
    """
    values = equation.broadcast(values)
    array = bind(equation.eqn, [v.array for v in values])[0]
    dependent = [v for v in values if v.depends]
    is_power_one = (
        equation.name == "pow" and not values[1].depends and _equals(values[1].fill, 1)
    ) or (equation.name == "integer_pow" and equation.eqn.params["y"] == 1)
    if is_power_one:
        return values[0].replace(array=array)
    if any(v.kind in (Kind.FACTOR, Kind.PRODUCT) for v in dependent):
        return make_frozen(array)
    exponent_depends = equation.name == "pow" and values[1].depends and not values[0].depends
    is_exponential = equation.name in primitives.EXPONENTIALS or exponent_depends
    if is_exponential and any(v.is_shifted for v in dependent):
        return make_frozen(array)
    forms = equation.make_forms(values, lambda parts: _bend_quotient(equation, values, parts))
    if not forms:
        return equation.make_factor(array, f"{equation.name} of values that depend on x")
    is_weight = equation.name in primitives.TRANSCENDENTAL or exponent_depends
    is_weight |= equation.name in primitives.POLYNOMIAL and all(v.is_weight for v in dependent)
    reason = (
        equation.describe(f"{equation.name} of a value that depends on x") if is_exponential else ""
    )
    return make_gate(
        array,
        forms,
        is_weight=is_weight,
        is_exponential=is_exponential,
        is_step=all(v.is_step for v in dependent),
        reason=reason,
    )


def _bend_quotient(equation, values, parts):
    """Return a function that computes the quotient of a power or of |h| without a division.

    None for other functions, for constants, and where the argument is not 0 at h = 0.

    Args:
        equation: The function.
        values: Its arguments; the first is the base.
        parts: The arguments as functions of a root, `Form`s; None for a constant.
    """
    part, value = parts[0], values[0]
    power = {"square": 2}.get(equation.name, equation.eqn.params.get("y", 0))
    if part is None or not part.is_exact:
        return None
    if equation.name == "abs":
        return lambda: compute_quotient(value, part) * jnp.sign(value.array)
    if equation.name in ("square", "integer_pow") and power >= 2:
        return lambda: compute_quotient(value, part) * value.array ** (power - 1)
    return None


def take_larger(equation: Equation, values: Sequence[Value]) -> Value:
    """Take the larger or the smaller of two values, entry by entry; which one it is, is frozen.

    Of two functions of the entries of one state h the result is a gate, another function of h.
    Otherwise the sums over paths are taken from the chosen value. Where two values are equal and
    one is a constant, the constant is chosen.

    Args:
        equation: "max" or "min".
        values: The two values, of one shape.
    """
    array = bind(equation.eqn, [v.array for v in values])[0]
    dependent = [v for v in values if v.depends]
    if any(v.kind == Kind.PRODUCT for v in dependent):
        return make_frozen(array)
    if any(v.kind == Kind.FACTOR for v in dependent):
        return equation.make_factor(array, f"{equation.name} of a statistic of x")
    order = jnp.greater if equation.name == "max" else jnp.less
    # A tie is the constant's.
    constant = next((i for i, v in enumerate(values) if not v.depends), 1)
    takes_other = order(values[1 - constant].array, values[constant].array)

    def choose_quotient(parts):
        """Find the function for the quotient g of the larger value, g h; None if one of the two is
        not known in this form."""
        for value, part in zip(values, parts, strict=True):
            if part is None and not _equals(value.fill, 0):
                return None
            if part is not None and not (part.is_exact or part.quotient is not None):
                return None

        def choose(*quotients):
            """Return g of the chosen value, with g h the value; 0 for a constant 0."""
            other, tied = quotients[1 - constant], quotients[constant]
            return jnp.where(takes_other, other, 0 if tied is None else tied)

        return equation.compute_lazily(choose, values, parts)

    forms = equation.make_forms(values, choose_quotient)
    if forms:
        return make_gate(array, forms, **equation.shared_flags(values) | {"is_weight": False})
    cases = [resolve_state(v, equation.slots) for v in values]
    if not any(v.depends for v in cases):  # steps, which pass no paths
        return make_frozen(array)
    if not all(v.kind in (Kind.STATE, Kind.FROZEN) for v in cases):
        return equation.make_factor(array, f"{equation.name} of two values that depend on x")
    return make_state(
        array, _select_sums(equation, takes_other, cases[constant], cases[1 - constant])
    )


def _select_sums(equation, takes_second, first, second):
    """Return the sums of a choice between two values by a mask that is fixed.

    Args:
        equation: The choice.
        takes_second: Bool, of the shape of the values.
        first, second: The values; at least one has sums, and the sums of the other are 0.
    """
    has_sums = [value.sums is not None for value in (first, second)]

    def choose(*tangents):
        """Choose between the sums of one path length, entry by entry."""
        zero = jnp.zeros((), tangents[0].dtype)
        pair = [zero if t is None else t for t in place_tangents(tangents, has_sums)]
        return jnp.where(takes_second, pair[1], pair[0])

    sums = [value.sums for value in (first, second) if value.sums is not None]
    return LazySums(equation.slots.map(choose), sums)


def select(equation: Equation, values: Sequence[Value]) -> Value:
    """Select entries of several values by a mask, as `jnp.where` does; the mask is frozen.

    If the mask and the selected values are functions of the entries of one state h, as in a ReLU
    that is written out, the result is a gate: a function of h. Otherwise the sums over paths are
    selected by the same mask.

    Args:
        equation: The selection.
        values: The mask, then the values to select from.
    """
    predicate, *cases = values
    array = bind(equation.eqn, [v.array for v in values])[0]
    dependent = [v for v in cases if v.depends]
    if any(v.kind in (Kind.FACTOR, Kind.PRODUCT) for v in dependent):
        return join(equation, array, [make_frozen(predicate.array), *cases])

    def select_quotient(parts):
        """Find the function for the quotient g of the selected values, g h; None if one of them is
        not known in this form."""
        for value, part in zip(cases, parts[1:], strict=True):
            if part is None and not _equals(value.fill, 0):
                return None
            if part is not None and not (part.is_exact or part.quotient is not None):
                return None

        def fill(_, *quotients):
            """Select between the quotients g of the values, with g h = f(h); 0 for a constant
            0."""
            shape = array.shape
            filled = [
                jnp.zeros(shape, array.dtype) if q is None else q.astype(array.dtype)
                for q in quotients
            ]
            return bind(equation.eqn, [predicate.array, *filled])[0]

        fixed = [None, *parts[1:]]
        return equation.compute_lazily(fill, values, fixed)

    if predicate.depends:
        forms = equation.make_forms(values, select_quotient)
        if forms:
            flags = equation.shared_flags(cases if dependent else values)
            flags["is_step"] = all(v.is_step or not v.depends for v in cases)
            flags["is_weight"] &= bool(dependent)
            return make_gate(array, forms, **flags)
        predicate = make_frozen(predicate.array)
    values = [predicate, *cases]
    if not dependent:
        return make_frozen(array)
    others_are_zero = all(_equals(v.fill, 0) for v in cases if not v.depends)
    if all(v.kind == Kind.GATE for v in dependent) and others_are_zero:
        forms = equation.make_forms(values, lambda parts: select_quotient(parts))
        if forms:
            return make_gate(array, forms, **equation.shared_flags(values))
    return join(equation, array, values, keep_gates=True)


def compare(equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Compare two values: the mask is a gate, a step function of a state h, or frozen.

    It is a gate if each value is a function of the entries of one h, or a constant, so that a
    product of h and its mask h > 0 is recognised as a ReLU.

    Args:
        equation: The comparison.
        values: The two values.
    """
    values = equation.broadcast(values)
    arrays = bind(equation.eqn, [v.array for v in values])
    if all(v.kind in (Kind.CONSTANT, Kind.STATE, Kind.GATE) for v in values):
        forms = equation.make_forms(values)
        if forms:
            return [make_gate(arrays[0], forms, is_step=True)]
    return [make_frozen(a) for a in arrays]


def measure(equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Compute a statistic over entries, such as a maximum, or an index, such as an argmax.

    Its results pass no paths. Whole numbers are frozen, and so are statistics of values that pass
    no paths. Others are a `Kind.FACTOR`, which may only multiply, divide or weigh a state.

    Args:
        equation: The statistic.
        values: Its arguments.
    """
    arrays = bind(equation.eqn, [v.array for v in values])
    kinds = {v.kind for v in values if v.depends}
    if kinds <= {Kind.PRODUCT, Kind.FACTOR}:
        return [make_frozen(a) for a in arrays]
    reason = f"{equation.name} of values that depend on x"
    return [equation.make_factor(a, reason) if is_inexact(a) else make_frozen(a) for a in arrays]


def _equals(fill: Any, number: float | int) -> bool:
    """Whether a constant is filled with a number."""
    return fill is not None and bool(fill == number)
