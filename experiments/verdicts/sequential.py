"""Tests of shares against one half, and their intervals, which hold at any number of draws.

A run may stop at any time, for example when its last row is decided. The evidence against "the
share is at most one half" is an e-process: after n draws, k of which count,

    E_n = 2^(n+1) ∫_½^1 p^k (1 − p)^(n − k) dp,

the likelihood ratio with a uniform mixture of larger shares. At a share of one half or less it
exceeds 1/α at any n in at most α of all runs (Ville's inequality), so p = 1/max_n E_n is a p-value
at any stop. An interval is the set of shares that this test does not reject.

Functions take any leading axes. scipy is imported where it is used: it takes a second, which
`--help` need not.

Sources: Robbins 1970, "Statistical methods related to the law of the iterated logarithm"; Howard,
Ramdas, McAuliffe and Sekhon 2021, "Time-uniform, nonparametric, nonasymptotic confidence
sequences"; Holm 1979. A package with these tests (`confseq`) is compiled against Boost and has had
no release since 2023.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from rank_collapse.report.intervals import LEVEL, Interval, upper_tail

MOST_DRAWS = 10**6  # that `draws_to_decide` looks for


def log_evidence(counts: ArrayLike, totals: ArrayLike) -> np.ndarray:
    """Computes ln E, the evidence that more than half of all draws would count, if k of n draws
    count.

    E is an e-value: if the true share is one half or less, E exceeds 1/error with a probability of
    at most `error`, at all n together. If at most half of the draws count, 0 is returned: no
    evidence.

    Args:
        counts, totals: k and n, arrays that broadcast.
    """
    from scipy import special

    k, n = np.asarray(counts, float), np.asarray(totals, float)
    tail = special.betainc(n - k + 1, k + 1, 0.5)  # P[Beta(k + 1, n − k + 1) > ½]
    with np.errstate(divide="ignore"):
        evidence = (n + 1) * math.log(2) + special.betaln(k + 1, n - k + 1) + np.log(tail)
    return np.where(2 * k > n, evidence, 0.0)


def log_p_values(draws: ArrayLike) -> np.ndarray:
    """Computes ln p of "the share is at most one half" after each draw, which never increases.

    Args:
        draws: Bool [..., n], in the order in which they were made.

    Returns:
        [..., n].
    """
    counts = np.cumsum(np.asarray(draws, bool), axis=-1)
    evidence = log_evidence(counts, np.arange(1, counts.shape[-1] + 1))
    if not counts.shape[-1]:
        return evidence
    return -np.maximum.accumulate(evidence, axis=-1)


def reject_jointly(
    log_p: ArrayLike, error: float, total: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rejects hypotheses by Holm's procedure, whatever the dependence between them.

    Args:
        log_p: ln p of the hypotheses [..., k].
        error: The largest probability of rejecting a hypothesis that is true.
        total: Number of all hypotheses, if some of them have no p yet; k by default.

    Returns:
        Bool [..., k], True for rejected ones; the error at which each was compared [..., k].
    """
    log_p = np.asarray(log_p, float)
    k = log_p.shape[-1]
    order = np.argsort(log_p, axis=-1, kind="stable")  # the smallest p first
    num_hypotheses = max(k, total or 0)
    errors = error / (num_hypotheses - np.arange(k))  # for each place in the order
    is_small = np.take_along_axis(log_p, order, -1) <= np.log(errors)
    is_rejected = np.logical_and.accumulate(is_small, axis=-1)  # none behind one that is not small
    rejected, compared = np.zeros(log_p.shape, bool), np.zeros(log_p.shape)
    np.put_along_axis(rejected, order, is_rejected, -1)
    np.put_along_axis(compared, order, np.broadcast_to(errors, log_p.shape), -1)
    return rejected, compared


def share_interval_at_any_stop(
    count: int, total: int, level: float = LEVEL, *, unknown: int = 0
) -> Interval:
    """Computes the interval of a share that holds at all numbers of draws together.

    The shares p at which B(k + 1, n − k + 1)/(p^k (1 − p)^(n − k)) is below 1/(1 − level).

    Args:
        count, total: k and n.
        level: Share of runs in which the interval contains the true share at every n.
        unknown: Number of further draws that may or may not count: the interval covers both cases.
    """
    from scipy import optimize, special

    upper_tail(level)  # refuses what is no share

    def find_end(k, n, end):
        """Finds where the evidence against a share reaches 1/(1 − level), between k/n and end."""
        if n == 0 or k == end * n:
            return float(end)

        def excess(p):
            """Computes how far the logarithm of the evidence against the share p is above −ln(1 −
            level)."""
            return (
                special.betaln(k + 1, n - k + 1)
                - special.xlogy(k, p)
                - special.xlog1py(n - k, -p)
                + math.log1p(-level)
            )

        outer = abs(end - 1e-12)
        return float(optimize.brentq(excess, k / n, outer)) if excess(outer) > 0 else float(end)

    n = total + unknown
    return Interval(find_end(count, n, 0), find_end(count + unknown, n, 1))


def least_count(total: int, error: float) -> int:
    """Computes how many of `total` draws reject a share of one half; total + 1 if none do."""
    counts = np.arange(total + 1)
    is_enough = log_evidence(counts, total) >= -math.log(error)
    return int(np.argmax(is_enough)) if is_enough.any() else total + 1


def median_interval_at_any_stop(values: Iterable[float], level: float = LEVEL) -> Interval:
    """Computes the interval of a median, two order statistics; (−∞, ∞) for too few draws.

    The interval holds every m such that the draws do not show more than one half above m, or more
    than one half below m. It presumes nothing about the distribution of draws.

    Args:
        values: Values of all draws; a value that is NaN may lie on either side.
        level: See `share_interval_at_any_stop`.
    """
    numbers = np.asarray([*values], float)
    present = np.sort(numbers[~np.isnan(numbers)])
    n, error = len(numbers), 1 - upper_tail(level)
    count = least_count(n, error) if n else 1  # draws on one side that refuse a median
    if count > len(present):
        return Interval()
    low, high = present[len(present) - count], present[count - 1]
    return Interval(float(low), float(high))


def draws_to_decide(share: float, error: float) -> int | None:
    """Computes about how many draws refuse one half, if this share of them continues to count.

    Args:
        share: Share among the draws so far.
        error: See `least_count`.

    Returns:
        None for more than `MOST_DRAWS`, as for a share near one half.
    """
    totals = np.unique(np.geomspace(1, MOST_DRAWS, 400).astype(int))
    is_enough = log_evidence(share * totals, totals) >= -math.log(error)
    return int(totals[np.argmax(is_enough)]) if is_enough.any() else None


def list_rounds(sizes: Sequence[int], most: int) -> list[int]:
    """Lists the numbers of draws after which a run is judged: `sizes`, then doubled, up to `most`.

    Args:
        sizes: Sizes of the first rounds, ascending.
        most: Largest number of draws, that of the last round.
    """
    rounds = [size for size in sizes if size < most]
    while rounds and 2 * rounds[-1] < most and rounds[-1] >= sizes[-1]:
        rounds.append(2 * rounds[-1])
    return [*rounds, most]
