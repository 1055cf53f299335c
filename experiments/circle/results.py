"""Table, summary and printed lines of the circle experiment.

`results` holds those of `training.results_of` by case, `summary` what `summary_of` makes of them.
"""

from typing import Any

import numpy as np

from experiments.circle import published
from experiments.circle.cases import parts_of
from experiments.trained.training import diverged, kept
from rank_collapse.report.shares import fisher_exact, wilson_interval
from rank_collapse.theory import recurrence

TOGETHER = 0.01  # two points this near have fallen together: 1/60 of the circle's diameter
HIGH, LOW = 1e-2, 1e-6  # distances between which the steps of a fall are counted
AT_REST = 1e-5  # equal points that move less in a step are at a fixed point


def measures_of(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """What theory and measurement say of each seed of a case, arrays [s] (gaps [s, l, h]).

    "multiplier" is μ where equal points are at last; it predicts steps only where they are at rest.
    """
    distance, gaps = case["distance"], case["head_gap"]
    multiplier = recurrence.spectral_radius(case["jacobian_across"])
    at_rest = case["equal_points_moved"] < AT_REST
    predicted = recurrence.predicted_steps(multiplier, HIGH, LOW)
    fell = distance[:, -1] < TOGETHER

    def opposite(gap):
        return ((gap.min(axis=-1) < 0) & (gap.max(axis=-1) > 0)).any(axis=-1)

    return {
        "fell": fell,
        "measured_steps": recurrence.measured_steps(distance, HIGH, LOW),
        "predicted_steps": np.where(at_rest, predicted, np.nan),
        "multiplier": multiplier,
        "at_rest": at_rest,
        "radius_at_end": recurrence.spectral_radius(case["jacobian_at_end"]),
        "order": recurrence.fall_order(case["log10_distance"]),
        "opposite_at_start": opposite(gaps[:, 0]),
        "opposite_at_end": opposite(gaps[:, -1]),
        "gap_at_start": gaps[:, 0],
        "gap_at_end": gaps[:, -1],
    }


def rows_of(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per case and seed; where the walkers went step by step is in arrays.npz."""
    rows = []
    for name, case in results.items():
        found = measures_of(case)
        variant, width = parts_of(name)
        for seed, distance in enumerate(case["distance"]):
            row = {
                "case": name, "variant": variant, "width": width, "seed": seed,
                "diverged": int(seed in diverged(case)), "step_error": float(case["error"][seed]),
                "distance_at_start": float(distance[0]), "distance_at_end": float(distance[-1]),
                "first_below_1e-2": _first(distance, HIGH),
                "first_below_1e-6": _first(distance, LOW),
            }  # fmt: skip
            for key, values in found.items():
                if not key.startswith("gap"):
                    row[key] = values[seed].item()
            for when in ("start", "end"):
                for (layer, head), gap in np.ndenumerate(found[f"gap_at_{when}"][seed]):
                    row[f"tau_{when}_l{layer}_h{head}"] = float(gap)
            rows.append({key: _cell(value) for key, value in row.items()})
    return rows


def _cell(value):
    if isinstance(value, bool):
        return int(value)
    return None if isinstance(value, float) and np.isnan(value) else value


def _first(distance, bound):
    below = np.flatnonzero(distance < bound)
    return int(below[0]) if below.size else None


def summary_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Per case: how many seeds fell, beside the published code's count, and how they fell."""
    out = {}
    for name, case in results.items():
        seeds = kept(case)
        found = {key: values[seeds] for key, values in measures_of(case).items()}
        distance, fell = case["distance"][seeds], found["fell"]
        steps = np.stack([found["measured_steps"], found["predicted_steps"]], axis=1)[fell]
        out[name] = {
            "seeds": len(seeds),
            "diverged": list(diverged(case)),
            "step_error": float(case["error"][seeds].mean()),
            "distance_at_start": float(distance[:, 0].mean()),
            "distance_at_end": float(np.median(distance[:, -1])),
            "fell": int(fell.sum()),
            "interval": list(wilson_interval(int(fell.sum()), len(seeds))),
            "attracting": int((found["at_rest"] & (found["multiplier"] < 1)).sum()),
            "at_rest": int(found["at_rest"].sum()),
            "steps": steps[np.isfinite(steps).all(axis=1)].tolist(),  # measured, predicted
            "orders": found["order"][fell & np.isfinite(found["order"])].tolist(),
            "radius_at_end": np.quantile(found["radius_at_end"], [0, 0.5, 1]).tolist(),
            "opposite_at_start": _table(found["opposite_at_start"], fell),
            # Equal tokens have τ = 0: at the end it says something of those apart alone.
            "opposite_at_end_apart": int((found["opposite_at_end"] & ~fell).sum()),
        }
        count = published.FELL.get(parts_of(name))
        if count is not None:
            p = fisher_exact(int(fell.sum()), len(seeds), count, published.SEEDS)
            out[name]["published"] = {"fell": count, "seeds": published.SEEDS, "p": p}
    return {"cases": out, "seconds": sum(float(c["seconds"]["all"]) for c in results.values())}


def _table(opposite, fell):
    """[fell, seeds] where heads' τ have opposite signs, and where all have the same."""
    return {
        "opposite": [int((opposite & fell).sum()), int(opposite.sum())],
        "alike": [int((~opposite & fell).sum()), int((~opposite).sum())],
    }


def show(summary: dict[str, Any]) -> None:
    """Prints a line or two per case."""
    for name, c in summary["cases"].items():
        low, high = c["interval"]
        apart = f", diverged: {c['diverged']}" if c["diverged"] else ""
        print(
            f"{name:22s} {c['fell']} of {c['seeds']} seed(s) fell together "
            f"({low:.2f} to {high:.2f}){_published(c)}; where equal points rest, they attract in "
            f"{c['attracting']} of {c['at_rest']}; error of one step {c['step_error']:.4f}{apart}"
        )
        if c["steps"] or c["orders"]:
            print(f"{'':22s} {law_text(c)}")
    print(f"{summary['seconds']:.1f} s")


def _published(case):
    if "published" not in case:
        return ""
    theirs = case["published"]
    return f", published code {theirs['fell']} of {theirs['seeds']} (p = {theirs['p']:.2g})"


def law_text(case: dict[str, Any]) -> str:
    """How the seeds of a case fell: steps measured and predicted, and the law's order."""
    parts = []
    if case["steps"]:
        measured, predicted = np.array(case["steps"]).T
        parts.append(
            f"steps from 1e-2 to 1e-6 {_span(measured, 'g')} (predicted {_span(predicted, '.1f')}, "
            f"median error {np.median(np.abs(measured - predicted)):.2g})"
        )
    if case["orders"]:
        parts.append(f"order {_span(case['orders'], '.4f')}")
    return ", ".join(parts)


def _span(values, form):
    """ "1 to 14", or "1"."""
    low, high = (format(f(values), form) for f in (np.min, np.max))
    return low if low == high else f"{low} to {high}"
