"""Values of a traced program with what paths make of them.

The kinds, from a value that passes no path to a value that is refused:

CONSTANT  does not depend on the input
FROZEN    depends on it, and is a constant of the pass: softmax weights, norm statistics, choices
STATE     affine in the input once those are constants; has sums by length
GATE      a function of each entry of a state. It multiplies another value as a constant of the
          pass; as a state, f(h) is f(h)/h times h
FACTOR    may multiply, divide or weigh, and is no state: a maximum, a sum of exponentials
PRODUCT   a product of two states or gates, whose nonlinear functions are FROZEN
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.annotations import AnyArray
from rank_collapse.paths.traced.channels import LazySums, Slots
from rank_collapse.paths.traced.inner_skips import Trail, bend_trail


class Kind(enum.IntEnum):
    """What paths make of a value."""

    CONSTANT = 0
    FROZEN = 1
    STATE = 2
    GATE = 3
    FACTOR = 4
    PRODUCT = 5


_ages = itertools.count()


class Root:
    """A state h. Other values are functions f(h) of it, entry by entry."""

    def __init__(self, compute: Callable[[], AnyArray], sums: LazySums, age: int | None = None):
        self._compute, self.sums = compute, sums
        self.age = next(_ages) if age is None else age
        self._derived = {}

    @functools.cached_property
    def array(self) -> AnyArray:
        """The value h."""
        return self._compute()

    def derive(
        self, key: Hashable, change: Callable, change_sums: Callable, trail: Trail | None = None
    ) -> "Root":
        """Return the state after an operation that moves entries; the same one for the same key.

        Equal operations give one state, so that h and f(h), which are moved apart, are still
        recognised as functions of one state.

        Args:
            key: Identifies the operation.
            change: The operation on an array.
            change_sums: The operation on the sums over paths.
            trail: What the paths went through; None for that of this state.
        """
        if key not in self._derived:
            sums = LazySums(change_sums, [self.sums], trail or self.sums.trail)
            self._derived[key] = Root(lambda: change(self.array), sums, self.age)
        return self._derived[key]


@dataclasses.dataclass(frozen=True)
class Form:
    """A value as a function f of a root h.

    Attributes:
        root: h.
        at_zero: f(0) where it is one known number, else None.
        slope: Computes f′(h).
        quotient: Computes g with g h = f(h), or g h = f(h) − c where a constant c was added; None
            for f(h)/h.
    """

    root: Root
    at_zero: AnyArray | None
    slope: Callable[[], AnyArray]
    quotient: Callable[[], AnyArray] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether f(0) = 0, so that the quotient times h is all of f(h)."""
        return self.at_zero is not None and bool(np.all(self.at_zero == 0))


@dataclasses.dataclass(frozen=True)
class Value:
    """A traced value.

    Attributes:
        array: Value that the function computes.
        kind: Kind of the value, see above.
        sums: Sums by path length, for a state and for a gate without forms; None where no paths
            pass.
        forms: The value as a function of roots, the nearest root first.
        fill: The number that fills a constant; None where it is not known.
        is_weight: Whether transcendental functions made this gate, so that it may weigh the values
            with which it is contracted.
        is_exponential: Whether a gate is an exponential, which cannot be a state.
        is_step: Whether a gate is piecewise constant, and a constant as a state.
        is_shifted: Whether a statistic of the pass was added.
        passes_whole: Whether a gate can be a state unchanged, f(0) = 0.
        reason: Name of the operation that made a factor or a product, for the message.
    """

    array: AnyArray
    kind: Kind = Kind.CONSTANT
    sums: LazySums | None = None
    forms: tuple[Form, ...] = ()
    fill: AnyArray | None = None
    is_weight: bool = False
    is_exponential: bool = False
    is_step: bool = False
    is_shifted: bool = False
    passes_whole: bool = False
    reason: str = ""

    def replace(self, **changes: object) -> "Value":
        """Return the value with other attributes."""
        return dataclasses.replace(self, **changes)

    @property
    def depends(self) -> bool:
        """Whether it is neither a constant nor frozen."""
        return self.kind >= Kind.STATE

    @property
    def trail(self) -> Trail | None:
        """The trail of the paths that pass; None where none do."""
        if self.sums is not None:
            return self.sums.trail
        return bend_trail(self.forms[0].root.sums.trail) if self.forms else None


def make_constant(array: AnyArray) -> Value:
    """Return a constant; if it has one entry, it is kept as a known number, too."""
    is_known = np.size(array) == 1 and not isinstance(array, jax.core.Tracer)
    return Value(array, fill=np.asarray(array).reshape(()) if is_known else None)


