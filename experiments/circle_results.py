"""Tables, figures and summary of the circle experiment."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rank_collapse import figures
from rank_collapse.report import Comparison
from rank_collapse.tasks.circle import RADIUS

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
    fig, axes = figures.figure(1, 1, width=5.0, height=3.4)
    ax = axes[0, 0]
    for index, (name, case) in enumerate(results.items()):
        values = np.maximum(case["distance"][~case["diverged"].astype(bool)], 1e-9)
        color = figures.color(index)
        middle = np.median(values, axis=0)
        ax.plot(middle, color=color, label=name)
        ax.fill_between(
            np.arange(len(middle)), values.min(axis=0), values.max(axis=0), color=color,
            alpha=0.15, linewidth=0,
        )  # fmt: skip
    ax.set(xlabel="step", ylabel="distance of the two sequences", yscale="log")
    ax.legend(fontsize=7, ncols=2)
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
        }
    return {"cases": out, "seconds": seconds}


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
        "It is the skip around the attention that keeps the sequences apart; an MLP without one "
        "does not, where it falls together above."
    )


def show(run: Any) -> None:
    """Prints one line per case."""
    for name, c in run.summary["cases"].items():
        diverged = f", diverged: {c['diverged']}" if c["diverged"] else ""
        print(
            f"{name:18s} {c['seeds']} seed(s): distance {c['distance_at_start']:.3f} -> "
            f"{c['distance_after_10']:.3g} after 10 steps -> {c['distance_at_end']:.3g} at the end;"
            f" fell together: {c['fell_together']:.0%}; error of one step {c['step_error']:.4f}"
            f"{diverged}"
        )
    print(f"{run.summary['seconds']:.1f} s, written to {run.path}")
