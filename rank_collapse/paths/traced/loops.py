"""Loops and conditions, built again around values and their sums.

The kinds of values are defined in `values`; a slot of sums holds one path length (`channels`).

A loop's state has the same number of slots at every step. The steps of a scan are taken in parts,
whose numbers of slots grow with the lengths that exist by then.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from rank_collapse.annotations import AnyArray
from rank_collapse.paths.traced.channels import LazySums
from rank_collapse.paths.traced.inner_skips import Trail, carry_trail, choose_trail
from rank_collapse.paths.traced.programs import open_program
from rank_collapse.paths.traced.values import (
    Kind,
    Value,
    gate_sums,
    make_state,
    merge_kinds,
)

PARTS = 4  # of a scan; more parts compute fewer empty slots and compile longer


@dataclasses.dataclass(frozen=True)
class Label:
    """What a loop has to know of a value besides its arrays."""

    kind: Kind
    is_weight: bool = False
    passes_whole: bool = False
    reason: str = dataclasses.field(default="", compare=False)
    trail: Trail | None = None

    @property
    def has_sums(self) -> bool:
        """Whether a value of this label has sums."""
        return self.kind in (Kind.STATE, Kind.GATE)


def pack(value: Value, run: object) -> tuple[Label, Any, LazySums | None]:
    """Take a value apart: its label, its array and its sums.

    Args:
        value: The value.
        run: The interpreter.
    """
    if value.kind == Kind.GATE:
        resolved = run.resolve(value)
        if resolved.kind == Kind.STATE:
            label = Label(Kind.GATE, value.is_weight, value.passes_whole, trail=value.trail)
            return label, value.array, gate_sums(value, run.slots)
        value = resolved
    sums = value.sums if value.kind == Kind.STATE else None
    return Label(value.kind, reason=value.reason, trail=value.trail), value.array, sums


def unpack(label: Label, array: AnyArray, sums: AnyArray) -> Value:
    """Put a value together again.

    Args:
        label, array: Label and array of the value.
        sums: An array; None where the label has none.
    """
    if label.kind == Kind.STATE:
        return make_state(array, LazySums(lambda: sums, trail=label.trail))
    if label.kind == Kind.GATE:
        return Value(
            array,
            Kind.GATE,
            LazySums(lambda: sums, trail=label.trail),
            is_weight=label.is_weight,
            passes_whole=label.passes_whole,
        )
    return Value(array, label.kind, reason=label.reason)


def merge_labels(first: Label, second: Label, trail: Trail | None) -> Label:
    """Return the label of a value that is one of two, with the trail."""
    kind = merge_kinds(Value(None, first.kind), Value(None, second.kind))
    gates = [label for label in (first, second) if label.kind == Kind.GATE]
    return Label(
        kind,
        kind == Kind.GATE and all(g.is_weight for g in gates),
        kind == Kind.GATE and any(g.passes_whole for g in gates),
        first.reason or second.reason,
        trail,
    )


def _merge_carry(before, after, entry):
    """Return the label of a carry before and after a step.

    What starts as a constant and seems to become a product is tried as a state without sums: there
    it can be weighed by what may multiply nothing but states.
    """
    if before.kind < Kind.STATE and after.kind == Kind.PRODUCT:
        return Label(Kind.STATE)
    return merge_labels(before, after, carry_trail(before.trail, after.trail, entry))


def fill_sums(
    label: Label, array: AnyArray, sums: AnyArray, sizes: Sequence[int], run: object
) -> Any:
    """Return sums with the given numbers of slots; zeros where a constant becomes a state."""
    if not label.has_sums:
        return None
    if sums is None:
        return jnp.zeros((*sizes, *array.shape), array.dtype)
    return run.slots.resize(sums, sizes)


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
        num_fixed, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        self.num_fixed, self.num_carry = num_fixed, num_carry
        packed = [pack(v, run) for v in values]
        self.fixed_values = values[:num_fixed]
        self.labels = [label for label, _, _ in packed]
        self.arrays = [array for _, array, _ in packed]
        self.sums = [None if s is None else s.array for _, _, s in packed]
        for i in range(num_fixed + num_carry, len(values)):  # slots stand behind the steps
            if self.sums[i] is not None:
                self.sums[i] = jnp.moveaxis(self.sums[i], run.slots.num_axes, 0)
        self.out_labels = None
        # States of the name that paths may start at: before the scan, and in each step of it.
        self.first_state = 0 if run.start is None else run.start.count
        self.states_per_step = 0

    def step(self, carry, slices, labels):
        """Run the body once on arrays and sums."""
        fixed = [
            v if label.kind < Kind.STATE else unpack(label, a, s)
            for v, label, a, s in zip(
                self.fixed_values,
                self.labels,
                self.arrays,
                self.sums[: self.num_fixed],
                strict=False,
            )
        ]
        arrays, sums = carry
        carried = [unpack(*part) for part in zip(labels, arrays, sums, strict=True)]
        arrays, sums, number = slices
        if self.run.start is not None:
            self.run.start.count = self.first_state + number * self.states_per_step
        slice_labels = self.labels[self.num_fixed + self.num_carry :]
        sliced = [unpack(*part) for part in zip(slice_labels, arrays, sums, strict=True)]
        before = None if self.run.start is None else self.run.start.num_seen
        outs = self.run.run(
            self.jaxpr, self.constants, [*fixed, *carried, *sliced], self.scopes, self.entry
        )
        if before is not None:
            self.states_per_step, self.run.start.num_seen = self.run.start.num_seen - before, before
        packed = [pack(v, self.run) for v in outs]
        self.out_labels = [label for label, _, _ in packed]
        return [(a, None if s is None else s.array) for _, a, s in packed]

    def trace_step(self, labels, sizes):
        """Return the shapes of a step's results, for a carry of these labels and slots."""
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
        """Return (arrays, sums) of the carry with given numbers of slots."""
        filled = [
            fill_sums(label, a, s, sizes, self.run)
            for label, a, s in zip(labels, arrays, sums, strict=True)
        ]
        return arrays, filled

    def compute(self):
        """Find the carry's labels and the slots that a step adds, then run the scan in parts."""
        run, num_carry = self.run, self.num_carry
        num_shifts = list(run.branches.num_shifts)
        labels = [
            dataclasses.replace(label, trail=carry_trail(label.trail, None, self.entry))
            for label in self.labels[self.num_fixed : self.num_fixed + num_carry]
        ]
        sizes = run.slots.largest(self.first_sums())
        while True:
            outs = self.trace_step(labels, sizes)
            pairs = zip(labels, self.out_labels[:num_carry], strict=True)
            merged = [_merge_carry(*pair, self.entry) for pair in pairs]
            if merged == labels:
                break
            labels = merged
        grown = run.slots.largest([s for _, s in outs[:num_carry] if s is not None])
        growth = [max(g - s, 0) for g, s in zip(grown, sizes, strict=True)]
        run.branches.num_shifts = num_shifts
        # How many slots more than the carry before the step each stacked result can have.
        self.stacked_growth = [
            None if s is None else [a - b for a, b in zip(run.slots.sizes(s), sizes, strict=True)]
            for _, s in outs[num_carry:]
        ]
        if run.start is None:
            return self.run_parts(labels, sizes, growth)
        values = self.run_parts(labels, sizes, growth)
        num_states = self.params["length"] * self.states_per_step
        run.start.count = self.first_state + num_states
        run.start.num_seen += num_states
        return values

    def first_sums(self):
        """Return the shapes of all sums that the first step takes."""
        last = self.num_fixed + self.num_carry
        sums = [s for s in self.sums[:last] if s is not None]
        stacked = [s for s in self.sums[last:] if s is not None]
        return sums + [jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in stacked]

    def run_parts(self, labels, sizes, growth):
        """Run the scan in parts, each with as many slots as there are path lengths at its end.

        It stays one scan, with a case for each part: several scans would copy what they read.
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
            def compute(carry, slices):
                outs = self.step(self.make_carry(labels, part_sizes, *carry), slices, labels)
                arrays, sums = [a for a, _ in outs], [s for _, s in outs]
                carried = arrays[:num_carry], sums[:num_carry]
                filled = [
                    None if s is None else slots.resize(s, most)
                    for s, most in zip(sums[num_carry:], stacked_sizes, strict=True)
                ]
                return self.make_carry(labels, sizes_by_part[-1], *carried), (
                    arrays[num_carry:],
                    filled,
                )

            return compute

        parts = [make_part(part_sizes) for part_sizes in sizes_by_part]

        def body(carry, slices):
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
        stacked = self.out_labels[num_carry:], stacked_arrays, stacked_sums
        labels = [  # all paths of the last step passed
            dataclasses.replace(label, trail=out.trail)
            for label, out in zip(labels, self.out_labels[:num_carry], strict=True)
        ]
        values = [*zip(labels, arrays, sums, strict=True), *zip(*stacked, strict=True)]
        return [unpack(*value) for value in values]

    def find_stacked_sizes(self, labels, sizes):
        """Return the largest numbers of slots of the stacked results; None for one without sums."""
        if all(growth is None for growth in self.stacked_growth):
            return self.stacked_growth
        outs = self.trace_step(labels, sizes)[self.num_carry :]
        return [None if s is None else self.run.slots.sizes(s) for _, s in outs]

    def drop_empty_slots(self, stacked_sums, before_last):
        """Drop slots of stacked results for lengths that no path can have by the last step."""
        slots, nonempty = self.run.slots, []
        for s, growth in zip(stacked_sums, self.stacked_growth, strict=True):
            if s is not None:
                s = jnp.moveaxis(s, 0, slots.num_axes)
                most = [b + m for b, m in zip(before_last, growth, strict=True)]
                s = slots.resize(s, [min(*pair) for pair in zip(slots.sizes(s), most, strict=True)])
            nonempty.append(s)
        return nonempty


def _branch_programs(eqn):
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
    packed = [pack(v, run) for v in operands]
    labels = [label for label, _, _ in packed]
    arrays = [a for _, a, _ in packed]
    sums = [None if s is None else s.array for _, _, s in packed]
    out_labels = {}

    def make_branch(number, program):
        """Makes the function of one branch on arrays and sums; it also notes result labels."""
        jaxpr, constants = open_program(program)

        def compute(arrays, sums):
            """Runs the body once, and keeps the labels of its outputs."""
            arguments = [
                v if label.kind < Kind.STATE and v.fill is not None else unpack(label, a, s)
                for v, label, a, s in zip(operands, labels, arrays, sums, strict=True)
            ]
            outs = run.run(jaxpr, constants, arguments, scopes, entry)
            parts = [pack(v, run) for v in outs]
            out_labels[number] = [label for label, _, _ in parts]
            return [(a, None if s is None else s.array) for _, a, s in parts]

        return compute

    branches = [make_branch(i, p) for i, p in enumerate(eqn.params["branches"])]
    shapes = [jax.eval_shape(b, arrays, sums) for b in branches]
    merged = out_labels[0]
    for i in range(1, len(branches)):
        pairs = list(zip(merged, out_labels[i], strict=True))
        trails = [choose_trail(one.trail, other.trail, entry) for one, other in pairs]
        merged = [merge_labels(*pair, trail) for pair, trail in zip(pairs, trails, strict=True)]
    if values[0].kind != Kind.CONSTANT:
        merged = [dataclasses.replace(label, kind=max(label.kind, Kind.FROZEN)) for label in merged]
    sizes = run.slots.largest([s for shape in shapes for _, s in shape if s is not None])

    def pad(branch):
        """Wraps a branch so that its sums have the slots of both branches."""

        def compute(arrays, sums):
            outs = branch(arrays, sums)
            filled = [
                fill_sums(label, a, s, sizes, run)
                for label, (a, s) in zip(merged, outs, strict=True)
            ]
            return [a for a, _ in outs], filled

        return compute

    num_shifts = list(run.branches.num_shifts)
    out_arrays, out_sums = jax.lax.switch(index, [pad(b) for b in branches], arrays, sums)
    run.branches.num_shifts = num_shifts
    return [unpack(*part) for part in zip(merged, out_arrays, out_sums, strict=True)]