def make_frozen(array: AnyArray) -> Value:
    """Return a constant of the pass."""
    return Value(array, Kind.FROZEN)


def make_state(
    array: AnyArray, sums: LazySums, forms: tuple[Form, ...] = (), **flags: object
) -> Value:
    """Return a state: a value that passes paths, affine in the input once all gates are frozen.

    Args:
        array: Its value.
        sums: Its sums over paths, by length.
        forms: The state as a function of earlier states; it is a function of itself before all.
        **flags: Further attributes of `Value`.
    """
    identity_form = Form(
        Root(lambda: array, sums), np.float32(0), *2 * (lambda: jnp.ones_like(array),)
    )
    return Value(array, Kind.STATE, sums, (identity_form, *forms[:3]), **flags)


def make_gate(array: AnyArray, forms: tuple[Form, ...], **flags: object) -> Value:
    """Return a gate: a function f(h) of the entries of a state h.

    Args:
        array: Its value.
        forms: The gate as a function of one or several states, the nearest first.
        **flags: Further attributes of `Value`.
    """
    nearest = forms[0]
    passes_whole = nearest.quotient is not None or nearest.is_exact
    passes_whole &= not flags.get("is_step", False)
    return Value(array, Kind.GATE, None, forms, passes_whole=passes_whole, **flags)


def is_inexact(array: AnyArray) -> bool:
    """Whether an array has real or complex entries, and so can be a state."""
    return jnp.issubdtype(jnp.result_type(array), jnp.inexact)


def compute_quotient(value: Value, form: Form) -> AnyArray:
    """Compute the frozen factor g that makes a gate f(h) of its state h, f(h) = g h.

    Args:
        value: The gate, or another function of h.
        form: The value as a function of h.

    Returns:
        f(h)/h, of the shape of h; where h is 0 it is f′(0), or 0 if f′(0) is infinite. Of f(h) + c
        with a known constant c, the quotient of f(h) alone.
    """
    if form.quotient is not None:
        return form.quotient()
    h = form.root.array
    is_zero = h == 0
    slope = jnp.broadcast_to(jnp.asarray(form.slope(), value.array.dtype), h.shape)
    slope = jnp.where(jnp.isfinite(slope), slope, 0)
    return jnp.where(
        is_zero, slope, value.array / jnp.where(is_zero, 1, h).astype(value.array.dtype)
    )


def resolve_state(value: Value, slots: Slots) -> Value:
    """Return a value in the form in which linear operations and loops take it: never as a gate.

    A gate, a function f(h) of the entries of a state h, becomes a state of its own, with f(h)/h
    times the sums of h. A step function, such as h > 0, becomes a frozen constant. An exponential
    has no f(h)/h that could carry paths (e^0 is not 0): it becomes a factor, which may only weigh
    other values. Other kinds stay as they are.

    Args:
        value: The value.
        slots: The axes of path lengths in front of all sums.
    """
    if value.kind != Kind.GATE:
        return value
    if value.is_step:
        return make_frozen(value.array)
    if value.is_exponential and not value.passes_whole:
        return Value(value.array, Kind.FACTOR, reason=value.reason)
    return make_state(value.array, gate_sums(value, slots), is_shifted=value.is_shifted)


def gate_sums(value: Value, slots: Slots) -> LazySums | None:
    """Compute the sums over paths of a gate f(h) that is used as a state: f(h)/h times the sums of
    the state h.

    A gate may be a function of several states, and `value.forms` has one form for each of them.
    The first form belongs to the nearest state, and this function uses only this form.

    Args:
        value: The gate. If it has sums already, these are returned.
        slots: The axes of path lengths in front of all sums.

    Returns:
        The sums of the gate; None where no paths pass, because the value has neither sums nor
        forms.
    """
    if value.sums is not None or not value.forms:
        return value.sums
    form, lead = value.forms[0], (None,) * slots.num_axes

    def multiply(sums):
        quotient = compute_quotient(value, form)
        return (quotient[lead] * sums).astype(value.array.dtype)

    return LazySums(multiply, [form.root.sums], value.trail)


def merge_kinds(first: Value, second: Value) -> Kind:
    """Return the kind that covers two values of which one is taken: the cases of a condition, or
    the values before and after a step of a loop."""
    low, high = sorted((first.kind, second.kind))
    if {low, high} == {Kind.STATE, Kind.GATE}:
        return Kind.STATE
    if high == Kind.FACTOR and low in (Kind.STATE, Kind.GATE):
        return Kind.PRODUCT
    return Kind(high)
