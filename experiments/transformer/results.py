"""Table, summary and printed lines of run_transformer."""

from typing import Any

import numpy as np
from absl import flags

from experiments.trained.training import diverged, kept


def rows_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per seed."""
    apart = diverged(results)
    return [
        {"seed": seed, "diverged": int(seed in apart), "exact": float(results["exact"][seed])}
        | {name: float(values[seed]) for name, values in results["whole"].items()}
        | {
            f"residual_{half}": float(values[seed, -1])
            for half, values in results["residual"].items()
        }
        for seed in range(len(results["losses"]))
    ]


def summary_of(results: dict[str, Any], options: flags.FlagValues) -> dict[str, Any]:
    """The headline numbers: means and standard deviations over seeds."""
    seeds = kept(results)

    def moments(values):
        values = np.asarray(values[seeds], float)
        return {"mean": values.mean(axis=0).tolist(), "std": values.std(axis=0).tolist()}

    return {
        "task": options.task,
        "seeds": len(seeds),
        "diverged": diverged(results),
        "exact": moments(results["exact"]),
        "whole": {name: moments(values) for name, values in results["whole"].items()},
        "curves": {name: moments(values) for name, values in results["curves"].items()},
        "residual": {half: moments(values) for half, values in results["residual"].items()},
        "final_loss": moments(results["losses"][:, -1]) if results["losses"].size else None,
        "seconds": results["seconds"],
    }


def show(title: str, summary: dict[str, Any]) -> None:
    """Prints the summary."""
    apart = f"; kept apart as diverged: {list(summary['diverged'])}" * bool(summary["diverged"])
    print(f"{title}: {summary['seeds']} seed(s){apart}")
    lines = {"exact sequences, decoded greedily": summary["exact"]} | {
        {"accuracy": "tokens, teacher forced", "loss": "loss, held out"}[name]: found
        for name, found in summary["whole"].items()
        if name != "exact_forced"
    }
    for name, found in lines.items():
        print(f"  {name}: {found['mean']:.3f} ± {found['std']:.3f}")
    for half, found in summary["residual"].items():
        print(f"  residual ratio by layer, {half}: " + " ".join(f"{v:.3f}" for v in found["mean"]))
    seconds = summary["seconds"]
    print(f"  training {seconds['train']:.1f} s, in all {seconds['all']:.1f} s")
