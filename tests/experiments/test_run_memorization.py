"""Examples of run_memorization."""

import numpy as np

from experiments import run_memorization as memorization


def test_compact_vocabulary_keeps_the_texts():
    tokens = np.array([[7, 100, 7], [0, 3, 100]])
    compact, used = memorization.compact_vocabulary(tokens)
    np.testing.assert_array_equal(used[compact], tokens)
    assert compact.max() == len(used) - 1 == 3
