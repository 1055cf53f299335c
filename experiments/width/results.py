"""Table, summary and printed lines of the width experiment.

`results` holds those of `training.results_of` by case, `summary` what `summary_of` makes of them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.trained.training import Setup, diverged, kept
from experiments.width.cases import num_parameters


def rows_of(results: Mapping[str, Any], cases: Mapping[str, Setup]) -> list[dict[str, Any]]:
    """One row per depth and seed."""
    return [
        shape_of(case) | {"seed": seed, "diverged": int(seed in diverged(results[name]))}
        | {metric: float(v[seed]) for metric, v in results[name]["whole"].items()}
        for name, case in cases.items()
        for seed in range(len(results[name]["losses"]))
    ]  # fmt: skip


def shape_of(case: Setup) -> dict[str, int]:
    """Depth, width and number of parameters of a network."""
    config = case.recipe.config
    parameters = num_parameters(case.recipe)
    return {"depth": config.depth, "hidden_dim": config.d_model, "parameters": parameters}


def summary_of(results: Mapping[str, Any], cases: Mapping[str, Setup]) -> dict[str, Any]:
    """Per depth: the network's shape, its accuracy and its last training loss."""
    out = {}
    for name, case in cases.items():
        found, seeds = results[name], kept(results[name])
        accuracy, losses = found["whole"]["accuracy"][seeds], found["losses"][seeds]
        out[str(case.recipe.config.depth)] = shape_of(case) | {
            "seeds": len(seeds),
            "diverged": list(diverged(found)),
            "accuracy": float(np.mean(accuracy, dtype=float)),
            "accuracy_by_seed": {str(s): float(a) for s, a in zip(seeds, accuracy, strict=True)},
            "accuracy_std": float(np.std(accuracy, dtype=float)),
            "loss": float(losses[:, -1].mean()) if losses.size else None,
        }
    return {"cases": out, "seconds": sum(float(r["seconds"]["all"]) for r in results.values())}


def show(summary: dict[str, Any]) -> None:
    """Prints one line per depth."""
    for case in by_depth(summary):
        apart = f", diverged: {case['diverged']}" if case["diverged"] else ""
        print(
            f"depth {case['depth']:>3d}, width {case['hidden_dim']:4d}: {case['parameters']} "
            f"parameters, {case['seeds']} seed(s), accuracy {case['accuracy']:.3f} ± "
            f"{case['accuracy_std']:.3f}{apart}"
        )
    print(f"{summary['seconds']:.1f} s")


def by_depth(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The summary of each case, shallow first."""
    return sorted(summary["cases"].values(), key=lambda case: case["depth"])
