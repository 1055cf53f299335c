"""The rate of a fall, whatever its unit."""

import numpy as np

from experiments.trained import trained_results
from tests.support.closeness import assert_close


def test_rate_is_that_of_a_cubic_fall_whatever_the_unit():
    fall = -0.3 * 3.0 ** np.arange(6)[None]
    assert_close(trained_results.final_rate(fall), 3.0)
    assert_close(trained_results.final_rate(fall + 2.0), 3.0)
    assert_close(trained_results.final_rate(np.log10(0.5) * np.arange(6)[None]), 1.0)
