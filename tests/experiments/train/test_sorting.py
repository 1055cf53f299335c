"""Examples of the sorting task, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.train import sorting
from tests.support.on_host import on_host
from tests.support.refusals import is_refused


def test_sorted_labels_and_repeats():
    data = on_host(sorting.make_examples)(jax.random.key(0), 200, 8, 10)
    np.testing.assert_array_equal(data.labels, np.sort(data.inputs, axis=1))
    counts = np.bincount(np.asarray(data.inputs).ravel(), minlength=10)
    assert len(counts) == 10 and np.abs(counts - 160).max() < 5 * np.sqrt(160)
    assert any(len(set(row)) < 8 for row in data.inputs.tolist())
    distinct = on_host(sorting.make_examples)(jax.random.key(0), 50, 8, 10, repeats=False)
    assert all(len(set(row)) == 8 for row in distinct.inputs.tolist())
    whole = on_host(sorting.make_examples)(jax.random.key(0), 3, 10, 10, repeats=False)
    np.testing.assert_array_equal(whole.labels, [range(10)] * 3)
    is_refused("seq_len=11", sorting.make_examples, jax.random.key(0), 5, 11, 10, repeats=False)


def test_misordered_pairs_counts_by_hand():
    predicted = jnp.asarray([[1, 2, 3], [3, 2, 1], [1, 1, 0]])
    assert float(sorting.misordered_pairs(predicted)) == pytest.approx((0 + 3 + 2) / 3)
    assert float(sorting.misordered_pairs(predicted, repeats=False)) == pytest.approx(6 / 3)
