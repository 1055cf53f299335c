"""Intervals and Fisher's test against scipy's."""

import pytest
from scipy import stats

from rank_collapse.report.shares import fisher_exact, wilson_interval


@pytest.mark.parametrize("count, total", [(0, 8), (1, 8), (8, 8), (13, 64), (1, 1)])
def test_wilson_interval(count, total):
    wanted = tuple(stats.binomtest(count, total).proportion_ci(0.95, method="wilson"))
    assert wilson_interval(count, total, stats.norm.ppf(0.975)) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    "counts", [(1, 8, 13, 64), (0, 8, 30, 64), (3, 8, 3, 8), (8, 8, 0, 8), (0, 8, 0, 64)]
)
def test_fisher_exact(counts):
    k, n, k2, n2 = counts
    wanted = stats.fisher_exact([[k, n - k], [k2, n2 - k2]]).pvalue
    assert fisher_exact(*counts) == pytest.approx(wanted, rel=1e-10)


def test_counts_that_are_no_shares():
    with pytest.raises(ValueError, match="count=3 of total=2"):
        wilson_interval(3, 2)
    with pytest.raises(ValueError, match="total=0"):
        wilson_interval(0, 0)
    with pytest.raises(ValueError, match="count=-1 of total=4"):
        fisher_exact(1, 4, -1, 4)
