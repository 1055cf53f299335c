"""Wilson's intervals by their formula, Fisher's test by counting tables."""

import math

import pytest

from rank_collapse.report.shares import fisher_exact, wilson_interval

Z = {0.95: 1.959963984540054, 0.99: 2.5758293035489004}


@pytest.mark.parametrize("count, total", [(0, 8), (1, 8), (8, 8), (13, 64), (1, 1)])
@pytest.mark.parametrize("level", Z)
def test_wilson_interval(count, total, level):
    z = Z[level]
    half = z * math.sqrt(count * (total - count) / total + z**2 / 4)
    wanted = [(count + z**2 / 2 + s * half) / (total + z**2) for s in (-1, 1)]
    assert wilson_interval(count, total, level) == pytest.approx(wanted, abs=1e-12)
    if level == 0.95:
        assert wilson_interval(count, total) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    "counts",
    [(1, 8, 13, 64), (0, 8, 30, 64), (3, 8, 3, 8), (8, 8, 0, 8), (0, 8, 0, 64), (0, 0, 3, 4)],
)
def test_fisher_exact(counts):
    """Of all tables with these sums, the share of those that are no more likely."""
    k, n, k2, n2 = counts
    hits = k + k2
    ways = {
        i: math.comb(n, i) * math.comb(n2, hits - i)
        for i in range(max(0, hits - n2), min(n, hits) + 1)
    }
    wanted = sum(w for w in ways.values() if w <= ways[k]) / sum(ways.values())
    assert fisher_exact(*counts) == pytest.approx(wanted, rel=1e-10)


def test_counts_that_are_no_shares():
    with pytest.raises(ValueError, match="count=3 of total=2"):
        wilson_interval(3, 2)
    with pytest.raises(ValueError, match="total=0"):
        wilson_interval(0, 0)
    with pytest.raises(ValueError, match="count=-1 of total=4"):
        fisher_exact(1, 4, -1, 4)
