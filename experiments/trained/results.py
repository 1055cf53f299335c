"""Tables, figures and summaries of the trained experiments."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rank_collapse.report import figures

LABELS = {"accuracy": "token accuracy"}


def flatten(results: dict[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """{"a": {"b": x}} as {"a/b": x}."""
    out = {}
    for name, value in results.items():
        path = f"{prefix}{name}"
        out |= flatten(value, f"{path}/") if isinstance(value, dict) else {path: np.asarray(value)}
    return out


def rows(results: dict[str, Any], trained: Any, options: Any) -> list[dict[str, Any]]:
    """Tidy rows: one per seed, evaluation, path length and repeat."""
    out = []
    for seed in range(trained.losses.shape[0]):
        diverged = seed in trained.diverged

        def add(evaluation, values, seed=seed, diverged=diverged, **where):
            row = {"seed": seed, "diverged": int(diverged), "evaluation": evaluation}
            row |= {"num_paths": "", "path_length": "", "repeat": ""} | where
            out.append(row | {name: float(v) for name, v in values.items()})

        for name in ("whole", "whole_train"):
            if name in results:
                add(name, {m: v[seed] for m, v in results[name].items()})
        for name, values in results["baselines"].items():
            add(f"{name} baseline", {"accuracy": values[seed]})
        for size, values in results["sets"].items():
            first = next(iter(values.values()))
            for k, r in np.ndindex(*first.shape[1:]):
                where = {"num_paths": size, "path_length": int(results["lengths"][k]), "repeat": r}
                name = "all heads" if options.all_heads else options.semantics
                add(name, {m: v[seed, k, r] for m, v in values.items()}, **where)
        for name in ("exact", "up_to", "all_but"):
            for k in results["all_lengths"]:
                values = {m: v[seed, k] for m, v in results[name].items()}
                add(name, values, num_paths="all", path_length=int(k))
    return out


@figures.styled
def path_figure(setup: Any, results: dict[str, Any], trained: Any) -> Figure:
    """The published figure: accuracy against path length, with what it left out."""
    fig, axes = figures.figure(1, 1, width=5.6, height=3.8)
    ax, kept = axes[0, 0], trained.kept
    metric = next(iter(setup.metrics))
    lengths, everything = results["lengths"], results["all_lengths"]
    for index, (size, values) in enumerate(sorted(results["sets"].items())):
        v = values[metric][kept]  # [s, k, r]
        spread = v.transpose(0, 2, 1).reshape(-1, v.shape[1])
        ax.errorbar(
            lengths + 0.08 * (index - 0.5), spread.mean(axis=0), spread.std(axis=0),
            label=f"{size} sampled path{'s' * (size > 1)}", color=figures.color(index), capsize=2,
            marker=figures.MARKERS[index], linewidth=1.0,
        )  # fmt: skip
    count = len(results["sets"])
    for index, (name, label) in enumerate(
        (("exact", "all paths of the length"), ("up_to", "all paths up to the length")), count
    ):
        figures.band(ax, everything, results[name][metric][kept], label=label, index=index)
    whole = results["whole"][metric][kept]
    _level(ax, whole.mean(), f"whole model, measured ({whole.mean():.2f})", "black", "-")
    name, baseline = best_baseline(results, kept)
    _level(ax, baseline, f"{name} baseline, measured ({baseline:.2f})", "dimgray", "--")
    for key, label in (("whole", "whole model"), ("baseline", "baseline")):
        value = setup.published[key]
        _level(ax, value, f"{label}, published ({value:g})", "tab:gray", ":")
    ax.set_xlabel("path length")
    ax.set_ylabel("token accuracy")
    ax.set_xticks(everything)
    ax.set_ylim(0, 1.02)
    ax.set_title(f"{setup.title}, {_seeds(kept)}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    return fig


@figures.styled
def loss_figure(setup: Any, trained: Any) -> Figure:
    """Training loss of every seed that did not diverge, and of those that did until they did."""
    fig, axes = figures.figure(1, 1)
    ax, kept = axes[0, 0], trained.kept
    epochs = np.arange(1, trained.losses.shape[1] + 1)
    figures.band(ax, epochs, trained.losses[kept], label=_seeds(kept), marker="")
    for seed in trained.diverged:
        ax.plot(epochs, trained.losses[seed], color=figures.color(1), linewidth=0.8)
    if trained.diverged:
        ax.plot([], [], color=figures.color(1), label=f"diverged: {len(trained.diverged)}")
    ax.set_xlabel("epoch")
    ax.set_ylabel("training loss")
    ax.set_title(setup.title)
    ax.legend()
    return fig


@figures.styled
def layer_figures(setup: Any, results: dict[str, Any], trained: Any) -> dict[str, Figure]:
    """Ranks and α_l by layer, where they were measured."""
    out = {}
    if "ranks" in results:
        fig, axes = figures.figure(1, 2)
        for index, (name, ax, label) in enumerate(
            (
                ("rank", axes[0, 0], "hidden states, σ > 0.5"),
                ("effective_rank", axes[0, 0], "hidden states, effective"),
                ("attention_rank", axes[0, 0], "attention matrices, effective"),
                ("residual_ratio", axes[0, 1], "hidden states"),
            )
        ):
            values = results["ranks"][name][trained.kept]
            first = 1 if name == "attention_rank" else 0
            layers = first + np.arange(values.shape[1])
            figures.band(ax, layers, values, label=label, index=index)
        for ax, text in zip(axes[0], ("rank", "‖res(X)‖ / ‖X‖"), strict=True):
            ax.set_xlabel("layer")
            ax.set_ylabel(text)
            ax.legend()
        fig.suptitle(setup.title)
        out["ranks"] = fig
    if "alpha" in results:
        fig, axes = figures.figure(1, 1)
        values = results["alpha"][trained.kept]
        figures.band(axes[0, 0], 1 + np.arange(values.shape[1]), values)
        axes[0, 0].set(xlabel="layer", ylabel="α, weight of the skip", title=setup.title)
        axes[0, 0].set_ylim(0, 1)
        out["alpha"] = fig
    return out


def best_baseline(results: dict[str, Any], kept: np.ndarray) -> tuple[str, float]:
    """The better of the majority and the random baseline, measured."""
    means = {n: float(v[kept].mean()) for n, v in results["baselines"].items()}
    name = max(means, key=means.get)
    return name, means[name]


def summarise(setup: Any, results: dict[str, Any], trained: Any, seconds: dict) -> dict[str, Any]:
    """The headline numbers: means and standard deviations over seeds (and repeats)."""
    kept = trained.kept
    metric = next(iter(setup.metrics))

    def moments(values):
        flat = np.asarray(values, float)
        return {"mean": flat.mean(axis=0).tolist(), "std": flat.std(axis=0).tolist()}

    sets = {}
    for size, values in results["sets"].items():
        v = values[metric][kept].transpose(0, 2, 1)
        sets[str(size)] = moments(v.reshape(-1, v.shape[-1]))
    summary = {
        "seeds": len(kept),
        "diverged": {str(s): e for s, e in trained.diverged.items()},
        "metric": metric,
        "whole": {m: moments(v[kept]) for m, v in results["whole"].items()},
        "baselines": {m: moments(v[kept]) for m, v in results["baselines"].items()},
        "lengths": results["lengths"],
        "sets": sets,
        "published": dict(setup.published),
        "final_loss": moments(trained.losses[kept, -1]) if trained.losses.shape[1] else None,
        "seconds": seconds,
    }
    if "whole_train" in results:
        summary["whole_train"] = {m: moments(v[kept]) for m, v in results["whole_train"].items()}
    for name in ("exact", "up_to", "all_but"):
        summary[name] = moments(results[name][metric][kept])
    for name in ("ranks", "alpha"):
        if name in results:
            value = results[name]
            summary[name] = (
                {m: moments(v[kept]) for m, v in value.items()}
                if isinstance(value, dict)
                else moments(value[kept])
            )
    return summary


def show(setup: Any, run: Any) -> None:
    """Prints the summary: one line per path length."""
    s = run.summary
    whole = s["whole"][s["metric"]]
    others = ", ".join(
        f"{name} {v['mean']:.3f}" for name, v in s["whole"].items() if name != s["metric"]
    )
    print(f"{setup.title}: {s['seeds']} seed(s)" + _diverged(s["diverged"]))
    print(
        f"  whole model {whole['mean']:.3f} ± {whole['std']:.3f}"
        f" (published {s['published']['whole']:g}){'; ' + others if others else ''}"
    )
    names = ", ".join(f"{n} {v['mean']:.3f}" for n, v in s["baselines"].items())
    print(f"  baselines: {names} (published {s['published']['baseline']:g})")
    sizes = sorted(s["sets"], key=int)
    header = "".join(f"{f'{n} paths':>18s}" for n in sizes)
    print(f"  length{header}{'all, exact':>14s}{'up to k':>10s}")
    for position, k in enumerate(s["lengths"]):
        cells = "".join(
            f"{s['sets'][n]['mean'][position]:>10.3f} ± {s['sets'][n]['std'][position]:.3f}"
            for n in sizes
        )
        print(f"  {k:>6d}{cells}{s['exact']['mean'][k]:>14.3f}{s['up_to']['mean'][k]:>10.3f}")
    for name, label in (("alpha", "alpha"),):
        if name in s:
            print(f"  {label}: " + " ".join(f"{a:.3f}" for a in s[name]["mean"]))
    if "ranks" in s:
        for name, v in s["ranks"].items():
            print(f"  {name}: " + " ".join(f"{a:.3f}" for a in v["mean"]))
    print(f"  training {s['seconds']['train']:.1f} s, in all {s['seconds']['all']:.1f} s")
    print(f"written to {run.path}")


def _level(ax, value, label, color, style):
    ax.axhline(value, label=label, color=color, linestyle=style, linewidth=1.1)


def _seeds(kept):
    return f"{len(kept)} seed{'s' * (len(kept) != 1)}"


def _diverged(diverged):
    if not diverged:
        return ""
    named = ", ".join(f"{seed} (epoch {int(epoch) + 1})" for seed, epoch in diverged.items())
    return f"; kept apart as diverged: {named}"
