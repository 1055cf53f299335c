"""Claims that can fail: a statistic per seed, its interval, and the verdict that follows from it.

A claim says where its statistic lies: in an open range, beside a null outside of it. The verdict is
read off the 95 % interval: "supported" if all of it is in the range, "contradicted" if none of it
is, "undecided" otherwise and with fewer than `FEWEST_SEEDS` seeds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rank_collapse.report.intervals import mean_interval
from rank_collapse.report.shares import fisher_exact, share_difference, wilson_interval

SUPPORTED, CONTRADICTED, UNDECIDED = VERDICTS = ("supported", "contradicted", "undecided")
FEWEST_SEEDS = 3
ABOVE_ZERO, BELOW_ZERO = (0.0, math.inf), (-math.inf, 0.0)
MOST = (0.5, math.inf)  # of a whole
Range = tuple[float, float]


@dataclass(frozen=True)
class Claim:
    """One test of what a paper says."""

    statement: str  # What it says
    section: str  # Where: a theorem, a section, a figure
    statistic: str  # What was computed of each seed, with its unit
    null: str  # What the statistic would be if the statement did not hold
    claimed: Range  # The open range that the statement puts it in
    seeds: int  # How many independent draws the interval rests on
    estimate: float | None  # The statistic: a mean over seeds, a share, a largest deviation
    interval: Range | None  # 95 % of it; None where there are too few seeds for one
    verdict: str  # One of `VERDICTS`
    why: str = ""  # What the verdict does not say by itself


def verdict_of(interval: Range | None, claimed: Range, seeds: int) -> str:
    """The verdict on an interval: in the open range, outside of it, or neither."""
    if seeds < FEWEST_SEEDS or interval is None:
        return UNDECIDED
    (low, high), (least, most) = interval, claimed
    if least < low and high < most:
        return SUPPORTED
    return CONTRADICTED if high <= least or low >= most else UNDECIDED


def few(seeds: int) -> str:
    """Why so few seeds decide nothing; empty for enough."""
    plural = "" if seeds == 1 else "s"
    return f"{seeds} seed{plural}, fewer than {FEWEST_SEEDS}" if seeds < FEWEST_SEEDS else ""


def test_mean(
    values: Iterable[Any], claimed: Range = ABOVE_ZERO, *, why: str = "", **about: str
) -> Claim:
    """A claim on the mean over seeds of a statistic, or of a paired difference: Student's interval.

    Args:
        values: The statistic of each seed; None or NaN where a seed has none.
        claimed: Open range of the mean that the statement asks for.
        why: Added to what the verdict says.
        **about: statement, section, statistic, null.
    """
    values = list(values)
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    reasons = [few(len(known)), why]
    if len(known) < len(values):
        reasons.append(f"{len(values) - len(known)} of {len(values)} seeds have no number")
    interval = mean_interval(known) if len(known) > 1 else None
    estimate = math.fsum(known) / len(known) if known else None
    return _claim(estimate, interval, claimed, len(known), reasons, about)


def of_interval(
    estimate: float, interval: Range | None, seeds: int, claimed: Range = ABOVE_ZERO,
    *, why: str = "", **about: str,
) -> Claim:  # fmt: skip
    """A claim on a statistic whose interval over seeds is known already.

    Args:
        estimate, interval: The statistic and 95 % of it; None where one seed gives none.
        seeds: How many it rests on.
    """
    return _claim(estimate, interval, claimed, seeds, [few(seeds), why], about)


def of_share(
    count: int, total: int, claimed: Range, *, why: str = "", **about: str
) -> Claim:  # fmt: skip
    """A claim on the share of seeds that do something: Wilson's interval.

    Args:
        count, total: Seeds that do, and all.
        claimed: Open range of the share.
    """
    interval = wilson_interval(count, total) if total else None
    estimate = count / total if total else None
    return _claim(estimate, interval, claimed, total, [few(total), why], about)


def of_shares(
    count: int, total: int, other_count: int, other_total: int, claimed: Range,
    *, why: str = "", **about: str,
) -> Claim:  # fmt: skip
    """A claim on the difference of two shares: Newcombe's interval, Fisher's p beside it.

    Args:
        count, total: One sample.
        other_count, other_total: What it is compared with.
        claimed: Open range of count/total − other_count/other_total.
    """
    counts = (count, total, other_count, other_total)
    seeds, interval, estimate = min(total, other_total), None, None
    reasons = [few(seeds), why]
    if seeds:
        interval = share_difference(*counts)
        estimate = count / total - other_count / other_total
        p = fisher_exact(*counts)
        reasons.append(f"{count} of {total} against {other_count} of {other_total}, p = {p:.2g}")
    return _claim(estimate, interval, claimed, seeds, reasons, about)


def test_never(count: int, total: int, seeds: int, *, why: str = "", **about: str) -> Claim:
    """A claim without exceptions: one case against it contradicts it, whatever the share is.

    The interval is Wilson's of the share of such cases.

    Args:
        count, total: Cases against it, and all.
        seeds: Independent draws that the cases come from.
    """
    reasons = [few(seeds), why, f"{count} of {total} cases against it"]
    if not total:
        reasons = ["its condition held in no case", why]
    interval = wilson_interval(count, total) if total else None
    estimate = count / total if total else None
    verdict = UNDECIDED
    if total and seeds >= FEWEST_SEEDS:
        verdict = CONTRADICTED if count else SUPPORTED
    about = {"null": "one case or more against it"} | about
    return Claim(
        claimed=(0.0, 0.0), seeds=seeds, estimate=estimate, interval=interval, verdict=verdict,
        why=_joined(reasons), **about,
    )  # fmt: skip


def of_curve(
    curve: Any, draws: Any, resolution: float = 0.0, *, why: str = "", **about: str
) -> Claim:
    """A claim that a curve is one more draw of an ensemble of curves, at all its points at once.

    The statistic is how far the curve is from the mean of all, itself among them, at its farthest
    point, in standard deviations there (and in `resolution`, where the curve was read off a
    figure). If it is one more draw, its place among the n draws' own is any of 1 .. n + 1 alike, so
    that p = (number of draws at least as far + 1)/(n + 1): an exact test for all points together.
    The interval is what the draws reach, 0 to the largest of theirs; p below 0.05 contradicts,
    which takes 20 draws. Supported is a curve that also lies within the draws' range everywhere.

    Args:
        curve, draws: The curve [l], and the ensemble [s, l].
        resolution: How well the curve's values are known.

    Source: the studentised envelope test of Myllymäki et al. 2017, "Global envelope tests for
    spatial processes".
    """
    draws, curve = np.asarray(draws, float), np.asarray(curve, float)
    every = np.concatenate([curve[None], draws])
    spread = np.sqrt(every.var(axis=0, ddof=1) + resolution**2) if len(draws) else 0 * curve
    away = np.abs(every - every.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    farthest = away.max(axis=1)
    n = len(draws)
    p = (1 + int((farthest[1:] >= farthest[0]).sum())) / (n + 1)
    outside = np.flatnonzero(
        (curve < draws.min(axis=0, initial=np.inf) - resolution)
        | (curve > draws.max(axis=0, initial=-np.inf) + resolution)
    )
    needed = 1 / (n + 1) < 0.05
    verdict = UNDECIDED if not needed or len(outside) else SUPPORTED
    verdict = CONTRADICTED if needed and p < 0.05 else verdict
    reasons = [
        "" if needed else f"{n} draws: no p below {1 / (n + 1):.2g} is possible",
        f"p = {p:.2g}" if n else "",
        f"outside the draws' range at {', '.join(map(str, outside))}" if n and len(outside) else "",
        why,
    ]
    reach = float(farthest[1:].max()) if n else None
    return Claim(
        claimed=(0.0, reach or 0.0), seeds=n, estimate=float(farthest[0]) if n else None,
        interval=(0.0, reach) if n else None, verdict=verdict, why=_joined(reasons), **about,
    )  # fmt: skip


def counted(claims: Sequence[Claim]) -> dict[str, int]:
    """{verdict: how many claims have it}, all three of them."""
    return {verdict: sum(c.verdict == verdict for c in claims) for verdict in VERDICTS}


def _claim(estimate, interval, claimed, seeds, reasons, about):
    verdict = verdict_of(interval, claimed, seeds)
    return Claim(
        claimed=claimed, seeds=seeds, estimate=estimate, interval=interval, verdict=verdict,
        why=_joined(reasons), **about,
    )  # fmt: skip


def _joined(reasons):
    return "; ".join(reason for reason in reasons if reason)
