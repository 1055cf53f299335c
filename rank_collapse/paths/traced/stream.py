"""The residual stream of a traced program: the states to which branches are added.

The program is computed equation by equation with its numbers. What leaves a branch may be scaled,
converted or normed; where it is added to a state of its shape, that is the stream before the branch
and the sum the stream after it. A skip may have a factor: a branch may be computed from a state and
added to a multiple of the state that nothing else reads. Loops are computed step by step if their
bodies have branches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.extend import core as jax_core
from jax.extend.core import Jaxpr, JaxprEqn

from rank_collapse.annotations import AnyArray
from rank_collapse.paths.traced import primitives
from rank_collapse.paths.traced.branches import Branches, Entry
from rank_collapse.paths.traced.programs import (
    Scope,
    bind,
    count_scan_arguments,
    has_scopes,
    open_program,
    read_scopes,
)
from rank_collapse.paths.traced.replaying import ITS_OWN, REPLACED, Replacement, refuse_own_state

# Equations that give the same numbers, in another dtype.
COPIES = primitives.IDENTITIES | {"convert_element_type", "optimization_barrier"}


class Part(NamedTuple):
    """The output of a branch on its way to the stream.

    Attributes:
        axis: Index of the kind of branch, as in `Branches.kinds`.
        array: The output after later operations.
        root: Output of the branch.
    """

    axis: int
    array: AnyArray
    root: AnyArray


class Tagged(NamedTuple):
    """A value of the program.

    Attributes:
        array: The value.
        depends: Whether it depends on the input.
        entry: The branch inside which the value was computed, with the steps of loops; or None.
        pending: Outputs of branches that it is the sum of, not yet in the stream.
        number: Number of the equation that made the value, in the order of the computation; 0 for
            the input. A copy in another dtype, or a copy times 1 (a skip without a gain), keeps the
            number.
        level: Whether it comes from a replaced state, see `replaying`.
        source: The value outside of the branches that constants multiply to make this one; or None.
    """

    array: AnyArray
    depends: bool = False
    entry: tuple[Entry, tuple[int, ...]] | None = None
    pending: tuple[Part, ...] = ()
    number: int = -1
    level: int = 0
    source: "Tagged | None" = None


class Sum(NamedTuple):
    """One branch that was added to the stream.

    Attributes:
        axis: Index of the kind of branch, as in `Branches.kinds`.
        root: What left the branch; the same branch may be added several times, for several readers.
        before, branch, after: Arrays of one shape.
        number: Number of the state before the branch, see `Tagged`; None behind another branch of
            the same sum.
    """

    axis: int
    root: AnyArray
    before: AnyArray
    branch: AnyArray
    after: AnyArray
    number: int | None


class StreamReader:
    """Computes a program, and keeps where branches are added to a stream.

    Args:
        branches: Patterns of the branches.
        replacement: The other run whose stream the branches take in; None for their own.
    """

    def __init__(self, branches: Branches, replacement: Replacement | None = None):
        self.branches, self.replacement = branches, replacement
        self.sums: list[Sum] = []
        self._count = 0
        self._read: set[int] = set()  # numbers of values that more than copies and factors read

    def start(self, array: AnyArray) -> Tagged:
        """Return the input of the program.

        Args:
            array: The input.
        """
        return self._place(Tagged(array, True, number=0))

    def run(
        self,
        jaxpr: Jaxpr,
        constants: Sequence[object],
        arguments: Sequence[Tagged],
        scopes: tuple[Scope, ...] = (),
        inside: tuple[Entry, tuple[int, ...]] | None = None,
        steps: tuple[int, ...] = (),
    ) -> list[Tagged]:
        """Compute a program.

        Args:
            jaxpr, constants: The program.
            arguments: Inputs of the program.
            scopes: Around it.
            inside: The branch that the whole program is in.
            steps: Steps of the loops around it.
        """
        values = dict(zip(jaxpr.constvars, map(Tagged, constants), strict=True))
        values |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(variable):
            """Return the value of a variable or of a literal."""
            return (
                Tagged(variable.val) if isinstance(variable, jax_core.Literal) else values[variable]
            )

        for eqn in jaxpr.eqns:
            paths = scopes + read_scopes(eqn)
            entry = self.branches.find_entry(paths)  # inside a branch it refuses the other kind
            within = inside or (entry and (entry, steps))
            read_in = [self._leave(read(v), within) for v in eqn.invars]
            outs = self._compute(eqn, read_in, paths, within, steps)
            values |= dict(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _leave(self, value, within):
        """Return a value as it is outside of the branch in which it was computed.

        There it is an output of the branch that has not yet been added to the stream (`pending`).

        Args:
            value: The value.
            within: The branch that reads it; None outside of all branches.
        """
        if value.entry is None or value.entry == within:
            return value
        return value._replace(
            depends=True,
            entry=None,
            pending=(Part(value.entry[0].axis, value.array, value.array),),
        )

    def _compute(self, eqn, values, scopes, within, steps):
        """Compute one equation.

        Args:
            eqn: The equation.
            values: Its arguments.
            scopes: Its scopes.
            within: The branch that it is inside of; None for none.
            steps: Numbers of the steps of the loops around it.
        """
        name, arrays = eqn.primitive.name, [v.array for v in values]
        if has_scopes_within(eqn):
            if name in primitives.CALLS:
                jaxpr, constants = open_program(eqn.params[primitives.CALLS[name]])
                return self.run(jaxpr, constants, values, scopes, within, steps)
            if name == "scan":
                return self._scan(eqn, values, scopes, within, steps)
            if name == "cond":
                index = min(max(int(arrays[0]), 0), len(eqn.params["branches"]) - 1)
                jaxpr, constants = open_program(eqn.params["branches"][index])
                return self.run(jaxpr, constants, values[1:], scopes, within, steps)
            if name == "while":
                return self._while(eqn, values, scopes, within, steps)
        depends = any(v.depends for v in values)
        level = max((v.level for v in values), default=0)
        if within is not None:
            refuse_own_state([v.level for v in values], "/".join(within[0].path))
            outs = [Tagged(out, depends, within if depends else None) for out in bind(eqn, arrays)]
        elif name == "name" and (axis := self.branches.find_name(eqn.params["name"])) is not None:
            refuse_own_state([level], eqn.params["name"])
            (out,) = bind(eqn, arrays)
            outs = [Tagged(out, depends, None, (Part(axis, out, out),))]
        else:
            outs, level = self._follow(eqn, values, depends, level)
        copied, scaled = _find_copied(name, values), _find_scaled(name, values)
        if within is not None or (copied is None and scaled is None):
            self._mark_read(values)
        if copied is not None and copied.array.shape == outs[0].array.shape:
            return [outs[0]._replace(level=level, number=copied.number, source=copied.source)]
        is_source = within is None and scaled is not None and not outs[0].pending
        if is_source and scaled.array.shape == outs[0].array.shape:
            outs = [outs[0]._replace(source=scaled)]
        return [self._place(v._replace(level=level, number=self._take_number())) for v in outs]

    def _mark_read(self, values):
        """Keep the numbers of the values that an equation reads, and of those they are multiples
        of."""
        for value in values:
            while value is not None:
                self._read.add(value.number)
                value = value.source

    def _find_state(self, value):
        """Return the state to which a branch is added: the value, or the state with a factor that
        makes it, where the branch was computed from that state and not from the value."""
        state = value
        while state is not None and state.number not in self._read:
            state = state.source
        return value if state is None else state

    def _take_number(self):
        """Return the number of the next value in the order of the computation, from 1; the input
        has 0."""
        self._count += 1
        return self._count

    def _place(self, value):
        """Return the value; if it is a state that another run replaces, that run's state."""
        if self.replacement is None:
            return value
        array = self.replacement.place_state(value.number, value.array)
        return value if array is None else value._replace(array=array, level=REPLACED)

    def _follow(self, eqn, values, depends, level):
        """Compute an equation outside of the branches, and keep the branches that a sum adds.

        Args:
            eqn: The equation.
            values: Its arguments.
            depends: Whether an argument depends on the input.
            level: The largest level of the arguments.

        Returns:
            (the outputs, their level).
        """
        arrays = [v.array for v in values]
        pending = [v for v in values if v.pending]
        states = [v for v in values if not v.pending and v.depends]
        is_sum = eqn.primitive.name in ("add", "add_any") and len(pending) == len(states) == 1
        if not is_sum or states[0].array.shape != pending[0].array.shape:
            outs = bind(eqn, arrays)
            return [
                Tagged(out, depends, None, self._list_pending(eqn, values, out)) for out in outs
            ], level
        (state,), (branch,) = states, pending
        if self.replacement is not None:
            array, ends = self.replacement.place_branches(branch)
            level = ITS_OWN if ends else level
            arrays = [array if v is branch else v.array for v in values]
        (out,) = bind(eqn, arrays)
        self._keep(branch.pending, state, out)
        return [Tagged(out, depends)], level

    def _list_pending(self, eqn, values, out):
        """List the parts of an output that are not yet in the stream.

        Args:
            eqn: The equation.
            values: Its arguments.
            out: Its output, an array.

        Returns:
            A tuple of `Part`: for a sum of two, the parts of both; for branches of one kind, one
            part, the output; for a linear map of several kinds, the same map of each part;
            otherwise ().
        """
        pending = [v for v in values if v.pending]
        if not pending:
            return ()
        if eqn.primitive.name in ("add", "add_any") and len(pending) == 2:
            return pending[0].pending + pending[1].pending
        kinds = {part.axis for v in pending for part in v.pending}
        if len(kinds) == 1:
            return (Part(kinds.pop(), out, pending[0].pending[0].root),)
        if len(pending) > 1:
            return ()
        # A linear map of a sum of branches: the same map of each branch.
        index = next(i for i, v in enumerate(values) if v.pending)

        def map_part(part):
            arrays = [v.array for v in values]
            arrays[index] = part.array
            return part._replace(array=bind(eqn, arrays)[0])

        return tuple(map(map_part, pending[0].pending))

    def _keep(self, parts, state, out):
        """Keep the sum of a state and of branches, unless the same branches were added before.

        Args:
            parts: The branches.
            state: The state to which they are added.
            out: The sum, an array.
        """
        if any(part.root is earlier.root for part in parts for earlier in self.sums):
            return
        stream = self._find_state(state)
        before, number, skip = stream.array, stream.number, state.array
        for part in sorted(parts, key=lambda part: part.axis):
            after = out if part.axis == max(p.axis for p in parts) else skip + part.array
            self.sums.append(Sum(part.axis, part.root, before, part.array, after, number))
            before, number, skip = after, None, after

    def _scan(self, eqn, values, scopes, within, steps):
        """Compute a loop step by step; arguments as in `_compute`.

        Returns:
            The carry after the last step, then the stacked outputs.
        """
        params = eqn.params
        num_consts, num_carry = count_scan_arguments(params)
        jaxpr, constants = open_program(params["jaxpr"])
        fixed, carry = values[:num_consts], values[num_consts : num_consts + num_carry]
        stacked = values[num_consts + num_carry :]
        order = range(params["length"])[:: -1 if params["reverse"] else 1]
        outputs: dict[int, list[Tagged]] = {}
        for step in order:
            now = [
                v._replace(array=v.array[step], pending=(), number=self._take_number(), source=None)
                for v in stacked
            ]
            outs = self.run(
                jaxpr, constants, [*fixed, *carry, *now], scopes, within, (*steps, step)
            )
            carry, outputs[step] = outs[:num_carry], outs[num_carry:]
        joined = []
        for index in range(len(eqn.outvars) - num_carry):
            parts = [outputs[step][index] for step in range(params["length"])]
            array = jax.numpy.stack([p.array for p in parts])
            level = max((p.level for p in parts), default=0)
            depends = any(p.depends for p in parts)
            joined.append(Tagged(array, depends, number=self._take_number(), level=level))
        return [*carry, *joined]

    def _while(self, eqn, values, scopes, within, steps):
        """Compute a loop until its condition fails; arguments as in `_compute`.

        Returns:
            The carry after the last step.
        """
        params = eqn.params
        num_in_condition, num_in_body = params["cond_nconsts"], params["body_nconsts"]
        condition, condition_constants = open_program(params["cond_jaxpr"])
        body, body_constants = open_program(params["body_jaxpr"])
        in_condition = values[:num_in_condition]
        in_body = values[num_in_condition : num_in_condition + num_in_body]
        carry, step = values[num_in_condition + num_in_body :], 0

        def goes_on():
            """Return whether the loop's condition holds."""
            (result,) = self.run(condition, condition_constants, [*in_condition, *carry])
            return bool(result.array)

        while goes_on():
            arguments = [*in_body, *carry]
            carry = self.run(body, body_constants, arguments, scopes, within, (*steps, step))
            step += 1
        return carry


def _find_copied(name, values):
    """Return the argument that an equation copies, or multiplies by ones; None for other equations.

    Args:
        name: Name of the equation's primitive.
        values: Its arguments.
    """
    if name in COPIES and values[0].depends:
        return values[0]
    scaled = _find_scaled(name, values)
    if scaled is None:
        return None
    (factor,) = (v for v in values if not v.depends)
    return scaled if bool(jax.numpy.all(factor.array == 1)) else None


def _find_scaled(name, values):
    """Return the argument that an equation multiplies or divides by constants; None for other
    equations.

    Args:
        name: Name of the equation's primitive.
        values: Its arguments; exactly one may depend on the input.
    """
    moving = [v for v in values if v.depends]
    is_factor = name in ("mul", "div") and len(values) == 2 and len(moving) == 1
    return moving[0] if is_factor and (name == "mul" or values[0].depends) else None


def has_scopes_within(eqn: JaxprEqn) -> bool:
    """Whether programs inside an equation have scopes or names.

    Args:
        eqn: The equation.
    """
    return any(map(has_scopes, jax_core.jaxprs_in_params(eqn.params)))
