"""Table, summary and printed lines of the experiments on paths by length.

`results` are those of `training.results_of`, `summary` what `summary_of` makes of them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags

from experiments.trained.training import Setup, diverged, kept


def rows_of(results: dict[str, Any], options: flags.FlagValues) -> list[dict[str, Any]]:
    """Tidy rows: one per seed, evaluation, path length and repeat."""
    apart = diverged(results)
    sampled = "all heads" if options.all_heads else options.semantics
    return [
        {"seed": seed, "diverged": int(seed in apart), "evaluation": evaluation}
        | {"num_paths": "", "path_length": "", "repeat": ""}
        | where
        | {metric: float(value[seed]) for metric, value in values.items()}
        for seed in range(len(results["losses"]))
        for evaluation, where, values in _evaluations(results, sampled)
    ]


def _evaluations(results, sampled) -> Iterator[tuple[str, dict, dict]]:
    """(evaluation, its path length and repeat, {metric: [s]}) of every evaluation."""
    for name in ("whole", "whole_train"):
        if name in results:
            yield name, {}, results[name]
    for name, values in results["baselines"].items():
        yield f"{name} baseline", {}, {"accuracy": values}
    for size, metrics in results["sets"].items():
        for k, r in np.ndindex(*next(iter(metrics.values())).shape[1:]):
            where = {"num_paths": size, "path_length": int(results["lengths"][k]), "repeat": r}
            yield sampled, where, {m: v[:, k, r] for m, v in metrics.items()}
    for name in ("exact", "up_to", "all_but"):
        for k in range(next(iter(results[name].values())).shape[1]):
            where = {"num_paths": "all", "path_length": k}
            yield name, where, {m: v[:, k] for m, v in results[name].items()}


def summary_of(results: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """The headline numbers: means and standard deviations over seeds (and repeats)."""
    seeds, metric = kept(results), next(iter(setup.metrics))

    def over_seeds(values):
        return _moments(values[seeds])

    def by_name(values):
        return {name: over_seeds(v) for name, v in values.items()}

    def over_repeats(values):  # [s, k, r]
        v = values[seeds].transpose(0, 2, 1)
        return _moments(v.reshape(-1, v.shape[-1]))

    summary = {
        "seeds": len(seeds),
        "diverged": diverged(results),
        "metric": metric,
        "whole": by_name(results["whole"]),
        "baselines": by_name(results["baselines"]),
        "lengths": results["lengths"],
        "sets": {size: over_repeats(values[metric]) for size, values in results["sets"].items()},
        "published": dict(setup.published),
        "final_loss": over_seeds(results["losses"][:, -1]) if results["losses"].size else None,
        "seconds": results["seconds"],
    }
    if "whole_train" in results:
        summary["whole_train"] = by_name(results["whole_train"])
    for name in ("exact", "up_to", "all_but"):
        summary[name] = over_seeds(results[name][metric])
    if "ranks" in results:
        summary["ranks"] = by_name(results["ranks"])
    if "alpha" in results:
        summary["alpha"] = over_seeds(results["alpha"])
    return summary


def _moments(values):
    values = np.asarray(values, float)
    return {"mean": values.mean(axis=0).tolist(), "std": values.std(axis=0).tolist()}


def show(title: str, summary: dict[str, Any]) -> None:
    """Prints the summary: one line per path length."""
    whole, published = summary["whole"][summary["metric"]], summary["published"]
    print(f"{title}: {summary['seeds']} seed(s)" + _apart(summary["diverged"]))
    others = "".join(
        f"; {n} {v['mean']:.3f}" for n, v in summary["whole"].items() if n != summary["metric"]
    )
    print(
        f"  whole model {whole['mean']:.3f} ± {whole['std']:.3f} "
        f"(published {published['whole']:g}){others}"
    )
    names = ", ".join(f"{n} {v['mean']:.3f}" for n, v in summary["baselines"].items())
    print(f"  baselines: {names} (published {published['baseline']:g})")
    sizes = sorted(summary["sets"], key=int)
    header = "".join(f"{f'{n} paths':>18s}" for n in sizes)
    print(f"  length{header}{'all, exact':>14s}{'up to k':>10s}")
    for position, k in enumerate(summary["lengths"]):
        sets = [(summary["sets"][n]["mean"], summary["sets"][n]["std"]) for n in sizes]
        cells = "".join(f"{m[position]:>10.3f} ± {s[position]:.3f}" for m, s in sets)
        exact, up_to = summary["exact"]["mean"][k], summary["up_to"]["mean"][k]
        print(f"  {k:>6d}{cells}{exact:>14.3f}{up_to:>10.3f}")
    by_layer = {"alpha": summary["alpha"]} if "alpha" in summary else {}
    for name, values in (by_layer | summary.get("ranks", {})).items():
        print(f"  {name}: " + " ".join(f"{a:.3f}" for a in values["mean"]))
    seconds = summary["seconds"]
    print(f"  training {seconds['train']:.1f} s, in all {seconds['all']:.1f} s")


def _apart(epochs):
    if not epochs:
        return ""
    named = ", ".join(f"{seed} (epoch {int(epoch) + 1})" for seed, epoch in epochs.items())
    return f"; kept apart as diverged: {named}"
