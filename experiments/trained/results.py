"""Table, summary and printed lines of the experiments on paths by length.

`results` are those of `training.results_of`, `summary` what `summary_of` makes of them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags

from experiments.trained.training import Setup, diverged, kept
from rank_collapse.paths.enumeration import count_paths
from rank_collapse.report.intervals import mean_interval

# Exact sums by length, see `path_accuracy.length_sums`.
LENGTHS = ("exact", "up_to", "from", "all_but", "shapley", "alone")
# Whose attention, norms and gates: the whole model's ("frozen"), or the truncated network's own.
SEMANTICS = dict.fromkeys(("offset", *LENGTHS), "frozen") | {"truncated": "self-consistent"}


def rows_of(results: dict[str, Any], options: flags.FlagValues) -> list[dict[str, Any]]:
    """Tidy rows: one per seed, evaluation, path length and repeat."""
    apart = diverged(results)
    sampled = "all heads" if options.all_heads else "sampled"
    semantics = SEMANTICS | {sampled: options.semantics}
    return [
        {"seed": seed, "diverged": int(seed in apart), "evaluation": evaluation}
        | {"semantics": semantics.get(evaluation, ""), "num_paths": "", "path_length": ""}
        | {"repeat": ""}
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
    yield "offset", {"path_length": "none"}, results["offset"]
    for name in (*LENGTHS, "truncated"):
        for k in range(next(iter(results[name].values())).shape[1]):
            where = {"num_paths": "all", "path_length": k}
            yield name, where, {m: v[:, k] for m, v in results[name].items()}


def summary_of(results: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """The headline numbers. Repeats are averaged within a seed; means, standard deviations and
    intervals are over seeds."""
    seeds, metric, config = kept(results), next(iter(setup.metrics)), setup.recipe.config

    def over_seeds(values):
        return _moments(values[seeds])

    def by_name(values):
        return {name: over_seeds(v) for name, v in values.items()}

    sets = {size: values[metric].mean(axis=2) for size, values in results["sets"].items()}
    found = {name: results[name][metric] for name in (*LENGTHS, "truncated", "offset")}
    longest = found["from"][:, ::-1]  # of the k + 1 longest lengths
    found["short_less_long"] = found["up_to"] - longest
    summary = {
        "seeds": len(seeds),
        "diverged": diverged(results),
        "metric": metric,
        "heads": config.num_heads,
        "depth": config.depth,
        "paths_there_are": count_paths(config.depth, config.num_heads),
        "whole": by_name(results["whole"]),
        "baselines": by_name(results["baselines"]),
        "lengths": results["lengths"],
        "sets": {size: over_seeds(values) for size, values in sets.items()},
        "published": dict(setup.published),
        "final_loss": over_seeds(results["losses"][:, -1]) if results["losses"].size else None,
        "seconds": results["seconds"],
        "covariance": over_seeds(results["covariance"]),
        "cancellation": over_seeds(results["cancellation"]),
        "by_seed": {
            "whole": results["whole"][metric][seeds],
            "baseline": np.max([v[seeds] for v in results["baselines"].values()], axis=0),
            "carried_length": [carried_length(results, metric, s) for s in seeds],
            "enough": [enough(results, metric, s) for s in seeds],
            "short_less_long": found["short_less_long"][seeds],
            "sets": {size: values[seeds] for size, values in sets.items()},
        },
    } | by_name(found)
    if "whole_train" in results:
        summary["whole_train"] = by_name(results["whole_train"])
    if "ranks" in results:
        summary["ranks"] = by_name(results["ranks"])
    if "alpha" in results:
        summary["alpha"] = over_seeds(results["alpha"])
    return summary


def learned(results: dict[str, Any], metric: str, seed: int) -> tuple[float, float, float]:
    """(accuracy of the whole model, the best baseline's, standard error of the evaluation).

    The standard error is √(a(1 − a)/tokens).
    """
    whole = float(results["whole"][metric][seed])
    best = max(float(v[seed]) for v in results["baselines"].values())
    return whole, best, float(np.sqrt(whole * (1 - whole) / float(results["tokens"][seed])))


def carried_length(results: dict[str, Any], metric: str, seed: int) -> float | None:
    """Σ_k k (a_k − a_{k−1})/(a_L − a_{−1}): the mean length at which a network has its accuracy.

    a_k is the accuracy without paths longer than k (self-consistent), a_{−1} the best baseline's.
    None where the whole model does not exceed the baseline by two standard errors: then there is
    nothing to be carried.
    """
    whole, best, error = learned(results, metric, seed)
    if whole <= best + 2 * error:
        return None
    kept = np.asarray(results["truncated"][metric][seed], float)
    return float((kept[-1] - kept[:-1]).sum() / (kept[-1] - best))


def enough(results: dict[str, Any], metric: str, seed: int) -> int | None:
    """The least K whose truncation is within one standard error of the whole; None as above."""
    whole, best, error = learned(results, metric, seed)
    if whole <= best + 2 * error:
        return None
    return int(np.argmax(results["truncated"][metric][seed] >= whole - error))


def _moments(values):
    """Mean, standard deviation and 95 % interval over seeds [s, ...]; no interval of one seed."""
    values = np.asarray(values, float)
    found = {"mean": values.mean(axis=0).tolist(), "std": values.std(axis=0).tolist()}
    if len(values) > 1 and np.isfinite(values).all():
        ends = [mean_interval(column.tolist()) for column in values.reshape(len(values), -1).T]
        found["interval"] = np.reshape(np.transpose(ends), (2, *values.shape[1:])).tolist()
    return found


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
    print(f"  no path, the offset alone (frozen): {_number(summary['offset'])}")
    sizes = sorted(summary["sets"], key=int)
    columns = [*(f"{n} sampled" for n in sizes), "all, frozen", "up to k, frozen", "truncated"]
    print(f"  {'length':>6s}{'paths':>10s}" + "".join(f"{c:>17s}" for c in [*columns, "Shapley"]))
    lengths = list(summary["lengths"])
    for k, count in enumerate(summary["paths_there_are"]):
        at = lengths.index(k) if k in lengths else None
        cells = ["" if at is None else _number(summary["sets"][n], at) for n in sizes]
        cells += [_number(summary[n], k) for n in ("exact", "up_to", "truncated", "shapley")]
        print(f"  {k:>6d}{count:>10d}" + "".join(f"{c:>17s}" for c in cells))
    print(f"  covariance shares: {' '.join(f'{v:.2f}' for v in summary['covariance']['mean'])}")
    for line in warnings_of(summary):
        print(f"  {line}")
    by_layer = {"alpha": summary["alpha"]} if "alpha" in summary else {}
    for name, values in (by_layer | summary.get("ranks", {})).items():
        print(f"  {name}: " + " ".join(f"{a:.3f}" for a in values["mean"]))
    seconds = summary["seconds"]
    print(f"  training {seconds['train']:.1f} s, in all {seconds['all']:.1f} s")


def warnings_of(summary: dict[str, Any]) -> list[str]:
    """Where frozen lengths cancel, so that their shares are no shares of a whole."""
    shares, ratio = summary["covariance"]["mean"], summary["cancellation"]["mean"]
    low, high = summary["covariance"].get("interval", (shares, shares))
    lines = []
    if min(high) < 0 or max(low) > 1:  # beyond what seeds leave open
        lines.append(
            f"lengths cancel: covariance shares from {min(shares):.2f} to {max(shares):.2f} are no "
            "shares of a whole"
        )
    if ratio > np.sqrt(len(shares) + 1):  # what orthogonal parts of equal sizes have
        lines.append(f"lengths cancel: Σ‖C_k‖ is {ratio:.1f} times ‖Y‖")
    return lines


def _number(found, index=None):
    mean, std = (found[n] if index is None else found[n][index] for n in ("mean", "std"))
    return f"{mean:.3f} ± {std:.3f}"


def _apart(epochs):
    if not epochs:
        return ""
    named = ", ".join(f"{seed} (epoch {int(epoch) + 1})" for seed, epoch in epochs.items())
    return f"; kept apart as diverged: {named}"
