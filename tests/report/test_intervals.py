"""Student's intervals against the published table of quantiles."""

import math

import pytest

from rank_collapse.report.intervals import mean_interval

# Fisher and Yates 1963, table III: t with P(|T| > t) = 1 − level
QUANTILES = {
    (1, 0.95): 12.706, (2, 0.95): 4.303, (4, 0.9): 2.132, (4, 0.95): 2.776, (7, 0.95): 2.365,
    (7, 0.999): 5.408, (30, 0.95): 2.042,
}  # fmt: skip


@pytest.mark.parametrize("freedom, level", QUANTILES)
def test_mean_interval(freedom, level):
    n = freedom + 1
    values = [0.3 + (i - freedom / 2) for i in range(n)]
    deviation = math.sqrt(sum((v - 0.3) ** 2 for v in values) / freedom)
    half = QUANTILES[freedom, level] * deviation / math.sqrt(n)
    assert mean_interval(values, level) == pytest.approx((0.3 - half, 0.3 + half), rel=3e-4)


def test_edges():
    assert mean_interval([2.0, 2.0]) == (2.0, 2.0)
    assert mean_interval([2.0]) == mean_interval([]) == (-math.inf, math.inf)
    with pytest.raises(ValueError, match=r"level=95.0 is not between"):
        mean_interval([0.0, 1.0], 95.0)
