"""Masks, relative buckets and rotary frequencies."""

import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.network import positions
from tests.support.closeness import assert_close


def test_masks():
    np.testing.assert_array_equal(positions.causal_mask(4), np.tril(np.ones((4, 4), bool)))
    local = np.asarray(positions.local_mask(5, 1))
    assert local.sum() == 13 and local[0, 1] and not local[0, 2]
    per_head = jnp.ones((3, 4, 4), bool)
    joined = positions.combine_masks(
        positions.causal_mask(4), None, jnp.array([True, True, False, True])
    )
    np.testing.assert_array_equal(joined, np.tril(np.ones((4, 4), bool)) & [1, 1, 0, 1])
    causal, padding = np.tril(np.ones((4, 4), bool)), np.array([True, True, False, True])
    for masks in ((per_head, causal, padding), (padding, causal, per_head)):
        joined = positions.combine_masks(*map(jnp.asarray, masks))
        np.testing.assert_array_equal(joined, np.tile(causal & padding, (3, 1, 1)))
    assert positions.combine_masks(jnp.asarray(padding)).tolist() == [padding.tolist()]
    assert positions.combine_masks(None, None) is None


def compute_published_bucket(distance, num_buckets, max_distance, bidirectional):
    """Computes T5's bucket of one distance, key minus query: half exact, half logarithmic."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket = num_buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return bucket + distance
    steps = np.log(distance / exact) / np.log(max_distance / exact) * (num_buckets - exact)
    return bucket + min(exact + int(steps), num_buckets - 1)


@pytest.mark.parametrize("num_buckets", [32, 31])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets(bidirectional, num_buckets):
    buckets = np.asarray(positions.relative_buckets(70, 90, num_buckets, 61, bidirectional))
    for i in range(0, 70, 3):
        for j in range(0, 90, 3):
            expected = compute_published_bucket(j - i, num_buckets, 61, bidirectional)
            assert buckets[i, j] == expected


def test_llama_3_keeps_fast_waves_and_divides_slow_ones(x64):
    """Over 64 positions 1 turns ten times, 0.1 once, 0.01 a tenth: 0.1 is between the limits."""
    _, sines = positions.rotary_angles(jnp.array([1]), 6, 1000.0, (8.0, 0.5, 2.0, 64.0))
    turns = 64 * 0.1 / (2 * np.pi)
    share = (turns - 0.5) / (2 - 0.5)
    expected = np.sin([1.0, 0.1 * (share + (1 - share) / 8), 0.01 / 8])
    assert_close(sines[0, :3], expected, rtol=1e-12)


def test_rotary_frequencies():
    index = jnp.arange(7)
    plain = positions.rotary_angles(index, 6, 50.0)
    same = positions.rotary_angles(index, 6, 50.0, (4.0, 8.0))  # dynamic: 7 of 8 tokens
    np.testing.assert_array_equal(plain, same)
    dynamic_angles = positions.rotary_angles(index, 6, 50.0, (4.0, 5.0))
    base = 50.0 * (4 * 7 / 5 - 3) ** (6 / 4)
    np.testing.assert_allclose(dynamic_angles, positions.rotary_angles(index, 6, base), rtol=1e-5)
    tables = ((6, (3.0, 2.0, 1.0)), (7, (0.3, 0.2, 0.1)), (9, (0.0, 0.0, 0.0)))
    cos, _ = positions.rotary_angles(index, 6, tables=tables)
    np.testing.assert_allclose(cos[3, :3], np.cos([0.9, 0.6, 0.3]), rtol=1e-6)
    longer, _ = positions.rotary_angles(jnp.arange(12), 6, tables=tables)
    np.testing.assert_array_equal(longer, 1.0)
    for scaling in ((4.0,), (4.0, 5.0)):  # tables take their place
        both = positions.rotary_angles(index, 6, 50.0, scaling, tables)[0]
        np.testing.assert_array_equal(both, cos)
    slower, sines = positions.rotary_angles(2 * index, 6, 50.0, (2.0,))  # half the frequencies
    np.testing.assert_allclose(slower, plain[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sines[1], np.sin(np.tile(50.0 ** -(np.arange(3) / 3), 2)), rtol=1e-5)
    default = positions.rotary_angles(index, 4)[1][1]
    np.testing.assert_allclose(default, np.sin([1, 0.01, 1, 0.01]), rtol=1e-5)
