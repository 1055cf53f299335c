"""What check_bounds makes of its draws: counts of violations, and the ranges of γ* and tightness.

`draws` is {case: {measure: [draws, ...]}}, as `measure.draw_case` gives it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.bounds.measure import FREE, Case

Draws = dict[Case, dict[str, np.ndarray]]
ROUNDING = 1e-13  # decimal logarithms in float64: two tokens of width 1 meet the diameter's bound
WHAT = ("head", "published_layer", "published_stack")  # each has "{what}_ok" and "{what}_tightness"


def pooled(draws: Draws) -> dict[str, np.ndarray]:
    """Every measure of all shapes, flat."""
    names = next(iter(draws.values()))
    return {n: np.concatenate([found[n].reshape(-1) for found in draws.values()]) for n in names}


def given(flat: dict[str, np.ndarray], what: str) -> np.ndarray:
    """Tightness of one of `FREE` wherever the bound was not refused."""
    values = flat[f"{what}_tightness"]
    return values[~np.isnan(values)]


def held(flat: dict[str, np.ndarray], what: str) -> np.ndarray:
    """Tightness of one of `WHAT` where the lemma's condition holds."""
    return flat[f"{what}_tightness"][flat[f"{what}_ok"]]


def counts(flat: dict[str, np.ndarray]) -> dict[str, float]:
    """Violations and ranges; a range is None where the condition held nowhere."""
    ok = flat["head_ok"]
    found = {
        "draws": int(flat["published_stack_ok"].size),
        "heads": int(ok.size),
        "admissible": int(ok.sum()),
        "lemma_violations": int((flat["lemma_excess"][ok] > 0).sum()),
        "lemma_violations_elsewhere": int((flat["lemma_excess"][~ok] > 0).sum()),
    } | {f"{what}_violations": int((held(flat, what) < 0).sum()) for what in WHAT}
    for what in WHAT[1:]:
        found[f"{what}s_admissible"] = int(flat[f"{what}_ok"].sum())
    for what in FREE:
        found[f"{what}s"] = int(given(flat, what).size)
        found[f"{what}_violations"] = int((given(flat, what) < -ROUNDING).sum())
        found[f"{what}s_refused"] = int(np.isnan(flat[f"{what}_tightness"]).sum())
    ranges = {"gamma": flat["gamma"][ok], "tightness": held(flat, "head")}
    ranges["published_layer_tightness"] = held(flat, "published_layer")
    ranges |= {f"{what}_tightness": given(flat, what) for what in FREE}
    # side by side: where the paper's condition holds, and elsewhere
    for name, chosen in (("admissible", flat["head_ok"]), ("elsewhere", ~flat["head_ok"])):
        for what in ("head", "mean_head"):
            both = chosen & ~np.isnan(flat["mean_head_tightness"])
            values = flat[f"{what}_tightness"][both]
            found[f"{what}_tightness_median_{name}"] = _or_none(np.median, values)
    for name, values in ranges.items():
        for end, least in (("min", np.min), ("max", np.max)):
            found[f"{name}_{end}"] = _or_none(least, values)
    return found


def rows_of(draws: Draws) -> Iterator[dict[str, Any]]:
    """The counts of each shape."""
    for case, found in draws.items():
        shape = case._asdict()
        shape["heads_each"] = shape.pop("heads")  # "heads" counts those of all draws
        yield shape | counts({name: values.reshape(-1) for name, values in found.items()})


def summary_of(
    draws: Draws, sizes: Sequence[int], built: dict[str, np.ndarray], climbed: dict[str, np.ndarray]
) -> dict[str, Any]:
    """The counts of all shapes together, the construction's, and what ascent reached.

    Args:
        draws: Of the random networks.
        sizes: n = d of the construction, with `built` from `construction.measure`.
        built: See there.
        climbed: From `ascent.climb`.
    """
    admissible = np.asarray(built["admissible"], bool)
    over = built["least_over_published"]
    against = [n for n, r, a in zip(sizes, over, admissible, strict=True) if a and r > 1]
    found = counts(pooled(draws)) | {
        "constructions": int(admissible.sum()),
        "constructions_against_published": len(against),
        "constructions_against_bound": int((built["mean_over_bound"] > 1).sum()),
        "smallest_against_published": min(against, default=None),
        "largest_over_published": float(over[admissible].max(initial=0)),
    }
    return found | {f"ascent_least_{name}": float(least.min()) for name, least in climbed.items()}


def _or_none(statistic, values):
    return float(statistic(values)) if values.size else None
