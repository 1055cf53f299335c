"""The residual stream of a traced program: the states to which branches are added.

The program is computed equation by equation with its numbers. What leaves a branch may be scaled,
converted or normed; where it is added to a state of its shape, that is the stream before the branch
and the sum the stream after it. Loops are computed step by step if their bodies have branches.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.extend import core as jax_core
from jax.extend.core import Jaxpr, JaxprEqn

from rank_collapse.annotations import AnyArray
from rank_collapse.paths.traced import primitives
from rank_collapse.paths.traced.branches import Branches, Entry
from rank_collapse.paths.traced.programs import Scope, bind, has_scopes, open_program, read_scopes
from rank_collapse.struct import refuse_if


class Part(NamedTuple):
    """The output of a branch on its way to the stream.

    Attributes:
        axis: Which kind of branch, as in `Branches.kinds`.
        array: What became of it.
        root: What left the branch.
    """

    axis: int
    array: AnyArray
    root: AnyArray


class Tagged(NamedTuple):
    """A value of the program.

    Attributes:
        array: The value.
        depends: Whether it depends on the input.
        entry: The branch inside of which it was computed, with the steps of loops; or None.
        pending: Outputs of branches that it is the sum of, not yet in the stream.
    """

    array: AnyArray
    depends: bool = False
    entry: tuple[Entry, tuple[int, ...]] | None = None
    pending: tuple[Part, ...] = ()


class Sum(NamedTuple):
    """One branch that was added to the stream.

    Attributes:
        axis: Which kind of branch, as in `Branches.kinds`.
        root: What left the branch; the same branch may be added several times, for several readers.
        before, branch, after: Arrays of one shape.
    """

    axis: int
    root: AnyArray
    before: AnyArray
    branch: AnyArray
    after: AnyArray


class StreamReader:
    """Computes a program, and keeps where branches are added to a stream.

    Args:
        branches: What is a branch.
    """

    def __init__(self, branches: Branches):
        self.branches = branches
        self.sums: list[Sum] = []

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
            arguments: Its inputs.
            scopes: Around it.
            inside: The branch that the whole program is in.
            steps: Steps of the loops around it.
        """
        values = dict(zip(jaxpr.constvars, map(Tagged, constants), strict=True))
        values |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(variable):
            return (
                Tagged(variable.val) if isinstance(variable, jax_core.Literal) else values[variable]
            )

        for eqn in jaxpr.eqns:
            paths = scopes + read_scopes(eqn)
            entry = None if inside else self.branches.find_entry(paths)
            within = inside or (entry and (entry, steps))
            read_in = [self._leave(read(v), within) for v in eqn.invars]
            outs = self._compute(eqn, read_in, paths, within, steps)
            values |= dict(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _leave(self, value, within):
        """Return a value as it is outside of the branch in which it was computed."""
        if value.entry is None or value.entry == within:
            return value
        return Tagged(
            value.array, True, None, (Part(value.entry[0].axis, value.array, value.array),)
        )

    def _compute(self, eqn, values, scopes, within, steps):
        """Compute one equation."""
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
        outs = bind(eqn, arrays)
        depends = any(v.depends for v in values)
        if within is not None:
            return [Tagged(out, depends, within if depends else None) for out in outs]
        if name == "name" and (axis := self.branches.find_name(eqn.params["name"])) is not None:
            return [Tagged(outs[0], depends, None, (Part(axis, outs[0], outs[0]),))]
        return [Tagged(out, depends, None, self._follow(eqn, values, out)) for out in outs]

    def _follow(self, eqn, values, out):
        """Return what of an output is not yet in the stream; keep a sum that puts it there."""
        pending = [v for v in values if v.pending]
        states = [v for v in values if not v.pending and v.depends]
        if not pending:
            return ()
        is_sum = eqn.primitive.name in ("add", "add_any")
        if is_sum and len(pending) == 2:
            return pending[0].pending + pending[1].pending
        if is_sum and len(states) == 1 and states[0].array.shape == out.shape:
            self._keep(pending[0].pending, states[0].array, out)
            return ()
        kinds = {part.axis for v in pending for part in v.pending}
        if len(kinds) == 1:
            return (Part(kinds.pop(), out, pending[0].pending[0].root),)
        if len(pending) > 1:
            return ()
        index = next(i for i, v in enumerate(values) if v.pending)  # a linear map of a sum
        arrays = [v.array for v in values]
        return tuple(
            part._replace(array=bind(eqn, [*arrays[:index], part.array, *arrays[index + 1 :]])[0])
            for part in pending[0].pending
        )

    def _keep(self, parts, before, out):
        """Keep the sum of a state and of branches, unless they were added before."""
        if any(part.root is earlier.root for part in parts for earlier in self.sums):
            return
        for part in sorted(parts, key=lambda part: part.axis):
            after = out if part.axis == max(p.axis for p in parts) else before + part.array
            self.sums.append(Sum(part.axis, part.root, before, part.array, after))
            before = after

    def _scan(self, eqn, values, scopes, within, steps):
        """Compute a loop step by step."""
        params = eqn.params
        num_consts, num_carry, length = (params[k] for k in ("num_consts", "num_carry", "length"))
        jaxpr, constants = open_program(params["jaxpr"])
        fixed, carry = values[:num_consts], values[num_consts : num_consts + num_carry]
        stacked = values[num_consts + num_carry :]
        order = range(length - 1, -1, -1) if params["reverse"] else range(length)
        outputs: dict[int, list[Tagged]] = {}
        for step in order:
            now = [v._replace(array=v.array[step], pending=()) for v in stacked]
            outs = self.run(
                jaxpr, constants, [*fixed, *carry, *now], scopes, within, (*steps, step)
            )
            carry, outputs[step] = outs[:num_carry], outs[num_carry:]
        joined = []
        for index in range(len(eqn.outvars) - num_carry):
            parts = [outputs[step][index] for step in range(length)]
            array = jax.numpy.stack([p.array for p in parts])
            joined.append(Tagged(array, any(p.depends for p in parts)))
        return [*carry, *joined]

    def _while(self, eqn, values, scopes, within, steps):
        """Compute a loop until its condition fails."""
        params = eqn.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        condition, body = (open_program(params[k]) for k in ("cond_jaxpr", "body_jaxpr"))
        carry, step = values[first + second :], 0
        while bool(self.run(*condition, [*values[:first], *carry])[0].array):
            fixed = values[first : first + second]
            carry = self.run(*body, [*fixed, *carry], scopes, within, (*steps, step))
            step += 1
        return carry


def has_scopes_within(eqn: JaxprEqn) -> bool:
    """Whether programs inside an equation have scopes or names.

    Args:
        eqn: The equation.
    """
    return any(map(has_scopes, jax_core.jaxprs_in_params(eqn.params)))


class LayerArrays(NamedTuple):
    """The stream and the branches of all layers.

    Attributes:
        residual: L + 1 arrays.
        branches: {axis: L arrays} of the kinds that all layers have.
    """

    residual: list[AnyArray]
    branches: dict[int, list[AnyArray]]


def group_layers(sums: Sequence[Sum], output: AnyArray) -> LayerArrays:
    """Group the branches of a program by layer: attention first, then an MLP where there is one.

    Args:
        sums: In their order.
        output: Output of the program.

    Raises:
        ValueError: There are none, they are not of one stream, or the last state is not known.
    """
    refuse_if(not sums, "no branch is added to a state of its shape: is the skip in its scope?")
    shape = sums[0].before.shape
    for entry in sums:
        refuse_if(
            entry.before.shape != shape,
            f"branches are added to states of shapes {list(shape)} and {list(entry.before.shape)}: "
            "not one stream",
        )
    layers: list[list[Sum]] = []
    for entry in sums:
        if not layers or entry.axis in {e.axis for e in layers[-1]} or entry.axis == 0:
            layers.append([])
        layers[-1].append(entry)
    kinds = {e.axis for e in layers[0]}
    for index, layer in enumerate(layers):
        refuse_if(
            {e.axis for e in layer} != kinds,
            f"layer {index} has {len(layer)} branches, layer 0 has {len(kinds)}",
        )
    last = layers[-1][-1].after
    if any(_differ(a[-1].after, b[0].before) for a, b in itertools.pairwise(layers)):
        refuse_if(
            output.shape != last.shape,
            "something follows the last sum of each layer, a norm or a branch without a name: name "
            "the MLP, too, or let fn return the state after the last layer",
        )
        last = output
    residual = [*(layer[0].before for layer in layers), last]
    branches = {
        kind: [next(e.branch for e in layer if e.axis == kind) for layer in layers]
        for kind in kinds
    }
    return LayerArrays(residual, branches)


def _differ(first, second):
    """Return whether two states are other numbers."""
    return first is not second and not bool((first == second).all())
