"""What check_bounds makes of its draws: counts of violations, and the ranges of γ* and tightness.

`draws` is {(tokens, width, heads): {measure: [draws, ...]}}, as `measure.draw_shape` gives it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

Draws = dict[tuple[int, int, int], dict[str, np.ndarray]]
WHAT = ("head", "layer", "stack")  # each has "{what}_ok" and "{what}_tightness"


def pooled(draws: Draws) -> dict[str, np.ndarray]:
    """Every measure of all shapes, flat."""
    names = next(iter(draws.values()))
    return {n: np.concatenate([found[n].reshape(-1) for found in draws.values()]) for n in names}


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
    ranges = {"gamma": flat["gamma"][ok], "tightness": held(flat, "head")}
    ranges["layer_tightness"] = held(flat, "layer")
    for name, values in ranges.items():
        for end, least in (("min", np.min), ("max", np.max)):
            found[f"{name}_{end}"] = float(least(values)) if values.size else None
    return found


def rows_of(draws: Draws) -> Iterator[dict[str, Any]]:
    """The counts of each shape."""
    for (tokens, width, heads), found in draws.items():
        shape = {"tokens": tokens, "width": width, "num_heads": heads}
        yield shape | counts({name: values.reshape(-1) for name, values in found.items()})


def summary_of(draws: Draws) -> dict[str, float]:
    """The counts of all shapes together."""
    return counts(pooled(draws))
