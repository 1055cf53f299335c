"""Student's intervals against scipy's."""

import math

import pytest
from scipy import stats

from rank_collapse.report.intervals import mean_interval, t_probability, t_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8, 31])
def test_quantiles(freedom):
    for level in (0.5, 0.95, 0.999):
        wanted = stats.t.ppf((1 + level) / 2, freedom)
        assert t_quantile(freedom, level) == pytest.approx(wanted, rel=1e-9)
    assert t_probability(1.3, freedom) == pytest.approx(1 - 2 * stats.t.sf(1.3, freedom))


def test_mean_interval():
    values = [0.3, -0.1, 0.25, 0.9, 0.4]
    wanted = stats.t.interval(0.9, 4, loc=sum(values) / 5, scale=stats.sem(values))
    assert mean_interval(values, 0.9) == pytest.approx(wanted, rel=1e-9)
    assert mean_interval([2.0, 2.0]) == (2.0, 2.0)
    assert mean_interval([2.0]) == mean_interval([]) == (-math.inf, math.inf)
    with pytest.raises(ValueError, match=r"level=95.0 is not between"):
        mean_interval(values, 95.0)
