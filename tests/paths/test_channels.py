"""Channels of paths, of which some are absent."""

import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.paths.channels import Channels, pad_slots


@pytest.mark.full
def test_channels_pass_a_function_where_they_exist():
    rng = np.random.default_rng(0)
    start, memory = (jnp.asarray(a) for a in rng.standard_normal((2, 3, 2, 4, 5)))
    offset = jnp.asarray(rng.standard_normal((4, 5)))

    def fn(c, ones):  # a constant for the offset alone
        return 2 * c + ones[:, None, None]

    channels = Channels(start, memory, offset)
    passed = channels.apply_to_all(fn)
    np.testing.assert_array_equal(passed.start, 2 * start)
    np.testing.assert_array_equal(passed.memory, 2 * memory)
    np.testing.assert_array_equal(passed.offset, 2 * offset + 1)
    fewer = channels.apply_to_all(fn, num_lengths=-1, num_counts=1)
    np.testing.assert_array_equal(fewer.memory, 2 * memory[:2, :1])
    # lengths that do not exist are not passed, and without biases neither is the offset
    live = jnp.array([True, False, True])
    for biased in (True, False):
        some = channels.replace(live=live, biased=biased).apply_to_all(fn)
        for ours, group in ((some.start, start), (some.memory, memory)):
            np.testing.assert_array_equal(ours, 2 * group * live[:, None, None, None])
        np.testing.assert_array_equal(some.offset, 2 * offset + 1 if biased else offset)
    for axis, lengths in ((0, [True, True, False]), (1, [True, False, False])):
        shifted = channels.replace(live=jnp.array([True, False, False])).shift(axis)
        np.testing.assert_array_equal(shifted.live, lengths)  # of attention, one more exists
        widths = [(int(i == axis), 0) for i in range(4)]
        np.testing.assert_array_equal(shifted.start, np.pad(start, widths))
        np.testing.assert_array_equal(shifted.memory, np.pad(memory, widths))
    padded = pad_slots(start, (6, 4), (1, 2))
    np.testing.assert_array_equal(padded, np.pad(start, [(1, 2), (2, 0), (0, 0), (0, 0)]))
    assert pad_slots(None, (6, 4)) is None
