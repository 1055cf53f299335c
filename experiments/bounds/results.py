"""What check_bounds makes of its draws: counts of violations, and the ranges of γ* and tightness.

`draws` is {case: {measure: [draws, ...]}}, as `measure.draw_case` gives it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.bounds.measure import FREE, Case

Draws = dict[Case, dict[str, np.ndarray]]
ROUNDING = 1e-13  # decimal logarithms in float64: two tokens of width 1 meet the diameter's bound
WHAT = ("head", "layer", "stack")  # each has "{what}_ok" and "{what}_tightness"


def pooled(draws: Draws) -> dict[str, np.ndarray]:
    """Every measure of all shapes, flat."""
    names = next(iter(draws.values()))
    return {n: np.concatenate([found[n].reshape(-1) for found in draws.values()]) for n in names}


def given(flat: dict[str, np.ndarray], what: str) -> np.ndarray:
    """Tightness of one of `FREE` wherever the bound was not refused."""
    values = flat[f"{what}_tightness"]
    return values[~np.isnan(values)]


def held(flat: dict[str, np.ndarray], what: str) -> np.ndarray:
    """Tightness of heads, layers or stacks where the lemma's condition holds."""
    return flat[f"{what}_tightness"][flat[f"{what}_ok"]]


def counts(flat: dict[str, np.ndarray]) -> dict[str, float]:
    """Violations and ranges; a range is None where the condition held nowhere."""
    ok = flat["head_ok"]
    found = {
        "draws": int(flat["stack_ok"].size),
        "heads": int(ok.size),
        "admissible": int(ok.sum()),
        "lemma_violations": int((flat["lemma_excess"][ok] > 0).sum()),
        "lemma_violations_elsewhere": int((flat["lemma_excess"][~ok] > 0).sum()),
        "head_violations": int((held(flat, "head") < 0).sum()),
        "layers_admissible": int(flat["layer_ok"].sum()),
        "layer_violations": int((held(flat, "layer") < 0).sum()),
        "stacks_admissible": int(flat["stack_ok"].sum()),
        "stack_violations": int((held(flat, "stack") < 0).sum()),
    }
    for what in FREE:
        found[f"{what}s"] = int(given(flat, what).size)
        found[f"{what}_violations"] = int((given(flat, what) < -ROUNDING).sum())
        found[f"{what}s_refused"] = int(np.isnan(flat[f"{what}_tightness"]).sum())
    ranges = {"gamma": flat["gamma"][ok], "tightness": held(flat, "head")}
    ranges["layer_tightness"] = held(flat, "layer")
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


def summary_of(draws: Draws) -> dict[str, float]:
    """The counts of all shapes together."""
    return counts(pooled(draws))


def _or_none(statistic, values):
    return float(statistic(values)) if values.size else None
