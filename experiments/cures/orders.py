"""Whether what a cure measures at initialisation orders cures as their training does.

Designs and variants are apart: pooled, a rank correlation tells that one kind trains and the other
does not. The accuracy of the deepest trained networks is ordered by the residual kept and by the
effective rank of the nearest depth. Which of the two orders it better is the difference of their
rank correlations over the same cures, with a bootstrap interval; cures that are one network at
initialisation are drawn together.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rank_collapse.report.statistics import order_of

RESAMPLES = 1000
FEWEST = 4  # networks of a kind


def within_kinds(results: Mapping[str, Any], setup: Any) -> dict[str, dict[str, Any]]:
    """{kind: {"residual", "rank", "difference", "cures", "networks"}} of designs and of variants,
    of those with enough networks whose output has a rank: rank correlations with the accuracy, what
    that of the rank is above that of the residual with its interval, and counts.

    Args:
        results, setup: Of run_cures.
    """
    deepest = max((case.depth for case in setup.trained.values()), default=0)
    by_distance = sorted(setup.cases.items(), key=lambda own: -abs(own[1].depth - deepest))
    nearest = {(case.kind, case.name): results["cases"][name] for name, case in by_distance}
    rows: dict[str, list[Any]] = {}
    for name, case in setup.trained.items():
        start, accuracy = nearest[case.kind, case.name], results["trained"][name]["accuracy"]
        row = [values.mean() for values in (start["log10_residual"], start["rank"], accuracy)]
        if case.depth == deepest and np.isfinite(row).all():
            rows.setdefault(case.kind, []).append(row)
    found = {kind: _order(np.array(own)) for kind, own in rows.items()}
    return {kind: order for kind, order in found.items() if order}


def _order(rows):
    """Of rows (residual, rank, accuracy); none where they are of too few networks, or constant."""
    from scipy import stats

    networks, of_row = np.unique(rows[:, :2], axis=0, return_inverse=True)
    residual, rank = _correlations(rows)
    if len(networks) < FEWEST or not np.isfinite(rank - residual):
        return None

    def difference(chosen):
        residual, rank = _correlations(np.concatenate([rows[of_row == i] for i in chosen]))
        return rank - residual

    how = {"vectorized": False, "method": "percentile", "n_resamples": RESAMPLES, "rng": 0}
    drawn = stats.bootstrap((np.arange(len(networks)),), difference, **how).bootstrap_distribution
    ends = np.nanquantile(drawn, [0.025, 0.975])  # NaN where all drawn are one network
    about = {"residual": residual, "rank": rank, "difference": [rank - residual, *ends]}
    return about | {"cures": len(rows), "networks": len(networks)}


def _correlations(rows):
    """[2], rank correlations of residual and rank with the accuracy; NaN where one is constant."""
    return np.array([order_of(rows[:, place], rows[:, 2]) for place in (0, 1)], float)
