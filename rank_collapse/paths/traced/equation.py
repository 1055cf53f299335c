"""One equation of a traced program, with what its rule needs: forms, sums, kinds of results.

The kinds and forms of values (constant, frozen, state, gate, factor, product; functions of a root)
are defined in `values`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from rank_collapse.paths.traced import primitives
from rank_collapse.paths.traced.channels import LazySums, Slots
from rank_collapse.paths.traced.programs import bind, place_tangents, push_tangents
from rank_collapse.paths.traced.values import (
    Form,
    Kind,
    Value,
    compute_quotient,
    gate_sums,
    is_inexact,
    make_frozen,
)

PRODUCT = "a product of two values that depend on x"


def move_entries(value: Value, move: Callable, key: Any, slots: Slots) -> Value:
    """Return a value after an operation that reorders or copies its entries.

    Args:
        value: The value.
        move: The operation, of an array.
        key: Equal for equal operations, so that h and f(h) keep one root.
        slots: The slots of the sums.
    """
    move_sums, shape = slots.map(move), value.array.shape

    def move_computed(compute):
        """Returns a function that computes an array of the value's shape and moves it."""
        return lambda: move(jnp.broadcast_to(compute(), shape))

    def move_form(form):
        root = form.root.derive(key, move, move_sums)
        quotient = None if form.quotient is None else move_computed(form.quotient)
        return Form(root, form.at_zero, move_computed(form.slope), quotient)

    forms = tuple(map(move_form, value.forms))
    sums = None if value.sums is None else LazySums(move_sums, [value.sums])
    return value.replace(array=move(value.array), sums=sums, forms=forms)


