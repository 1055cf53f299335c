"""Tables, figures and summary of the circle experiment."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rank_collapse.report import figures
from rank_collapse.report.page import Comparison
from rank_collapse.training.tasks.circle import RADIUS

TOGETHER = 0.01  # two points this near have fallen together: 1/60 of the circle's diameter


def rows(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per case, seed and step."""
    return [
        {
            "case": name, "seed": seed, "diverged": int(case["diverged"][seed]), "step": step,
            "x1": float(x[0, 0]), "y1": float(x[0, 1]), "x2": float(x[1, 0]), "y2": float(x[1, 1]),
            "distance": float(case["distance"][seed, step]),
        }
        for name, case in results.items()
        for seed in range(len(case["trajectory"]))
        for step, x in enumerate(case["trajectory"][seed])
    ]  # fmt: skip


@figures.styled
def draw(results: dict[str, dict[str, Any]]) -> dict[str, Figure]:
    """The trajectories of the first seed that did not diverge, and the distances of all."""
    return {"trajectories": _trajectories(results), "distance": _distances(results)}


def _trajectories(results):
    columns = min(3, len(results))
    fig, axes = figures.figure(-(-len(results) // columns), columns, width=3.0, height=3.0)
    angle = np.linspace(0, 2 * np.pi, 200)
    for ax in axes.flat[len(results) :]:
        ax.remove()
    for ax, (name, case) in zip(axes.flat, results.items(), strict=False):
        ax.plot(RADIUS * np.cos(angle), RADIUS * np.sin(angle), color="lightgray", linewidth=4)
        seed = int(np.argmin(case["diverged"]))
        for walker in range(2):
            path = case["trajectory"][seed, :, walker]
            ax.plot(*path.T, color=figures.color(walker), marker=".", markersize=3, linewidth=0.5,
                    label=f"sequence {walker + 1}")  # fmt: skip
            ax.plot(*path[0], color=figures.color(walker), marker="o", markersize=6)
        ax.set(title=name, xlim=(-0.56, 0.56), ylim=(-0.56, 0.56), xlabel="x", ylabel="y")
        ax.set_aspect("equal")
    axes.flat[0].legend(loc="upper right", fontsize=7)
    return fig


def _distances(results):
    """A panel per width, a line per seed: a median of seeds that fell and seeds that did not is
    the distance of neither."""
    panels = {}
    for name in results:
        variant, width = name.split(", ")
        panels.setdefault(width, []).append((variant, name))
    fig, axes = figures.figure(1, len(panels), width=3.4, height=3.0)
    variants = list(dict.fromkeys(v for cases in panels.values() for v, _ in cases))
    for ax, (width, cases) in zip(axes.flat, panels.items(), strict=True):
        for variant, name in cases:
            case = results[name]
            kept = case["distance"][~case["diverged"].astype(bool)]
            lines = ax.plot(
                np.maximum(kept, 1e-9).T, color=figures.color(variants.index(variant)),
                linewidth=0.8, alpha=0.7,
            )  # fmt: skip
            lines[0].set_label(variant)
        ax.set(title=width, xlabel="step", yscale="log")
    axes.flat[0].set_ylabel("distance of the two sequences")
    axes.flat[0].legend(fontsize=7)
    return fig


def summarise(results: dict[str, dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Per case: distances at the start, and at the end, and the error of one step."""
    out = {}
    for name, case in results.items():
        kept = np.flatnonzero(~case["diverged"].astype(bool))
        distance = case["distance"][kept]
        out[name] = {
            "seeds": len(kept),
            "diverged": np.flatnonzero(case["diverged"]).tolist(),
            "step_error": float(case["error"][kept].mean()),
            "distance_at_start": float(distance[:, 0].mean()),
            "distance_after_10": float(np.median(distance[:, min(10, distance.shape[1] - 1)])),
            "distance_at_end": float(np.median(distance[:, -1])),
            "fell_together": float((distance[:, -1] < TOGETHER).mean()),
            "steps_from_1e-2_to_1e-6": _fall_steps(distance, 1e-2, 1e-6),
        }
    return {"cases": out, "seconds": seconds}


def _fall_steps(distance, high, low):
    """Smallest and largest number of steps between two distances, over the seeds that fell."""
    fallen = distance[(distance < low).any(axis=1)]
    if not fallen.size:
        return None
    steps = np.argmax(fallen < low, axis=1) - np.argmax(fallen < high, axis=1)
    return [int(steps.min()), int(steps.max())]


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Distance at the end of the run, per case, beside the paper's claim."""
    return [
        Comparison(
            f"{name}: distance of the two sequences at the end",
            case["distance_at_end"],
            "falls together" if name.startswith("attention") else "stays apart (or slower)",
            (case["distance_at_end"] < TOGETHER) == name.startswith("attention"),
            f"at the start {case['distance_at_start']:.2g}; step error {case['step_error']:.2g}",
        )
        for name, case in summary["cases"].items()
    ]


def reading(summary: dict[str, Any]) -> str:
    """One sentence against the paper."""
    fallen = [n for n, c in summary["cases"].items() if c["distance_at_end"] < TOGETHER]
    apart = [n for n in summary["cases"] if n not in fallen]
    return (
        f"Fell together: {'; '.join(fallen) or 'none'}. "
        f"Stayed apart: {'; '.join(apart) or 'none'}. "
        f"Steps from a distance of 1e-2 to 1e-6, where seeds fell: without a skip around the "
        f"attention {_range(summary, skip=False)}, with one {_range(summary, skip=True)}. "
        "One step is the cubic rate of the theory."
    )


def _range(summary, skip):
    steps = [
        step
        for name, case in summary["cases"].items()
        if name.startswith("skip") == skip
        for step in case.get("steps_from_1e-2_to_1e-6") or ()
    ]
    return _span(steps) if steps else "none fell"


def show(run: Any) -> None:
    """Prints one line per case."""
    for name, c in run.summary["cases"].items():
        diverged = f", diverged: {c['diverged']}" if c["diverged"] else ""
        print(
            f"{name:18s} {c['seeds']} seed(s): distance {c['distance_at_start']:.3f} -> "
            f"{c['distance_after_10']:.3g} after 10 steps -> {c['distance_at_end']:.3g} at the end;"
            f" fell together: {c['fell_together']:.0%}{_when(c)}; "
            f"error of one step {c['step_error']:.4f}{diverged}"
        )
    print(f"{run.summary['seconds']:.1f} s, written to {run.path}")


def _when(case):
    steps = case.get("steps_from_1e-2_to_1e-6")
    return "" if steps is None else f" (steps from 1e-2 to 1e-6: {_span(steps)})"


def _span(steps):
    low, high = min(steps), max(steps)
    return str(low) if low == high else f"{low} to {high}"
