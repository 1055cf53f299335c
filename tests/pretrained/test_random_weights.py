"""Random weights: rows of a table that is drawn in part."""

import jax
import numpy as np

from rank_collapse.pretrained.random_weights import Draw, RandomWeights


def test_rows_of_a_truncated_table_are_those_of_the_whole_one():
    weights = RandomWeights(jax.random.key(0), lambda _: Draw(1.0, truncate=True), lazy=True)
    expected = weights.take("table", 50, 8)
    assert np.abs(expected).max() < 2
    np.testing.assert_array_equal(weights.table("table", 50, 8).rows([2, 9]), expected[[2, 9]])
