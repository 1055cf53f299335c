"""Values of loops are taken apart, joined and put together again."""

import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.paths.traced import packing
from rank_collapse.paths.traced.channels import LazySums, Slots
from rank_collapse.paths.traced.inner_skips import start_trail
from rank_collapse.paths.traced.packing import Label, merge_labels
from rank_collapse.paths.traced.values import (
    Kind,
    make_constant,
    make_frozen,
    make_state,
    resolve_state,
)

STATE, SUMS = np.array([1.0, -2.0], np.float32), np.array([[1.0, 0.5], [0.0, -2.5]], np.float32)


def make_run():
    slots = Slots((None,))
    return SimpleNamespace(slots=slots, resolve=lambda value: resolve_state(value, slots))


def make_value():
    return make_state(jnp.asarray(STATE), LazySums(lambda: jnp.asarray(SUMS), trail=start_trail()))


def test_a_value_is_the_same_after_packing():
    values = [make_value(), make_constant(STATE), make_frozen(STATE)]
    packed = packing.pack_values(values, make_run())
    state, constant, frozen = map(packing.unpack, *packed)
    assert [v.kind for v in (state, constant, frozen)] == [Kind.STATE, Kind.CONSTANT, Kind.FROZEN]
    np.testing.assert_array_equal(state.array, STATE)
    np.testing.assert_array_equal(state.sums.array, SUMS)
    assert state.trail == values[0].trail
    assert constant.sums is None and frozen.sums is None


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (Kind.CONSTANT, Kind.STATE, Kind.STATE),
        (Kind.STATE, Kind.GATE, Kind.STATE),
        (Kind.GATE, Kind.GATE, Kind.GATE),
        (Kind.STATE, Kind.FACTOR, Kind.PRODUCT),
        (Kind.CONSTANT, Kind.FACTOR, Kind.FACTOR),
        (Kind.FACTOR, Kind.FROZEN, Kind.FACTOR),
        (Kind.FACTOR, Kind.FACTOR, Kind.FACTOR),
    ],
)
def test_a_label_of_two_values(first, second, kind):
    gate = {"is_weight": True, "passes_whole": True}
    labels = [packing.Label(k, **gate if k == Kind.GATE else {}) for k in (first, second)]
    merged = packing.merge_labels(*labels, None)
    assert merged == packing.Label(kind, **gate if kind == Kind.GATE else {})


def test_sums_are_filled_with_zeros():
    run, label = make_run(), packing.Label(Kind.STATE)
    filled = packing.fill_sums(label, jnp.asarray(STATE), None, (3,), run)
    np.testing.assert_array_equal(filled, np.zeros((3, 2)))
    padded = packing.fill_sums(label, jnp.asarray(STATE), jnp.asarray(SUMS), (3,), run)
    np.testing.assert_array_equal(padded, [*SUMS, [0, 0]])
    assert packing.fill_sums(packing.Label(Kind.FROZEN), STATE, None, (3,), run) is None


def test_a_carry_that_begins_as_a_constant_is_tried_as_a_state():
    merged = packing.merge_carry(packing.Label(Kind.CONSTANT), packing.Label(Kind.PRODUCT), None)
    assert merged == packing.Label(Kind.STATE)
    products = (packing.Label(Kind.PRODUCT, reason=reason) for reason in ("before", "after"))
    assert packing.merge_carry(*products, None).reason == "before"  # the first cause is named


def test_a_state_that_becomes_a_constant_keeps_its_label():
    """Else a loop would be traced again without an end."""
    label = packing.Label(Kind.STATE, trail=start_trail())
    assert packing.merge_carry(label, packing.Label(Kind.CONSTANT), None) == label


def test_what_is_one_of_two_values_is_no_more_than_both():
    """It weighs where both do, and passes whole where one does: it is a state then."""
    for one, other in itertools.product(itertools.product([False, True], repeat=2), repeat=2):
        both = merge_labels(Label(Kind.GATE, *one), Label(Kind.GATE, *other), None)
        assert both == Label(Kind.GATE, one[0] and other[0], one[1] or other[1])
    gate = Label(Kind.GATE, is_weight=True, passes_whole=True)
    for kind, merged in [
        (Kind.CONSTANT, Kind.GATE),
        (Kind.FROZEN, Kind.GATE),
        (Kind.STATE, Kind.STATE),
        (Kind.FACTOR, Kind.PRODUCT),
        (Kind.PRODUCT, Kind.PRODUCT),
    ]:
        other = Label(kind, reason="why")
        for pair in ((gate, other), (other, gate)):
            label = merge_labels(*pair, None)
            assert (label.kind, label.reason) == (merged, "why")
            flags = merged == Kind.GATE
            assert (label.is_weight, label.passes_whole) == (flags, flags)
