"""Loops and conditions, built again around values and their sums.

The kinds of values are defined in `values`; a slot of sums holds one path length (`channels`).

A loop's state has the same number of slots at every step. The steps of a scan are taken in parts,
whose numbers of slots grow with the lengths that exist by then.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from rank_collapse.paths.traced.inner_skips import carry_trail, choose_trail
from rank_collapse.paths.traced.packing import (
    fill_sums,
    merge_carry,
    merge_labels,
    pack_values,
    unpack,
    unpack_values,
)
from rank_collapse.paths.traced.programs import count_scan_arguments, open_program
from rank_collapse.paths.traced.values import Kind, Value

PARTS = 4  # of a scan; more parts compute fewer empty slots and compile longer


def run_scan(
    run: object, eqn: JaxprEqn, values: Sequence[Value], scopes: object, entry: object
) -> list[Value]:
    """Run a scan on values and their sums.

    Args:
        run: The interpreter.
        eqn: The scan.
        values: Arguments of the equation.
        scopes, entry: See `Interpreter.run`.
    """
    return _Scan(run, eqn, values, scopes, entry).compute()


class _Scan:
    """A scan: its constants, its carry, and the inputs of each step."""

    def __init__(self, run, eqn, values, scopes, entry):
        self.run, self.params, self.scopes, self.entry = run, eqn.params, scopes, entry
        self.jaxpr, self.constants = open_program(eqn.params["jaxpr"])
        num_fixed, num_carry = count_scan_arguments(eqn.params)
        self.num_fixed, self.num_carry = num_fixed, num_carry
        self.fixed_values = values[:num_fixed]
        self.labels, self.arrays, self.sums = pack_values(values, run)
        for i in range(num_fixed + num_carry, len(values)):  # slots stand behind the steps
            if self.sums[i] is not None:
                self.sums[i] = jnp.moveaxis(self.sums[i], run.slots.num_axes, 0)
        self.out_labels = None
        # States of the name that paths may start at: before the scan, and in each step of it.
        self.first_state = 0 if run.start is None else run.start.count
        self.states_per_step = 0

    def step(self, carry, slices, labels):
        """Run the body once on arrays and sums; notes the results' labels in `out_labels`.

        Args:
            carry: (arrays, sums) of the carry.
            slices: (arrays, sums, number of the step) of the inputs of this step.
            labels: Labels of the carry.

        Returns:
            (arrays, sums) of the results: the carry first, then what is stacked.
        """
        start = self.run.start
        fixed = []
        for i, value in enumerate(self.fixed_values):
            has_paths = self.labels[i].kind >= Kind.STATE
            if has_paths:
                value = unpack(self.labels[i], self.arrays[i], self.sums[i])
            fixed.append(value)
        carried = unpack_values(labels, *carry)
        slice_arrays, slice_sums, number = slices
        slice_labels = self.labels[self.num_fixed + self.num_carry :]
        sliced = unpack_values(slice_labels, slice_arrays, slice_sums)
        if start is not None:
            start.count = self.first_state + number * self.states_per_step
            num_seen = start.num_seen
        outs = self.run.run(
            self.jaxpr, self.constants, [*fixed, *carried, *sliced], self.scopes, self.entry
        )
        if start is not None:
            self.states_per_step = start.num_seen - num_seen
            start.num_seen = num_seen
        self.out_labels, arrays, sums = pack_values(outs, self.run)
        return arrays, sums

    def trace_step(self, labels, sizes):
        """Return the shapes of a step's results, (arrays, sums), and note its `out_labels`.

        Args:
            labels: Labels of the carry.
            sizes: Numbers of slots of the carry.
        """
        first, carried = self.num_fixed, self.num_fixed + self.num_carry
        slices = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(jnp.shape(a)[1:], jnp.result_type(a)),
            (self.arrays[carried:], self.sums[carried:]),
        )
        slices = (*slices, jax.ShapeDtypeStruct((), jnp.int32))
        return jax.eval_shape(
            lambda carry, slices: self.step(carry, slices, labels),
            self.make_carry(labels, sizes, self.arrays[first:carried], self.sums[first:carried]),
            slices,
        )

    def make_carry(self, labels, sizes, arrays, sums):
        """Pad a carry's sums to given numbers of slots, because a loop's state has one shape at all
        steps.

        Args:
            labels: For each value of the carry what the loop has to know besides its arrays, such
                as whether paths pass it.
            sizes: Number of slots (path lengths) on each axis.
            arrays: The values.
            sums: Their sums over paths, [*slots, ...]; None for values without.

        Returns:
            (arrays, sums) of the carry.
        """
        filled = [
            fill_sums(label, a, s, sizes, self.run)
            for label, a, s in zip(labels, arrays, sums, strict=True)
        ]
        return arrays, filled

    def compute(self):
        """Run the scan: find the carry's labels, then the slots that a step adds, then run parts.

        Returns:
            The values of the scan's results: the carry after the last step, then what is stacked.
        """
        run, num_carry = self.run, self.num_carry
        num_shifts = list(run.branches.num_shifts)
        sizes = run.slots.largest(self.first_sums())
        labels, sums = self.settle_labels(sizes)
        grown = run.slots.largest([s for s in sums[:num_carry] if s is not None])
        growth = [max(after - before, 0) for after, before in zip(grown, sizes, strict=True)]
        # Tracing a step counted its branches; the scan counts them again when it runs.
        run.branches.num_shifts = num_shifts
        # How many slots more than the carry before the step each stacked result can have.
        self.stacked_growth = [
            None if s is None else [a - b for a, b in zip(run.slots.sizes(s), sizes, strict=True)]
            for s in sums[num_carry:]
        ]
        values = self.run_parts(labels, sizes, growth)
        if run.start is not None:
            num_states = self.params["length"] * self.states_per_step
            run.start.count = self.first_state + num_states
            run.start.num_seen += num_states
        return values

    def settle_labels(self, sizes):
        """Trace steps until the labels of the carry are the same before and after a step.

        Each step is traced with the labels merged from all steps before it.

        Args:
            sizes: Numbers of slots of the carry.

        Returns:
            (labels of the carry, shapes of the sums of a step's results).
        """
        num_carry = self.num_carry
        labels = [
            dataclasses.replace(label, trail=carry_trail(label.trail, None, self.entry))
            for label in self.labels[self.num_fixed : self.num_fixed + num_carry]
        ]
        while True:
            _, sums = self.trace_step(labels, sizes)
            merged = [
                merge_carry(before, after, self.entry)
                for before, after in zip(labels, self.out_labels[:num_carry], strict=True)
            ]
            if merged == labels:
                self.check_carry(labels)
                return labels, sums
            labels = merged

    def check_carry(self, labels):
        """Check that the carry does not hold several values of one branch, such as a cache.

        Args:
            labels: Labels of the carry.

        Raises:
            ValueError: It does, see `Branches.check_carry`.
        """
        if self.entry is not None:
            return
        first, last = self.num_fixed, self.num_fixed + self.num_carry
        pairs = zip(
            self.jaxpr.invars[first:last], self.jaxpr.outvars[: self.num_carry], strict=True
        )
        carry = [
            pair
            for pair, label in zip(pairs, labels, strict=True)
            if label.kind in (Kind.STATE, Kind.GATE) and isinstance(pair[1], Var)
        ]
        self.run.branches.check_carry(self.jaxpr, self.scopes, carry)

    def first_sums(self):
        """Return the shapes of all sums that the first step takes."""
        last = self.num_fixed + self.num_carry
        sums = [s for s in self.sums[:last] if s is not None]
        stacked = [s for s in self.sums[last:] if s is not None]
        return sums + [jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in stacked]

    def run_parts(self, labels, sizes, growth):
        """Run the scan in parts, each with as many slots as there are path lengths at its end.

        It stays one scan, with a case for each part: several scans would copy what they read.

        Args:
            labels: Labels of the carry.
            sizes: Numbers of slots of the carry before the first step.
            growth: Numbers of slots that a step adds.

        Returns:
            The values of the scan's results: the carry after the last step, then what is stacked.
        """
        slots, length, num_carry = self.run.slots, self.params["length"], self.num_carry
        num_parts = max(min(PARTS, length), 1) if any(growth) else 1
        stops = [length * (i + 1) // num_parts for i in range(num_parts)]
        sizes_by_part = [
            slots.cap([s + g * stop for s, g in zip(sizes, growth, strict=True)]) for stop in stops
        ]
        first, last = self.num_fixed, self.num_fixed + num_carry
        carry = self.arrays[first:last], self.sums[first:last]
        carry = self.make_carry(labels, sizes_by_part[-1], *carry)
        stacked_sizes = self.find_stacked_sizes(labels, sizes_by_part[-1])

        def make_part(part_sizes):
            """Make the function of one step, which computes with the slots of a part alone."""

            def compute(carry, slices):
                """Run one step with the slots of the part.

                Returns:
                    (carry, (arrays, sums) of what is stacked), with the slots of the whole scan.
                """
                part_carry = self.make_carry(labels, part_sizes, *carry)
                arrays, sums = self.step(part_carry, slices, labels)
                new_carry = self.make_carry(
                    labels, sizes_by_part[-1], arrays[:num_carry], sums[:num_carry]
                )
                stacked_sums = [
                    None if s is None else slots.resize(s, most)
                    for s, most in zip(sums[num_carry:], stacked_sizes, strict=True)
                ]
                return new_carry, (arrays[num_carry:], stacked_sums)

            return compute

        parts = [make_part(part_sizes) for part_sizes in sizes_by_part]

        def body(carry, slices):
            """Run a step with the slots of the part of the scan that it belongs to."""
            part = jnp.searchsorted(jnp.asarray(stops), slices[-1], side="right")
            return jax.lax.switch(part, parts, carry, slices)

        numbers = jnp.arange(length, dtype=jnp.int32)
        reverse = self.params["reverse"]
        slices = self.arrays[last:], self.sums[last:], numbers[::-1] if reverse else numbers
        # Gradients compute a step again: they would keep the sums inside of every part's step.
        (arrays, sums), (stacked_arrays, stacked_sums) = jax.lax.scan(
            jax.checkpoint(body, prevent_cse=False),
            carry,
            slices,
            length=length,
            reverse=reverse,
            unroll=self.params["unroll"],
        )
        before_last = [s + g * (length - 1) for s, g in zip(sizes, growth, strict=True)]
        stacked_sums = self.drop_empty_slots(stacked_sums, before_last)
        labels = [  # all paths of the last step passed
            dataclasses.replace(label, trail=out.trail)
            for label, out in zip(labels, self.out_labels[:num_carry], strict=True)
        ]
        stacked_labels = self.out_labels[num_carry:]
        return [
            *unpack_values(labels, arrays, sums),
            *unpack_values(stacked_labels, stacked_arrays, stacked_sums),
        ]

    def find_stacked_sizes(self, labels, sizes):
        """Return the largest numbers of slots (path lengths) of the results that the scan stacks.

        Args:
            labels: Labels of the carry.
            sizes: Numbers of slots of the carry in the last part.

        Returns:
            For each stacked result its sizes; None for one without sums.
        """
        if all(growth is None for growth in self.stacked_growth):
            return self.stacked_growth
        _, sums = self.trace_step(labels, sizes)
        return [None if s is None else self.run.slots.sizes(s) for s in sums[self.num_carry :]]

    def drop_empty_slots(self, stacked_sums, before_last):
        """Drop the slots for lengths that no path can have by the last step, from the stacked
        results.

        Args:
            stacked_sums: Sums [steps, *slots, ...] of each stacked result; None for one without.
            before_last: Numbers of slots of the carry before the last step.

        Returns:
            Sums [*slots, steps, ...]; None for a result without.
        """
        slots, nonempty = self.run.slots, []
        for s, growth in zip(stacked_sums, self.stacked_growth, strict=True):
            if s is not None:
                s = jnp.moveaxis(s, 0, slots.num_axes)
                reachable = [b + more for b, more in zip(before_last, growth, strict=True)]
                s = slots.resize(s, list(map(min, slots.sizes(s), reachable)))
            nonempty.append(s)
        return nonempty


def _branch_programs(eqn):
    """Return the programs, jaxprs, of the cases of a condition."""
    return [open_program(program)[0] for program in eqn.params["branches"]]


def run_cond(
    run: object, eqn: JaxprEqn, values: Sequence[Value], scopes: object, entry: object
) -> list[Value]:
    """Run a condition on values and their sums. Which branch is taken is frozen.

    Args:
        run: The interpreter.
        eqn: The condition.
        values: The index of the branch, and its arguments.
        scopes, entry: See `Interpreter.run`.
    """
    if run.start is not None and any(map(run.start.is_in, _branch_programs(eqn))):
        raise ValueError(
            f"states={run.start.pattern.pattern!r} matches a name inside jax.lax.cond, where the "
            "states cannot be counted; name the state outside of it"
        )
    index, operands = values[0].array, values[1:]
    labels, arrays, sums = pack_values(operands, run)
    out_labels = {}  # {number of a branch: labels of its results}

    def make_branch(number, program):
        """Make the function of one branch on arrays and sums; it notes their labels."""
        jaxpr, constants = open_program(program)

        def compute(arrays, sums):
            """Run the body once: (arrays, sums) of its results, whose labels it keeps."""
            arguments = []
            for i, operand in enumerate(operands):
                is_known_number = labels[i].kind < Kind.STATE and operand.fill is not None
                arguments.append(
                    operand if is_known_number else unpack(labels[i], arrays[i], sums[i])
                )
            outs = run.run(jaxpr, constants, arguments, scopes, entry)
            out_labels[number], out_arrays, out_sums = pack_values(outs, run)
            return out_arrays, out_sums

        return compute

    branches = [make_branch(i, p) for i, p in enumerate(eqn.params["branches"])]
    shapes = [jax.eval_shape(b, arrays, sums) for b in branches]
    merged = out_labels[0]
    for i in range(1, len(branches)):
        merged = [
            merge_labels(one, other, choose_trail(one.trail, other.trail, entry))
            for one, other in zip(merged, out_labels[i], strict=True)
        ]
    if values[0].kind != Kind.CONSTANT:
        merged = [dataclasses.replace(label, kind=max(label.kind, Kind.FROZEN)) for label in merged]
    sizes = run.slots.largest([s for _, sums in shapes for s in sums if s is not None])

    def pad(branch):
        """Make a case of the condition whose sums have as many slots as those of the largest
        case."""

        def compute(arrays, sums):
            """Run the case, and pad the sums of its results."""
            out_arrays, out_sums = branch(arrays, sums)
            filled = [
                fill_sums(label, a, s, sizes, run)
                for label, a, s in zip(merged, out_arrays, out_sums, strict=True)
            ]
            return out_arrays, filled

        return compute

    # The shapes above counted what leaves branches inside; the switch would count it again.
    num_shifts = list(run.branches.num_shifts)
    out_arrays, out_sums = jax.lax.switch(index, [pad(b) for b in branches], arrays, sums)
    run.branches.num_shifts = num_shifts
    return unpack_values(merged, out_arrays, out_sums)
