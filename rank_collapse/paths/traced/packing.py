"""Values of loops and conditions taken apart: a label that does not change, arrays, and sums.

The kinds of values are defined in `values`; a slot of sums holds one path length (`channels`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from rank_collapse.annotations import AnyArray
from rank_collapse.paths.traced.channels import LazySums
from rank_collapse.paths.traced.inner_skips import Trail, carry_trail
from rank_collapse.paths.traced.values import (
    Kind,
    Value,
    gate_sums,
    make_state,
    merge_kinds,
)


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


def _pack(value: Value, run: object) -> tuple[Label, Any, LazySums | None]:
    """Take a value apart.

    A gate that is also a state keeps the sums of the state. All other values except states lose
    their sums.

    Args:
        value: The value.
        run: The interpreter.

    Returns:
        (its label, its array, its sums or None).
    """
    if value.kind == Kind.GATE:
        resolved = run.resolve(value)
        if resolved.kind == Kind.STATE:
            label = Label(Kind.GATE, value.is_weight, value.passes_whole, trail=value.trail)
            return label, value.array, gate_sums(value, run.slots)
        value = resolved
    sums = value.sums if value.kind == Kind.STATE else None
    return Label(value.kind, reason=value.reason, trail=value.trail), value.array, sums


def pack_values(
    values: Sequence[Value], run: object
) -> tuple[list[Label], list[AnyArray], list[AnyArray | None]]:
    """Take values apart into labels, arrays and sums, as a loop needs them, and compute their sums.

    A loop's state consists of arrays of fixed shapes; a label keeps the properties of a value that
    stay the same.

    Args:
        values: The values.
        run: The interpreter.

    Returns:
        (labels, arrays, sums), each with one entry per value; sums are arrays [*slots, ...] or
        None.
    """
    packed = [_pack(v, run) for v in values]
    labels = [label for label, _, _ in packed]
    arrays = [array for _, array, _ in packed]
    sums = [None if lazy is None else lazy.array for _, _, lazy in packed]
    return labels, arrays, sums


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


def unpack_values(
    labels: Sequence[Label], arrays: Sequence[AnyArray], sums: Sequence[AnyArray | None]
) -> list[Value]:
    """Put values together again, from what `pack_values` returns."""
    return [unpack(*parts) for parts in zip(labels, arrays, sums, strict=True)]


def merge_labels(first: Label, second: Label, trail: Trail | None) -> Label:
    """Return the label that covers two values of which one is taken, such as the cases of a
    condition.

    Args:
        first, second: Labels of the two: their kinds, and properties of gates.
        trail: What the paths of either went through.
    """
    kind = merge_kinds(Value(None, first.kind), Value(None, second.kind))
    gates = [label for label in (first, second) if label.kind == Kind.GATE]
    return Label(
        kind,
        kind == Kind.GATE and all(g.is_weight for g in gates),
        kind == Kind.GATE and any(g.passes_whole for g in gates),
        first.reason or second.reason,
        trail,
    )


def merge_carry(before: Label, after: Label, entry: object) -> Label:
    """Return the label of a value of a loop's state that covers it before and after a step.

    A value that starts as a constant may become a product of two values with paths, which no rule
    could use. It is tried as a state whose sums are 0: a product with a weight then passes paths.

    Args:
        before, after: Labels of the value before and after the step.
        entry: The branch around the loop; None for none.
    """
    if before.kind < Kind.STATE and after.kind == Kind.PRODUCT:
        return Label(Kind.STATE)
    # A new trail in each step would never equal the one before it.
    passes = after.trail is not None
    trail = carry_trail(before.trail, after.trail, entry) if passes else before.trail
    return merge_labels(before, after, trail)


def fill_sums(
    label: Label, array: AnyArray, sums: AnyArray, sizes: Sequence[int], run: object
) -> Any:
    """Return sums with the given numbers of slots.

    Args:
        label: Label of the value; None is returned if such values have no sums.
        array: Array of the value.
        sums: Its sums; None for a constant that becomes a state, whose sums are 0.
        sizes: Numbers of slots.
        run: The interpreter.
    """
    if not label.has_sums:
        return None
    if sums is None:
        return jnp.zeros((*sizes, *array.shape), array.dtype)
    return run.slots.resize(sums, sizes)
