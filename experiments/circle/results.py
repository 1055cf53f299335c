"""Table, summary and printed lines of the circle experiment.

`results` holds those of `training.results_of` by case, `summary` what `summary_of` makes of them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.trained.training import diverged, kept

TOGETHER = 0.01  # two points this near have fallen together: 1/60 of the circle's diameter


def rows_of(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per case, seed and step."""
    return [
        {
            "case": name, "seed": seed, "diverged": int(seed in diverged(case)), "step": step,
            "x1": float(x[0, 0]), "y1": float(x[0, 1]), "x2": float(x[1, 0]), "y2": float(x[1, 1]),
            "distance": float(case["distance"][seed, step]),
        }
        for name, case in results.items()
        for seed in range(len(case["trajectory"]))
        for step, x in enumerate(case["trajectory"][seed])
    ]  # fmt: skip


def summary_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Per case: distances at the start, and at the end, and the error of one step."""
    out = {}
    for name, case in results.items():
        seeds = kept(case)
        distance = case["distance"][seeds]
        out[name] = {
            "seeds": len(seeds),
            "diverged": list(diverged(case)),
            "step_error": float(case["error"][seeds].mean()),
            "distance_at_start": float(distance[:, 0].mean()),
            "distance_after_10": float(np.median(distance[:, min(10, distance.shape[1] - 1)])),
            "distance_at_end": float(np.median(distance[:, -1])),
            "fell_together": float((distance[:, -1] < TOGETHER).mean()),
            "steps_from_1e-2_to_1e-6": _fall_steps(distance, 1e-2, 1e-6),
        }
    return {"cases": out, "seconds": sum(float(c["seconds"]["all"]) for c in results.values())}


def _fall_steps(distance, high, low):
    """Smallest and largest number of steps between two distances, over the seeds that fell."""
    fallen = distance[(distance < low).any(axis=1)]
    if not fallen.size:
        return None
    steps = np.argmax(fallen < low, axis=1) - np.argmax(fallen < high, axis=1)
    return [int(steps.min()), int(steps.max())]


def show(summary: dict[str, Any]) -> None:
    """Prints one line per case."""
    for name, c in summary["cases"].items():
        apart = f", diverged: {c['diverged']}" if c["diverged"] else ""
        print(
            f"{name:18s} {c['seeds']} seed(s): distance {c['distance_at_start']:.3f} -> "
            f"{c['distance_after_10']:.3g} after 10 steps -> {c['distance_at_end']:.3g} at the end;"
            f" fell together: {c['fell_together']:.0%}{_when(c)}; "
            f"error of one step {c['step_error']:.4f}{apart}"
        )
    print(f"{summary['seconds']:.1f} s")


def _when(case):
    steps = case.get("steps_from_1e-2_to_1e-6")
    return "" if steps is None else f" (steps from 1e-2 to 1e-6: {span(steps)})"


def span(steps: Sequence[int]) -> str:
    """ "1 to 14", or "1"."""
    low, high = min(steps), max(steps)
    return str(low) if low == high else f"{low} to {high}"