class Equation:
    """An equation of a traced program.

    Attributes:
        slots: Slots of the sums by length.
        place: Position of the equation in the caller's code.
        eqn: The equation as JAX has it; `name` is the name of its primitive.
    """

    def __init__(self, slots: Slots, place: str, eqn: JaxprEqn):
        self.slots, self.place, self.eqn = slots, place, eqn
        self.name = eqn.primitive.name

    def apply_to_constants(self, values):
        """Compute the results of arguments that do not depend on the input.

        A constant with the same number in all entries keeps this number as `fill`: operations that
        change the shape pass it on, and pointwise ones compute it. Otherwise `fill` is None.
        """
        arrays = bind(self.eqn, [v.array for v in values])
        if any(v.kind == Kind.FROZEN for v in values):
            return [make_frozen(a) for a in arrays]
        fill = None
        if self.name in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims"):
            fill = values[0].fill
        elif self.name in primitives.POINTWISE or self.name == "convert_element_type":
            fill = self.evaluate([v.fill for v in values], values)
        return [Value(a, fill=fill) for a in arrays]

    def evaluate(self, numbers, values):
        """Compute the equation on one number for each argument; None where one is not known."""
        if any(number is None for number in numbers):
            return None
        with jax.ensure_compile_time_eval():
            arguments = [
                jnp.asarray(number, jnp.result_type(v.array))
                for number, v in zip(numbers, values, strict=True)
            ]
            return np.asarray(bind(self.eqn, arguments)[0])

    def describe(self, reason):
        """Describe what the equation computes and where, for the message of a refusal."""
        return f"{reason} at {self.place}"

    def make_product(self, array, values=(), reason=None):
        """Make a product of two values that both carry paths, with the reason for its refusal."""
        reasons = [v.reason for v in values if v.reason]
        if reason is not None:
            reasons = [self.describe(reason)]
        return Value(array, Kind.PRODUCT, reason=(reasons or [self.describe(self.name)])[0])

    def make_factor(self, array, reason):
        """Make a value that may only weigh others, with the reason for its refusal."""
        return Value(array, Kind.FACTOR, reason=self.describe(reason))

    def broadcast(self, values):
        """Give every argument that depends on the input the shape of the result."""
        shape = self.eqn.outvars[0].aval.shape
        return [
            move_entries(v, lambda a: jnp.broadcast_to(a, shape), ("broadcast", shape), self.slots)
            if v.depends and v.array.shape != shape
            else v
            for v in values
        ]

    def make_forms(self, values, quotient=None):
        """Return the result as a function of every root that all arguments share.

        A root is a state h; each function f(h) is a `Form` with f(0), its slope f′(h) and
        a quotient g with g h = f(h).

        Args:
            values: The arguments.
            quotient: Function that takes the arguments' forms (None for a constant) and returns the
                quotient of the result, or None for f(h)/h.
        """
        roots = [{form.root for form in v.forms} for v in values if v.depends]
        shared_roots = sorted(set.intersection(*roots), key=lambda root: -root.age)
        return tuple(self._make_form(root, values, quotient) for root in shared_roots)

    def _make_form(self, root, values, quotient):
        """Return the result as a function of one root; see `make_forms`.

        Args:
            root: The root.
            values: Arguments of the equation, functions of the root or constants.
            quotient: See `make_forms`; None for f(h)/h.
        """
        arrays = [v.array for v in values]
        parts = [  # the form of each argument; None for a constant
            next(form for form in v.forms if form.root is root) if v.depends else None
            for v in values
        ]

        def compute_slope():
            """Computes f′ of the result by the chain rule; constants have no slope."""
            tangents = [
                None if part is None or not is_inexact(a) else part.slope()
                for part, a in zip(parts, arrays, strict=True)
            ]
            if all(t is None for t in tangents):
                return jnp.zeros_like(arrays[0])
            return push_tangents(self.eqn, arrays, tangents)[0]

        result_quotient = None if quotient is None else quotient(parts)
        return Form(root, self._evaluate_at_zero(values, parts), compute_slope, result_quotient)

    def _evaluate_at_zero(self, values, parts):
        """Return the result where the root is 0, if it is one known number; else None."""
        is_zero = [part is not None and part.is_exact for part in parts]
        if self.name == "mul" and any(is_zero):
            return np.float32(0)
        if self.name == "div" and is_zero[0] and parts[1] is None:
            return np.float32(0)
        numbers = [
            v.fill if part is None else part.at_zero for v, part in zip(values, parts, strict=True)
        ]
        return self.evaluate(numbers, values)

    def compute_lazily(self, fn, values, parts):
        """Return fn of the quotients of the arguments, computed when it is asked for."""

        def compute():
            quotients = [
                None if p is None else compute_quotient(v, p)
                for v, p in zip(values, parts, strict=True)
            ]
            return fn(*quotients)

        return compute

    def shared_flags(self, values):
        """Return what all dependent arguments of a pointwise operation have in common."""
        dependent = [v for v in values if v.depends]
        return {
            "is_weight": all(v.is_weight for v in dependent),
            "is_exponential": any(v.is_exponential for v in dependent),
            "is_step": all(v.is_step for v in dependent),
            "is_shifted": any(v.is_shifted for v in dependent),
            "reason": next((v.reason for v in dependent if v.reason), ""),
        }

    def push_sums(self, values, index=0):
        """Return the sums of a result that is linear in the states among the arguments together."""
        arrays = [v.array for v in values]
        has_sums = [v.sums is not None for v in values]

        def push(*tangents):
            return push_tangents(self.eqn, arrays, place_tangents(tangents, has_sums))[index]

        return LazySums(self.slots.map(push), [v.sums for v in values if v.sums is not None])

    def pass_through(self, values, position):
        """Return the sums of a result that is linear in one argument, the others fixed."""
        arrays = [v.array for v in values]

        def compute(tangent):
            arguments = [tangent if i == position else a for i, a in enumerate(arrays)]
            return bind(self.eqn, arguments)[0]

        is_batched = self.name not in primitives.UNBATCHED
        return LazySums(self.slots.map(compute, is_batched), [values[position].sums])

    def with_sums(self, value):
        """Return a state, or a gate with its sums as a state."""
        if value.kind == Kind.GATE and value.sums is None:
            return value.replace(sums=gate_sums(value, self.slots))
        return value
