"""A traced program run again, with sums of paths by length for each of its values.

`run` goes through the equations. Programs inside the program (jit, remat, custom derivatives) are
run in place; loops and conditions are built again around the values and their sums (`loops.py`).
A value that leaves a branch moves to one length more.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jax_core
from jax.extend.core import Jaxpr, JaxprEqn

from rank_collapse.paths.traced import loops, primitives
from rank_collapse.paths.traced.branches import Branches, Entry
from rank_collapse.paths.traced.channels import LazySums, Slots
from rank_collapse.paths.traced.equation import Equation
from rank_collapse.paths.traced.inner_skips import follow, leave_branch, start_trail
from rank_collapse.paths.traced.programs import (
    Scope,
    bind,
    describe_place,
    has_scopes,
    open_program,
    place_tangents,
    push_tangents,
    read_scopes,
)
from rank_collapse.paths.traced.rules import apply_rule
from rank_collapse.paths.traced.values import (
    Kind,
    Value,
    is_inexact,
    make_constant,
    make_frozen,
    make_state,
    resolve_state,
)


class Start:
    """Where paths start inside a program: at one of the states of a `checkpoint_name`.

    Args:
        pattern: A regular expression for the whole name.
        number: Index of the state among those of that name, from 0.
        place: Function that takes the state and returns the direction there, an array of the same
            shape.
    """

    def __init__(self, pattern: str, number: int, place: Callable[[JaxprEqn], str]):
        self.pattern, self.number, self.place = re.compile(pattern), number, place
        self.count: Any = 0  # states so far; traced inside of a loop
        self.num_seen = 0  # the same without a loop's number of steps, which is known afterwards

    def add(self, value: Value, slots: Slots) -> Value:
        """Let paths start at a state if it is the one with the wanted number, and count it.

        The direction joins the sums in the slot of path length 0. In a loop the count is traced, so
        the direction is multiplied by 1 or 0.

        Args:
            value: A value with the name of the states.
            slots: The axes of path lengths in front of all sums.
        """
        is_here = self.count == self.number
        self.count, self.num_seen = self.count + 1, self.num_seen + 1
        if is_here is False or value.kind > Kind.GATE:
            return value
        value = resolve_state(value, slots)
        begun = slots.start(self.place(value.array))
        begun = begun * jnp.asarray(is_here, begun.dtype)
        if value.kind != Kind.STATE:
            return make_state(value.array, LazySums(lambda: begun, trail=start_trail()))

        def join(sums):
            return sum(slots.pad_alike(sums, begun))

        return make_state(value.array, LazySums(join, [value.sums]))

    def check_reached(self) -> None:
        """Check that the program had a state with the wanted number.

        Raises:
            ValueError: No name matched the pattern, or fewer states than the number did.
        """
        pattern = self.pattern.pattern
        if not self.count:
            raise ValueError(
                f"states={pattern!r} matches no name in fn; name the state after each layer with "
                "jax.ad_checkpoint.checkpoint_name(state, 'residual')"
            )
        if self.number >= self.count:
            raise ValueError(
                f"layer={self.number} must be from 0 to {self.count - 1}: the number of states in "
                f"fn that match states={pattern!r} is {self.count}"
            )

    def is_in(self, jaxpr: Jaxpr) -> bool:
        """Whether a program has states of the name."""
        return any(
            (eqn.primitive.name == "name" and self.pattern.fullmatch(eqn.params["name"]))
            or any(map(self.is_in, jax_core.jaxprs_in_params(eqn.params)))
            for eqn in jaxpr.eqns
        )


class Interpreter:
    """Runs programs on values.

    Args:
        slots: Number of places in the sums by length.
        branches: Patterns of the branches.
        freeze: Whether weights, statistics and gates are constants; False for the exact derivative.
        start: Where paths start inside the program; None where only arguments have sums.
    """

    def __init__(self, slots: Slots, branches: Branches, freeze: bool, start: Start | None = None):
        self.slots, self.branches, self.freeze, self.start = slots, branches, freeze, start
        self.calls: list[JaxprEqn] = []  # around the equation

    def run(
        self,
        jaxpr: Jaxpr,
        constants: Sequence[object],
        arguments: Sequence[Value],
        scopes: tuple[Scope, ...] = (),
        entry: Entry | None = None,
    ) -> list[Value]:
        """Run a program.

        Args:
            jaxpr, constants: The program.
            arguments: Inputs of the program.
            scopes: Around the program.
            entry: The branch that the whole program is inside of; None for none.
        """
        frame = _Frame(self, entry)
        frame.define(jaxpr.constvars, [make_constant(c) for c in constants])
        frame.define(jaxpr.invars, arguments)
        for eqn in jaxpr.eqns:
            inner_scopes = scopes + read_scopes(eqn)
            match = self.branches.find_entry(inner_scopes)  # refuses the other kind in a branch
            inside = entry or match
            if eqn.primitive.name == "name":
                inside, values = self._name(eqn, frame, inside, inner_scopes)
                if self.start is not None and self.start.pattern.fullmatch(eqn.params["name"]):
                    values = [self.start.add(v, self.slots) for v in values]
            else:
                arguments = [frame.read(v, inside) for v in eqn.invars]
                values = self.compute(eqn, arguments, inner_scopes, inside)
            frame.define(eqn.outvars, values, inside)
        return [frame.read(v, entry) for v in jaxpr.outvars]

    def _name(self, eqn, frame, inside, scopes):
        """Compute a `checkpoint_name`: the name of what leaves a branch, or a branch itself.

        Args:
            eqn: The equation.
            frame: Values of the program so far.
            inside: The branch that the equation is inside of; None for none.
            scopes: Its scopes.

        Returns:
            (the branch that the results are inside of or None, the results).
        """
        axis = self.branches.find_name(eqn.params["name"])
        if axis is None or inside is not None:
            values = [frame.read(eqn.invars[0], inside)]
            return inside, self.compute(eqn, values, scopes, inside)
        left_entry = frame.entry_of(eqn.invars[0])
        if left_entry is not None and left_entry.axis == axis:
            return left_entry, self.compute(
                eqn, [frame.read(eqn.invars[0], left_entry)], scopes, left_entry
            )
        values = self.compute(eqn, [frame.read(eqn.invars[0], None)], scopes, None)
        entry = Entry(axis, (eqn.params["name"],), None)
        return None, [self.shift(v, entry) for v in values]

    def compute(
        self, eqn: JaxprEqn, values: Sequence[Value], scopes: tuple[Scope, ...], entry: Entry | None
    ) -> list[Value]:
        """Compute one equation.

        Args:
            eqn: The equation.
            values: Arguments of the equation.
            scopes, entry: See `run`.

        Raises:
            ValueError: The equation cannot be frozen.
        """
        name = eqn.primitive.name
        if name in primitives.CALLS and self._runs_in_place(eqn):
            program = eqn.params[primitives.CALLS[name]]
            jaxpr, constants = open_program(program)
            self.calls.append(eqn)
            outs = self.run(jaxpr, constants, values, scopes, entry)
            self.calls.pop()
            return outs
        depends = any(v.depends for v in values)
        if name in ("scan", "cond") and (depends or self._starts_in(eqn)):
            build = {"scan": loops.run_scan, "cond": loops.run_cond}[name]
            return build(self, eqn, values, scopes, entry)
        place = describe_place(eqn, scopes, self.calls)
        if self.freeze or not depends:
            outs = apply_rule(Equation(self.slots, place, eqn), values)
        else:
            outs = self._differentiate(eqn, values, place)
        self._follow(eqn, values, outs, scopes, entry, place)
        return outs

    def _follow(self, eqn, values, outs, scopes, entry, place):
        """Give the sums of new values their trails.

        Args:
            eqn: The equation.
            values, outs: Its arguments and results.
            scopes, entry, place: Its scopes, its branch and its position in the caller's code.
        """
        parts = [v.trail for v in values]
        if eqn.primitive.name == "select_n":
            parts[0] = None
        if self.freeze and eqn.primitive.name in primitives.SCALING:
            has_state = any(v.kind == Kind.STATE for v in values)
            parts = [
                None if has_state and v.kind != Kind.STATE else part
                for v, part in zip(values, parts, strict=True)
            ]
        for out in outs:
            is_new = all(out.sums is not v.sums for v in values)
            if is_new and out.sums is not None and out.sums.trail is not None:
                out.sums.trail = follow(eqn, parts, out.sums.trail, scopes, entry, place)

    def _starts_in(self, eqn):
        """Whether paths can start inside a loop or a condition."""
        programs = jax_core.jaxprs_in_params(eqn.params)
        return self.start is not None and any(map(self.start.is_in, programs))

    def _runs_in_place(self, eqn):
        """Whether a call is opened. Exact derivatives keep a custom rule without branches."""
        if self.freeze or eqn.primitive.name != "custom_jvp_call":
            return True
        jaxpr, _ = open_program(eqn.params["call_jaxpr"])
        return has_scopes(jaxpr)

    def _differentiate(self, eqn, values, place):
        """Compute an equation and its exact derivative.

        Args:
            eqn: The equation.
            values: Its arguments.
            place: Its position in the code, for messages.

        Returns:
            The results: frozen where no paths pass.
        """
        arrays = [v.array for v in values]
        outs = bind(eqn, arrays)
        has_sums = [v.depends and is_inexact(v.array) and v.sums is not None for v in values]
        sources = [v.sums for v, has in zip(values, has_sums, strict=True) if has]
        if eqn.primitive.name == "stop_gradient" or not sources:
            return [make_frozen(a) for a in outs]

        def push(*tangents):
            """Apply the derivative of the equation to the sums of one path length."""
            return push_tangents(eqn, arrays, place_tangents(tangents, has_sums))

        try:
            is_batched = eqn.primitive.name not in primitives.UNBATCHED
            pushed = LazySums(self.slots.map(push, is_batched), sources)
            _ = pushed.array
        except NotImplementedError as error:
            raise ValueError(
                f"fn computes {eqn.primitive.name} at {place}, which JAX cannot differentiate: "
                f"{error}"
            ) from None

        def make_result(index, array):
            """Make a result of the equation: frozen if it has no derivative."""
            if not is_inexact(array):
                return make_frozen(array)
            return make_state(array, LazySums(lambda sums: sums[index], [pushed]))

        return [make_result(index, array) for index, array in enumerate(outs)]

    def shift(self, value: Value, entry: Entry) -> Value:
        """Return a value after it left a branch: its sums belong to paths of one length more.

        Args:
            value: Inside of the branch.
            entry: The branch.
        """
        if value.kind not in (Kind.STATE, Kind.GATE):
            return value
        axis, trail = entry.axis, leave_branch(value.trail, entry)
        self.branches.num_shifts[axis] += 1

        def move(sums):
            """Move the sums to paths of one length more."""
            return self.slots.shift(sums, axis)

        # `derive` gives the root's array unchanged.
        roots = [f.root.derive(("shift", axis), lambda a: a, move, trail) for f in value.forms]
        forms = tuple(
            dataclasses.replace(f, root=root) for f, root in zip(value.forms, roots, strict=True)
        )
        if forms and value.sums is value.forms[0].root.sums:
            return value.replace(sums=forms[0].root.sums, forms=forms)
        sums = None if value.sums is None else LazySums(move, [value.sums], trail)
        return value.replace(sums=sums, forms=forms)

    def resolve(self, value: Value) -> Value:
        """Return a value as later linear operations take it: a gate f(h) becomes a state, see
        `resolve_state`."""
        return resolve_state(value, self.slots)


class _Frame:
    """The values of one run of a program, and which branch each was made in."""

    def __init__(self, interpreter, entry):
        self.interpreter, self.entry = interpreter, entry
        self.values, self.entries, self.shifted = {}, {}, {}
        self.crossings = {}

    def define(self, variables, values, entry=None):
        """Store values, and the branch in which they were made (None: that of the frame)."""
        for variable, value in zip(variables, values, strict=True):
            self.values[variable] = value
            if entry is not None and entry != self.entry:
                self.entries[variable] = entry

    def entry_of(self, variable):
        """Return the branch that a variable was made in; None outside of all branches."""
        return None if isinstance(variable, jax_core.Literal) else self.entries.get(variable)

    def read(self, variable, inside):
        """Return a variable as it is inside a branch, or outside of all.

        A value that was made in another branch has left it: its sums belong to paths of one length
        more.

        Args:
            variable: The variable.
            inside: The branch that reads it; None outside of all.
        """
        if isinstance(variable, jax_core.Literal):
            return make_constant(variable.val)
        made_in = self.entries.get(variable)
        if made_in is None or made_in == inside:
            return self.values[variable]
        if variable not in self.shifted:
            self.shifted[variable] = self.interpreter.shift(self.values[variable], made_in)
        if inside is not None and inside.path == made_in.path:
            self._check_crossing(variable, made_in, inside)
        return self.shifted[variable]

    def _check_crossing(self, variable, made_in, inside):
        """Check that not several values go from one entry into a scope to the next entry into it.

        Args:
            variable: The variable that is read.
            made_in: The branch in which it was made.
            inside: The branch that reads it, another entry into the same scope.

        Raises:
            ValueError: Several values do: one branch may have been entered in several parts.
        """
        if not self.values[variable].depends:
            return
        crossing = self.crossings.setdefault((made_in, inside), set())
        crossing.add(variable)
        if len(crossing) > 1:
            raise ValueError(
                f"branches: fn enters the scope {'/'.join(made_in.path)!r} twice and passes "
                "several values from the first entry to the second, so that one branch would count "
                "twice; put the branch into one scope, or name its output with "
                "jax.ad_checkpoint.checkpoint_name"
            )
