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
    is_inexact,
    make_frozen,
)

PRODUCT = "a product of two values that depend on x"


def move_entries(value: Value, move: Callable, key: Any, slots: Slots) -> Value:
    """Return a value after an operation that reorders or copies its entries.

    The value may be known as a function f(h) of a state h; it is then the same function of the
    moved h.

    Args:
        value: The value.
        move: The operation, of an array.
        key: Identifies the operation, so that h and f(h), which are moved by equal operations, are
            still functions of one state.
        slots: The axes of path lengths in front of all sums.
    """
    move_sums, shape = slots.map(move), value.array.shape

    def move_computed(compute):
        """Return a function that computes an array of the value's shape and moves it."""
        return lambda: move(jnp.broadcast_to(compute(), shape))

    def move_form(form):
        """Move a description of the value as a function f(h): h, f′(h) and f(h)/h."""
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
        """Compute the results for arguments that do not depend on the input, or are frozen.

        A constant with the same number in all entries keeps this number as `fill`: operations that
        change the shape pass it on, and pointwise ones compute it. Otherwise `fill` is None.

        Args:
            values: The arguments.

        Returns:
            The results: frozen if an argument is frozen, else constants.
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
        """Compute the equation on one number for each argument.

        Args:
            numbers: The numbers; None for one that is not known.
            values: The arguments, which give the dtypes.

        Returns:
            The resulting number; None if a number is not known.
        """
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
        """Make a value that passes no paths, because both factors of a product would pass them.

        A rule that later needs its paths is refused; the message names what made the product.

        Args:
            array: The product.
            values: The arguments; one that is such a product already gives the reason.
            reason: What the product is, for the message, such as "a product of two functions of x";
                None for the reason of an argument.
        """
        reasons = [v.reason for v in values if v.reason]
        if reason is not None:
            reasons = [self.describe(reason)]
        return Value(array, Kind.PRODUCT, reason=(reasons or [self.describe(self.name)])[0])

    def make_factor(self, array, reason):
        """Make a value that passes no paths, but may multiply, divide or weigh a value that does.

        Args:
            array: The value.
            reason: What it is, for the message of a rule that refuses it.
        """
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
        """Return the result as a function of one state h: f(0), f′(h) and f(h)/h; see `make_forms`.

        Args:
            root: h.
            values: Arguments of the equation, functions of h or constants.
            quotient: See `make_forms`; None for f(h)/h.
        """
        arrays = [v.array for v in values]
        parts = [  # the form of each argument; None for a constant
            next(form for form in v.forms if form.root is root) if v.depends else None
            for v in values
        ]

        def compute_slope():
            """Compute f′ of the result by the chain rule; constants have no slope."""
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
        """Return the result where the state h is 0, for arguments that are functions of h.

        Args:
            values: The arguments.
            parts: The arguments as functions of h, `Form`s; None for a constant.

        Returns:
            The result if it is one known number; else None.
        """
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
        """Make a function without arguments that computes fn of the quotients f(h)/h of the
        arguments.

        Args:
            fn: Function of one quotient for each argument; None for a constant.
            values: The arguments.
            parts: The arguments as functions of one state h, `Form`s; None for a constant.
        """

        def compute():
            quotients = [
                None if p is None else compute_quotient(v, p)
                for v, p in zip(values, parts, strict=True)
            ]
            return fn(*quotients)

        return compute

    def shared_flags(self, values):
        """Return the attributes of `Value` that the result of a pointwise operation takes from its
        arguments.

        Args:
            values: The arguments; those that depend on the input decide.

        Returns:
            {attribute: value}: a weight or a step function if all are one; an exponential, or
            shifted by a statistic, if any is.
        """
        dependent = [v for v in values if v.depends]
        return {
            "is_weight": all(v.is_weight for v in dependent),
            "is_exponential": any(v.is_exponential for v in dependent),
            "is_step": all(v.is_step for v in dependent),
            "is_shifted": any(v.is_shifted for v in dependent),
            "reason": next((v.reason for v in dependent if v.reason), ""),
        }

    def push_sums(self, values):
        """Return the sums over paths of a result that is linear in all states among the arguments
        together.

        Args:
            values: The arguments.
        """
        arrays = [v.array for v in values]
        has_sums = [v.sums is not None for v in values]

        def push(*tangents):
            return push_tangents(self.eqn, arrays, place_tangents(tangents, has_sums))[0]

        return LazySums(self.slots.map(push), [v.sums for v in values if v.sums is not None])

    def pass_through(self, values, position):
        """Return the sums over paths of a result that is linear in one argument, with the others
        fixed.

        Args:
            values: The arguments.
            position: Index of the argument that passes paths.
        """
        arrays = [v.array for v in values]

        def compute(tangent):
            """Compute the equation on the argument's sum of one path length."""
            arguments = [tangent if i == position else a for i, a in enumerate(arrays)]
            return bind(self.eqn, arguments)[0]

        is_batched = self.name not in primitives.UNBATCHED
        return LazySums(self.slots.map(compute, is_batched), [values[position].sums])
