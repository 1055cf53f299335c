"""What each operation makes of values: kinds, sums by length, and forms as functions of a root."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.paths.traced import primitives
from rank_collapse.paths.traced.channels import LazySums, Slots
from rank_collapse.paths.traced.programs import bind, push_tangents
from rank_collapse.paths.traced.values import (
    Form,
    Kind,
    Value,
    compute_quotient,
    gate_sums,
    is_inexact,
    make_frozen,
    make_gate,
    make_state,
    resolve_state,
)

PRODUCT = "a product of two values that depend on the input"


def move_entries(value: Value, move: Callable, key: Any, slots: Slots) -> Value:
    """Return a value after an operation that reorders or copies its entries.

    Args:
        value: The value.
        move: The operation, of an array.
        key: Equal for equal operations, so that h and f(h) keep one root.
        slots: Of the sums.
    """
    move_sums, shape = slots.map(move), value.array.shape
    forms = tuple(
        Form(
            f.root.derive(key, move, move_sums),
            f.at_zero,
            lambda f=f: move(jnp.broadcast_to(f.slope(), shape)),
            None if f.quotient is None else lambda f=f: move(jnp.broadcast_to(f.quotient(), shape)),
        )
        for f in value.forms
    )
    sums = None if value.sums is None else LazySums(move_sums, [value.sums])
    return value.replace(array=move(value.array), sums=sums, forms=forms)


class Rules:
    """The rules of frozen paths: each returns the results of one equation."""

    def __init__(self, slots: Slots, place: str, eqn: Any):
        self.slots, self.place, self.eqn = slots, place, eqn
        self.name = eqn.primitive.name

    def apply(self, values: Sequence[Value]) -> list[Value]:
        """Apply the rule of the equation's primitive to its arguments.

        Raises:
            ValueError: No rule for the primitive.
        """
        name, arrays = self.name, [v.array for v in values]
        if not any(v.depends for v in values):
            return self._apply_to_constants(values)
        if name == "stop_gradient":
            return [make_frozen(a) for a in bind(self.eqn, arrays)]
        if name == "optimization_barrier":
            pairs = zip(values, bind(self.eqn, arrays), strict=True)
            return [v.replace(array=a) for v, a in pairs]
        if name in primitives.STRUCTURAL:
            return self._move(values[0])
        if name in primitives.STATISTICS:
            return self._measure(values)
        if name in primitives.PREDICATES:
            return self._compare(values)
        if name in primitives.UNARY or name in ("pow", "atan2", "rem", "nextafter", "clamp"):
            return [self._bend(values)]
        rules = {
            "mul": self._multiply,
            "div": self._divide,
            "select_n": self._select,
            "max": self._take_larger,
            "min": self._take_larger,
            "neg": self._scale_one,
        }
        rules |= dict.fromkeys(("add", "sub", "add_any"), self._add)
        if name in rules:
            return [rules[name](self._broadcast(values))]
        if name in primitives.SELECTING:
            return [self._choose(values)]
        if name in primitives.LINEAR:
            return self._sum(values)
        if name in primitives.BILINEAR:
            return [self._contract(values)]
        if not self.eqn.outvars:
            bind(self.eqn, arrays)  # such as a print
            return []
        raise ValueError(
            f"{name} at {self.place} is not known to be linear, a gate or a statistic, and a value "
            f"that depends on the input enters it: {primitives.find_cure(name)}"
        )

    # Values without sums

    def _apply_to_constants(self, values):
        arrays = bind(self.eqn, [v.array for v in values])
        if any(v.kind == Kind.FROZEN for v in values):
            return [make_frozen(a) for a in arrays]
        fill = None
        if self.name in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims"):
            fill = values[0].fill
        elif self.name in primitives.POINTWISE or self.name == "convert_element_type":
            fill = self._evaluate([v.fill for v in values], values)
        return [Value(a, fill=fill) for a in arrays]

    def _evaluate(self, numbers, values):
        """Compute the equation on one number for each argument; None where one is not known."""
        if any(number is None for number in numbers):
            return None
        with jax.ensure_compile_time_eval():
            arguments = [
                jnp.asarray(number, jnp.result_type(v.array))
                for number, v in zip(numbers, values, strict=True)
            ]
            return np.asarray(bind(self.eqn, arguments)[0])

    def _refuse(self, what):
        return f"{what} at {self.place}"

    def _product(self, array, values=(), what=None):
        reasons = [v.reason for v in values if v.reason]
        if what is not None:
            reasons = [self._refuse(what)]
        return Value(array, Kind.PRODUCT, reason=(reasons or [self._refuse(self.name)])[0])

    def _factor(self, array, what):
        return Value(array, Kind.FACTOR, reason=self._refuse(what))

    # Forms

    def _broadcast(self, values):
        """Give every argument that depends on the input the shape of the result."""
        shape = self.eqn.outvars[0].aval.shape
        return [
            move_entries(v, lambda a: jnp.broadcast_to(a, shape), ("broadcast", shape), self.slots)
            if v.depends and v.array.shape != shape
            else v
            for v in values
        ]

    def _functions_of_roots(self, values, quotient=None):
        """Return the result as a function of every root that all arguments share.

        Args:
            values: The arguments.
            quotient: From the arguments' forms (None for a constant) to the quotient of the result,
                or None for f(h)/h.
        """
        dependent = [v for v in values if v.depends]
        shared = set.intersection(*({f.root for f in v.forms} for v in dependent))
        arrays, forms = [v.array for v in values], []
        for root in sorted(shared, key=lambda root: -root.age):
            parts = [
                next(f for f in v.forms if f.root is root) if v.depends else None for v in values
            ]
            numbers = [
                v.fill if p is None else p.at_zero for v, p in zip(values, parts, strict=True)
            ]
            at_zero = self._evaluate(numbers, values)
            if self.name == "mul" and any(p is not None and p.is_exact for p in parts):
                at_zero = np.float32(0)
            if self.name == "div" and parts[0] is not None and parts[0].is_exact:
                at_zero = np.float32(0) if parts[1] is None else at_zero

            def slope(parts=parts):
                tangents = [
                    None if p is None or not is_inexact(a) else p.slope()
                    for p, a in zip(parts, arrays, strict=True)
                ]
                if all(t is None for t in tangents):
                    return jnp.zeros_like(arrays[0])
                return push_tangents(self.eqn, arrays, tangents)[0]

            made = None if quotient is None else quotient(parts)
            forms.append(Form(root, at_zero, slope, made))
        return tuple(forms)

    def _lazily(self, fn, values, parts):
        """Return fn of the quotients of the arguments, computed when it is asked for."""

        def compute():
            quotients = [
                None if p is None else compute_quotient(v, p)
                for v, p in zip(values, parts, strict=True)
            ]
            return fn(*quotients)

        return compute

    def _flags(self, values):
        """Return what all dependent arguments of a pointwise operation have in common."""
        dependent = [v for v in values if v.depends]
        return {
            "is_weight": all(v.is_weight for v in dependent),
            "is_exponential": any(v.is_exponential for v in dependent),
            "is_step": all(v.is_step for v in dependent),
            "is_shifted": any(v.is_shifted for v in dependent),
            "reason": next((v.reason for v in dependent if v.reason), ""),
        }

    # Sums

    def _push(self, values, index=0):
        """Return the sums of a result that is linear in the states among the arguments together."""
        states = [v for v in values if v.sums is not None]
        arrays = [v.array for v in values]

        def push(*tangents):
            rest = iter(tangents)
            all_tangents = [None if v.sums is None else next(rest) for v in values]
            return push_tangents(self.eqn, arrays, all_tangents)[index]

        return LazySums(self.slots.map(push), [v.sums for v in states])

    def _pass_through(self, values, position):
        """Return the sums of a result that is linear in one argument, the others fixed."""
        arrays = [v.array for v in values]

        def compute(tangent):
            arguments = [tangent if i == position else a for i, a in enumerate(arrays)]
            return bind(self.eqn, arguments)[0]

        is_batched = self.name not in primitives.UNBATCHED
        return LazySums(self.slots.map(compute, is_batched), [values[position].sums])

    def _with_sums(self, value):
        """Return a state, or a gate with its sums as a state."""
        if value.kind == Kind.GATE and value.sums is None:
            return value.replace(sums=gate_sums(value, self.slots))
        return value

    # Operations that move entries

    def _move(self, value):
        eqn = self.eqn
        arrays = bind(eqn, [value.array])
        if value.kind in (Kind.FACTOR, Kind.PRODUCT):
            return [value.replace(array=a) for a in arrays]
        if value.kind == Kind.STATE and not is_inexact(arrays[0]):
            return [make_frozen(a) for a in arrays]
        is_identity = self.name in primitives.IDENTITIES
        moved = []
        for i, array in enumerate(arrays):
            key = (self.name, repr(sorted(eqn.params.items(), key=str)), i)
            move = (lambda a: a) if is_identity else (lambda a, i=i: bind(eqn, [a])[i])
            moved.append(move_entries(value, move, key, self.slots).replace(array=array))
        return moved

    def _choose(self, values):
        """Choose entries of several arrays: gates stay gates, without a root."""
        array = bind(self.eqn, [v.array for v in values])[0]
        return self._join(array, values, keep_gates=True)

    def _join(self, array, values, *, keep_gates=False):
        """Return a result that is linear in all states together."""
        dependent = [v for v in values if v.depends]
        if any(v.kind == Kind.PRODUCT for v in dependent):
            return self._product(array, [v for v in dependent if v.kind == Kind.PRODUCT])
        flags = self._flags(values)
        all_gates = all(v.kind == Kind.GATE for v in dependent)
        resolved = [resolve_state(v, self.slots) for v in values]
        kinds = {v.kind for v in resolved if v.depends}
        if not kinds:
            return make_frozen(array)
        if Kind.FACTOR in kinds:
            factors = [v for v in resolved if v.kind == Kind.FACTOR]
            if kinds == {Kind.FACTOR}:
                return factors[0].replace(array=array)
            return self._product(array, factors)
        sums = self._push(resolved)
        if all_gates and keep_gates:
            passes_whole = any(v.passes_whole for v in dependent)
            flags |= {"is_step": False, "is_exponential": False}
            return Value(array, Kind.GATE, sums, passes_whole=passes_whole, **flags)
        return make_state(array, sums, is_shifted=flags["is_shifted"] and keep_gates)

    def _sum(self, values):
        arrays = bind(self.eqn, [v.array for v in values])
        if len(arrays) == 1:
            return [self._join(arrays[0], values)]
        return [self._join_output(values, arrays, i) for i in range(len(arrays))]

    def _join_output(self, values, arrays, index):
        resolved = [resolve_state(v, self.slots) for v in values]
        out = self._join(arrays[index], values)
        return make_state(arrays[index], self._push(resolved, index)) if out.sums else out

    # Sums of two values

    def _add(self, values):
        array = bind(self.eqn, [v.array for v in values])[0]
        dependent = [v for v in values if v.depends]
        if any(v.kind in (Kind.FACTOR, Kind.PRODUCT) for v in dependent):
            return self._join(array, values)
        adds_frozen = any(v.kind == Kind.FROZEN for v in values)
        flags = self._flags(values)
        flags["is_shifted"] |= adds_frozen
        forms = self._functions_of_roots(values, lambda parts: self._add_quotients(values, parts))
        if all(v.kind == Kind.STATE for v in dependent):
            forms, sums = () if adds_frozen else forms, self._push(values)
            shifted = flags["is_shifted"]
            if forms and all(v.depends or v.fill is not None for v in values):
                # A number is part of the function of a root, not a bias: h + 3 is no new state.
                return Value(array, Kind.STATE, sums, forms, is_shifted=shifted)
            return make_state(array, sums, forms, is_shifted=shifted)
        if forms:
            if any(v.kind == Kind.STATE for v in dependent):
                flags |= {"is_exponential": False, "is_step": False, "is_weight": False}
            return make_gate(array, forms, **flags)
        return self._join(array, values, keep_gates=True)

    def _add_quotients(self, values, parts):
        """Return the quotient of a sum; a constant that is added stays out of it."""
        present = [(v, p) for v, p in zip(values, parts, strict=True) if p is not None]
        if not all(p.is_exact or p.quotient is not None for _, p in present):
            return None

        def combine(*quotients):
            like = next(q for q in quotients if q is not None)
            return bind(self.eqn, [jnp.zeros_like(like) if q is None else q for q in quotients])[0]

        return self._lazily(combine, values, parts)

    # Products

    def _scale_one(self, values):
        """Negate one value."""
        return self._scale(values, 0)

    def _scale(self, values, position):
        """Multiply or divide the argument at a position by what is constant."""
        array = bind(self.eqn, [v.array for v in values])[0]
        value = values[position]
        others = [v for i, v in enumerate(values) if i != position]
        is_frozen = any(v.kind != Kind.CONSTANT for v in others)
        if value.kind in (Kind.FACTOR, Kind.PRODUCT):
            return value.replace(array=array)
        if value.kind == Kind.GATE and value.is_exponential and is_frozen:
            return make_frozen(array)

        def scale_quotient(parts):
            part = parts[position]
            if part.quotient is None and not part.is_exact:
                return None

            def scale():
                quotient = compute_quotient(value, part)
                return bind(
                    self.eqn, [quotient if i == position else v.array for i, v in enumerate(values)]
                )[0]

            return scale

        # Only the value itself counts as dependent: what multiplies it is fixed.
        fixed = [v if i == position else make_frozen(v.array) for i, v in enumerate(values)]
        fixed = [v.replace(fill=w.fill) for v, w in zip(fixed, values, strict=True)]
        forms = self._functions_of_roots(fixed, scale_quotient) if value.forms else ()
        if value.kind == Kind.GATE:
            if forms:
                return make_gate(array, forms, **self._flags(fixed))
            sums = self._pass_through([self._with_sums(v) for v in values], position)
            return value.replace(array=array, sums=sums)
        sums = self._pass_through(values, position)
        if is_frozen:
            return make_state(array, sums, is_shifted=value.is_shifted)
        return Value(array, Kind.STATE, sums, forms, is_shifted=value.is_shifted)

    def _multiply(self, values):
        dependent = [i for i, v in enumerate(values) if v.depends]
        if len(dependent) == 1:
            return self._scale(values, dependent[0])
        array = bind(self.eqn, [v.array for v in values])[0]
        if any(v.kind == Kind.PRODUCT for v in values):
            return self._product(array, values)

        def multiply_quotients(parts):
            for one, other in ((0, 1), (1, 0)):
                if parts[one].is_exact and not values[one].is_step:
                    return lambda one=one, other=other: (
                        compute_quotient(values[one], parts[one]) * values[other].array
                    )
            return None

        forms = self._functions_of_roots(values, multiply_quotients)
        if forms:
            return make_gate(array, forms, **self._flags(values) | {"is_exponential": False})
        state = self._find_state(values, _is_scale)
        if state is None:
            return self._factor(array, "a product of two gates")
        if state < 0:
            return self._product(array, what=PRODUCT)
        return self._weigh(values, state)

    def _find_state(self, values, is_frozen):
        """Return which of two factors passes paths, the other being a gate; −1 where both could.

        Args:
            values: The factors.
            is_frozen: Whether a gate is frozen where the other factor is a gate as well.
        """
        kinds = [v.kind for v in values]
        if kinds.count(Kind.STATE) == 2:
            return -1
        if Kind.STATE in kinds:
            return kinds.index(Kind.STATE)
        whole = [i for i, v in enumerate(values) if v.kind == Kind.GATE and v.passes_whole]
        if len(whole) == 2:
            whole = [i for i in whole if not is_frozen(values[i])]
            if len(whole) != 1:
                return -1
        return whole[0] if whole else None

    def _weigh(self, values, position):
        """Multiply a state by a gate that is fixed."""
        values = list(values)
        values[position] = resolve_state(values[position], self.slots)
        array = bind(self.eqn, [v.array for v in values])[0]
        if values[position].kind != Kind.STATE:
            return values[position].replace(array=array)
        return make_state(array, self._pass_through(values, position))

    def _divide(self, values):
        numerator, denominator = values
        if not denominator.depends:
            return self._scale(values, 0)
        array = bind(self.eqn, [v.array for v in values])[0]
        if numerator.kind == Kind.PRODUCT:
            return numerator.replace(array=array)
        has_no_function = numerator.kind == Kind.FROZEN
        has_no_function |= denominator.kind in (Kind.FACTOR, Kind.PRODUCT)
        if has_no_function and not numerator.depends:
            return make_frozen(array)

        def divide_quotients(parts):
            if parts[0] is None or not parts[0].is_exact:
                return None
            return lambda: compute_quotient(numerator, parts[0]) / denominator.array

        forms = self._functions_of_roots(values, divide_quotients)
        if forms:
            flags = self._flags(values) | {"is_exponential": False}
            flags["is_weight"] |= not numerator.depends
            return make_gate(array, forms, **flags)
        if not numerator.depends:
            return make_frozen(array)
        if numerator.kind == Kind.FACTOR or numerator.is_exponential:
            return make_frozen(array)
        if numerator.kind == Kind.GATE and not numerator.passes_whole:
            return self._scale([numerator, make_frozen(denominator.array)], 0)
        return self._weigh(values, 0)

    def _contract(self, values):
        """Contract two arrays: what depends on the input in one of them, or weights and a state."""
        dependent = [i for i, v in enumerate(values[:2]) if v.depends]
        arrays = [v.array for v in values]
        array = bind(self.eqn, arrays)[0]
        if len(dependent) == 1:
            value = values[dependent[0]]
            resolved = list(values)
            resolved[dependent[0]] = value = resolve_state(value, self.slots)
            if value.kind != Kind.STATE:
                return value.replace(array=array, fill=None)
            return make_state(array, self._pass_through(resolved, dependent[0]))
        if any(v.kind == Kind.PRODUCT for v in values):
            return self._product(array, values)
        state = self._find_state(values[:2], lambda value: value.is_weight)
        if state is None:
            return self._factor(array, "a product of two gates")
        if state >= 0 and self._is_weight(values, 1 - state):
            return self._weigh(values, state)
        return self._product(
            array, what=f"a product of two values that depend on the input: {self.name}"
        )

    def _is_weight(self, values, position):
        """Whether an argument may weigh the other: a factor, a transcendental gate, or one that has
        an entry for each entry of the other, so that it only multiplies."""
        value = values[position]
        if value.kind == Kind.FACTOR or value.is_weight:
            return True
        if self.name != "dot_general":
            return False
        contracted, batched = self.eqn.params["dimension_numbers"]
        shared = {*contracted[position], *batched[position]}
        return all(n == 1 for i, n in enumerate(value.array.shape) if i not in shared)

    # Nonlinear functions

    def _bend(self, values):
        """Apply a nonlinear function of each entry: a gate, or a constant of the pass."""
        values = self._broadcast(values)
        array = bind(self.eqn, [v.array for v in values])[0]
        dependent = [v for v in values if v.depends]
        is_power_one = (
            self.name == "pow" and not values[1].depends and _equals(values[1].fill, 1)
        ) or (self.name == "integer_pow" and self.eqn.params["y"] == 1)
        if is_power_one:
            return values[0].replace(array=array)
        if any(v.kind in (Kind.FACTOR, Kind.PRODUCT) for v in dependent):
            return make_frozen(array)
        exponent_depends = self.name == "pow" and values[1].depends and not values[0].depends
        is_exponential = self.name in primitives.EXPONENTIALS or exponent_depends
        if is_exponential and any(v.is_shifted for v in dependent):
            return make_frozen(array)
        forms = self._functions_of_roots(values, lambda parts: self._bend_quotient(values, parts))
        if not forms:
            return self._factor(array, f"{self.name} of values that depend on the input")
        is_weight = self.name in primitives.TRANSCENDENTAL or exponent_depends
        is_weight |= self.name in primitives.POLYNOMIAL and all(v.is_weight for v in dependent)
        reason = self._refuse(f"{self.name} of a state") if is_exponential else ""
        return make_gate(
            array,
            forms,
            is_weight=is_weight,
            is_exponential=is_exponential,
            is_step=all(v.is_step for v in dependent),
            reason=reason,
        )

    def _bend_quotient(self, values, parts):
        """Return the quotient of a power or of |h|, without a division."""
        part, value = parts[0], values[0]
        power = {"square": 2}.get(self.name, self.eqn.params.get("y", 0))
        if part is None or not part.is_exact:
            return None
        if self.name == "abs":
            return lambda: compute_quotient(value, part) * jnp.sign(value.array)
        if self.name in ("square", "integer_pow") and power >= 2:
            return lambda: compute_quotient(value, part) * value.array ** (power - 1)
        return None

    def _take_larger(self, values):
        """Take the larger or the smaller of two values: a choice between them."""
        array = bind(self.eqn, [v.array for v in values])[0]
        dependent = [v for v in values if v.depends]
        if any(v.kind == Kind.PRODUCT for v in dependent):
            return make_frozen(array)
        if any(v.kind == Kind.FACTOR for v in dependent):
            return self._factor(array, f"{self.name} of a factor")
        order = jnp.greater if self.name == "max" else jnp.less
        # A tie is the constant's.
        constant = next((i for i, v in enumerate(values) if not v.depends), 1)
        takes_other = order(values[1 - constant].array, values[constant].array)

        def choose_quotient(parts):
            for value, part in zip(values, parts, strict=True):
                if part is None and not _equals(value.fill, 0):
                    return None
                if part is not None and not (part.is_exact or part.quotient is not None):
                    return None

            def choose(*quotients):
                other, tied = quotients[1 - constant], quotients[constant]
                return jnp.where(takes_other, other, 0 if tied is None else tied)

            return self._lazily(choose, values, parts)

        forms = self._functions_of_roots(values, choose_quotient)
        if forms:
            return make_gate(array, forms, **self._flags(values) | {"is_weight": False})
        cases = [resolve_state(v, self.slots) for v in values]
        if not all(v.kind in (Kind.STATE, Kind.FROZEN) for v in cases):
            return self._factor(array, f"{self.name} of two values")
        return make_state(
            array, self._select_sums(takes_other, cases[constant], cases[1 - constant])
        )

    def _select_sums(self, takes_second, first, second):
        """Return the sums of a choice between two values by a mask that is fixed."""
        sources = [v.sums for v in (first, second) if v.sums is not None]

        def choose(*tangents):
            rest = iter(tangents)
            zero = jnp.zeros((), tangents[0].dtype)
            cases = [zero if v.sums is None else next(rest) for v in (first, second)]
            return jnp.where(takes_second, cases[1], cases[0])

        return LazySums(self.slots.map(choose), sources)

    def _select(self, values):
        """Select by a mask: of functions of the same root as the mask a gate, else a choice."""
        predicate, *cases = values
        array = bind(self.eqn, [v.array for v in values])[0]
        dependent = [v for v in cases if v.depends]
        if any(v.kind in (Kind.FACTOR, Kind.PRODUCT) for v in dependent):
            return self._join(array, [make_frozen(predicate.array), *cases])

        def select_quotient(parts):
            for value, part in zip(cases, parts[1:], strict=True):
                if part is None and not _equals(value.fill, 0):
                    return None
                if part is not None and not part.is_exact:
                    return None

            def select(_, *quotients):
                shape = array.shape
                filled = [
                    jnp.zeros(shape, array.dtype) if q is None else q.astype(array.dtype)
                    for q in quotients
                ]
                return bind(self.eqn, [predicate.array, *filled])[0]

            fixed = [None, *parts[1:]]
            return self._lazily(select, values, fixed)

        if predicate.depends:
            forms = self._functions_of_roots(values, select_quotient)
            if forms:
                flags = self._flags(cases if dependent else values)
                flags["is_step"] = all(v.is_step or not v.depends for v in cases)
                flags["is_weight"] &= bool(dependent)
                return make_gate(array, forms, **flags)
            predicate = make_frozen(predicate.array)
        values = [predicate, *cases]
        if not dependent:
            return make_frozen(array)
        others_are_zero = all(_equals(v.fill, 0) for v in cases if not v.depends)
        if all(v.kind == Kind.GATE for v in dependent) and others_are_zero:
            forms = self._functions_of_roots(values, lambda parts: select_quotient(parts))
            if forms:
                return make_gate(array, forms, **self._flags(values))
        return self._join(array, values, keep_gates=True)

    def _compare(self, values):
        """Compare: a step of the root, so that a mask of a state's sign can be a gate of it."""
        values = self._broadcast(values)
        arrays = bind(self.eqn, [v.array for v in values])
        if all(v.kind in (Kind.CONSTANT, Kind.STATE, Kind.GATE) for v in values):
            forms = self._functions_of_roots(values)
            if forms:
                return [make_gate(arrays[0], forms, is_step=True)]
        return [make_frozen(a) for a in arrays]

    def _measure(self, values):
        """Compute a statistic or a choice. Whole numbers are frozen; so are those of products."""
        arrays = bind(self.eqn, [v.array for v in values])
        kinds = {v.kind for v in values if v.depends}
        if kinds <= {Kind.PRODUCT, Kind.FACTOR}:
            return [make_frozen(a) for a in arrays]
        what = f"{self.name} of values that depend on the input"
        return [self._factor(a, what) if is_inexact(a) else make_frozen(a) for a in arrays]


def _is_scale(value: Value) -> bool:
    """Whether f(0) of a gate is not 0, such as sigmoid's: it scales an activation."""
    at_zero = value.forms[0].at_zero if value.forms else None
    return at_zero is not None and bool(np.any(at_zero != 0))


def _equals(fill: Any, number: float | int) -> bool:
    """Whether a constant is filled with a number."""
    return fill is not None and bool(fill == number)
