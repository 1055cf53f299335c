"""The experiment on sorting, convex hull and memorization: accuracy by path length.

`measure` says what is measured of one trained network, `claims` what follows from that.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.shell.experiment import Experiment
from experiments.shell.flag_values import Flags
from experiments.shell.statements import row_of
from experiments.trained import arguments
from experiments.trained.path_figures import FIGURES
from experiments.trained.program import ALONE
from experiments.trained.training import Setup, diverged, kept, results_of
from rank_collapse.paths.enumeration import ALL_HEADS
from rank_collapse.paths.sets import sample_path_sets
from rank_collapse.report import Comparison
from rank_collapse.report.claims import Row
from rank_collapse.report.statistics import between, moments, slope
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training import path_accuracy
from rank_collapse.training.tasks.examples import majority_baseline, random_baseline, token_mask

PUBLISHED_SIZE = "20"  # paths in the larger of the published sets
SET_SIZES = (5, int(PUBLISHED_SIZE))  # of the published figures

# Exact sums by length, see `path_accuracy.length_sums`.
LENGTHS = ("exact", "up_to", "from", "all_but", "shapley", "alone")

# Whose attention, norms and gates: the whole model's ("frozen"), or the truncated network's own.
SEMANTICS = dict.fromkeys(("offset", *LENGTHS), "frozen") | {"truncated": "self-consistent"}


def paths_experiment(
    task: str,
    *,
    setup: Callable[[Flags], Setup],
    presets: Mapping[str, str],
    **about: Any,
) -> Experiment:
    """The experiment on paths by length of one task.

    Args:
        task: As its rows name it.
        setup: options → what is trained.
        presets: "quick" and "tiny", what the task has of its own; "paper" has the flags' defaults.
        **about: Further attributes of `Experiment`.
    """

    def checked(options):
        found = setup(options)
        if options.path_len > options.depth:
            raise ValueError(f"path_len={options.path_len} is larger than depth={options.depth}")
        return found

    return Experiment(
        title=f"Paths: {task}",
        claim="Section 4.2: with a skip network of 6 layers, short paths alone come near the "
        "whole model's accuracy, and the accuracy of a path falls with its length.",
        presets={
            "quick": f"--num_seeds=6 --n_repeat=2 --no_sub_path {presets['quick']}",
            "paper": "--num_seeds=8 --no_sub_path",
            "tiny": (*arguments.TINY, "--n_paths=2", "--n_repeat=1", *presets["tiny"].split()),
        },
        setup=checked,
        extra=lambda setup: setup.extra,
        measure=measure_all,
        table=rows_of,
        figures=FIGURES,
        claims=functools.partial(claims, task),
        compare=compare,
        **about,
    )


def measure_all(options: Flags, setup: Setup, run: RunFolder) -> dict[str, Any]:
    """What `measure` finds of every seed, [s, ...], and the "lengths" of the sampled paths [k]."""
    found = results_of(options, {ALONE: setup}, run, functools.partial(measure, options))[ALONE]
    return found | {"lengths": path_lengths(options)}


def measure(options: Flags, setup: Setup, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """What the flags ask for of one seed.

    Returns:
        {"whole": {metric: []}, "baselines": {name: []}, "sets": {size: {metric: [k, r]}}, what
        `length_sums` gives, "tokens": [] evaluated}, and where asked for "ranks": {name: [L(+1)]},
        "alpha": [L] and "whole_train": {metric: []}; k path lengths, r repeats.
    """
    config, metrics, size = setup.recipe.config, setup.metrics, setup.batch_size
    key_paths, key_guess = jax.random.split(jax.random.fold_in(key, 1))
    held_out = data["eval"]
    found = {
        "whole": path_accuracy.whole_model(model, held_out, config, metrics, size),
        "baselines": {
            "majority": majority_baseline(data["train"], held_out, setup.recipe.num_outputs),
            "random": random_baseline(key_guess, held_out, setup.recipe.num_outputs),
        },
        "sets": _path_sets(options, setup, model, held_out, key_paths),
    }
    found |= path_accuracy.length_sums(model, held_out, config, metrics, size)
    found["tokens"] = token_mask(held_out).sum()
    if options.do_rank:
        found["ranks"] = path_accuracy.layer_ranks(model, held_out, config)
    if options.compute_alpha:
        found["alpha"] = path_accuracy.layer_alpha(model, held_out, config)
    if not options.train_as_eval:
        found["whole_train"] = path_accuracy.whole_model(
            model, data.get("texts", data["train"]), config, metrics, size or 500
        )
    return found


def path_lengths(options: Flags) -> np.ndarray:
    """The lengths of the evaluated paths [k]."""
    first = options.depth if options.all_heads else options.path_len
    return np.arange(first, options.depth + 1)


def _path_sets(options, setup, model, held_out, key):
    """{size of the sets: {metric: [k, r]}}; sets of all sizes are one array, filled up."""
    config, lengths = setup.recipe.config, path_lengths(options)
    sizes = (1,) if options.all_heads else sorted({options.n_paths, *SET_SIZES})
    shape = (len(sizes), len(lengths), 1 if options.all_heads else options.n_repeat, sizes[-1])
    keep = jnp.broadcast_to(np.arange(sizes[-1]) < np.reshape(sizes, (-1, 1, 1, 1)), shape)

    def draw(size):
        own = jax.random.fold_in(key, size)
        return sample_path_sets(own, lengths, *shape[2:], config.depth, config.num_heads)

    if options.all_heads:
        paths = jnp.full((*shape, config.depth), ALL_HEADS)
    else:
        paths = jax.vmap(draw)(jnp.asarray(sizes))
    found = path_accuracy.path_sets(
        model,
        held_out,
        config,
        setup.metrics,
        jnp.where(keep[..., None], paths, paths[..., :1, :]).reshape(-1, *paths.shape[2:]),
        semantics=options.semantics,
        no_sub_path=options.no_sub_path,
        keep=keep.reshape(-1, *shape[2:]),
        batch_size=setup.batch_size,
    )
    found = {metric: values.reshape(shape[:3]) for metric, values in found.items()}
    return {str(size): {m: v[i] for m, v in found.items()} for i, size in enumerate(sizes)}


def rows_of(results: Mapping[str, Any], setup: Setup) -> list[dict[str, Any]]:
    """Tidy rows: one per seed, evaluation, path length and repeat."""
    apart, sampled = diverged(results), "all heads" if setup.options.all_heads else "sampled"
    semantics = SEMANTICS | {sampled: setup.options.semantics}
    every = [{"path_length": k} for k in range(setup.recipe.config.depth + 1)]
    evaluations = [
        *((name, [{}], results[name]) for name in ("whole", "whole_train") if name in results),
        *((f"{n} baseline", [{}], {"accuracy": v}) for n, v in results["baselines"].items()),
        *(
            (sampled, _places(size, results["lengths"], own["accuracy"].shape[2]), own)
            for size, own in results["sets"].items()
        ),
        ("offset", [{}], results["offset"]),
        *((name, every, results[name]) for name in (*LENGTHS, "truncated")),
    ]
    return [
        {"seed": seed, "diverged": int(apart[seed]), "evaluation": name}
        | {"semantics": semantics.get(name, ""), "num_paths": "", "path_length": "", "repeat": ""}
        | place
        | {metric: float(v[seed].flat[i]) for metric, v in values.items()}
        for seed, (name, places, values) in itertools.product(range(len(apart)), evaluations)
        for i, place in enumerate(places)
    ]


def _places(size, lengths, repeats):
    """Where in the table each of the sampled sets of a size is."""
    return [
        {"num_paths": size, "path_length": int(length), "repeat": repeat}
        for length, repeat in itertools.product(lengths, range(repeats))
    ]


def accuracies(results: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Accuracies of the seeds that did not diverge, and at which path lengths they come.

    a_k is the accuracy without paths longer than k (self-consistent), a_{−1} the best baseline's. A
    standard error is that of an accuracy as it was evaluated, √(a(1 − a)/tokens).

    Returns:
        Arrays [s]: "whole", "offset", the best "baseline" and its "baseline_error"; "learned",
        whether the whole model exceeds the baseline by two standard errors; "fell_below", whether
        some a_k is below the baseline by two; "carried" = Σ_k k (a_k − a_{k−1})/(a_L − a_{−1}), the
        mean length at which the accuracy comes, NaN where nothing was learned and where the
        accuracy fell below the baseline, since with negative weights it is no mean; "enough", the
        least k whose a_k is within one standard error of the whole, NaN where nothing was learned.
    """
    seeds = kept(results)
    whole, offset, truncated = (
        results[name]["accuracy"][seeds].astype(float) for name in ("whole", "offset", "truncated")
    )
    baseline = np.max([v[seeds] for v in results["baselines"].values()], axis=0).astype(float)
    error, baseline_error = (
        np.sqrt(a * (1 - a) / results["tokens"][seeds]) for a in (whole, baseline)
    )
    learned = whole > baseline + 2 * error
    below = truncated.min(axis=1) < baseline - 2 * baseline_error
    gained = np.where(learned & ~below, truncated[:, -1] - baseline, np.nan)
    enough = np.argmax(truncated >= (whole - error)[:, None], axis=1)
    return {
        "whole": whole,
        "offset": offset,
        "baseline": baseline,
        "baseline_error": baseline_error,
        "learned": learned,
        "fell_below": below,
        "carried": (truncated[:, -1:] - truncated[:, :-1]).sum(axis=1) / gained,
        "enough": np.where(learned, enough, np.nan),
    }


def claims(task: str, results: Mapping[str, Any], setup: Setup) -> Iterator[Row]:
    """Whether short paths carry the network, do the task alone, and lengths fall.

    What is below the best baseline says nothing about paths: a network whose truncations or sampled
    sets are there has no number. `biases` and `all of it` are findings.
    """
    found, lengths, depth = accuracies(results), results["lengths"], setup.recipe.config.depth
    whole, baseline, learned = found["whole"], found["baseline"], found["learned"]
    below = below_text(found["fell_below"])
    yield row_of("short suffice", task, found["carried"] - depth / 2, why=below)
    if PUBLISHED_SIZE in results["sets"] and 1 in lengths:
        sets = results["sets"][PUBLISHED_SIZE]["accuracy"][kept(results)].mean(axis=2)
        sets = sets[:, lengths >= 1]
        yield row_of("one short", task, sets[:, 0] - (whole + baseline) / 2)
        below = sets.max(axis=1) <= baseline + 2 * found["baseline_error"]
        falls = np.where(below, np.nan, slope(np.arange(sets.shape[1]), sets))
        yield row_of("falls", task, falls, why=below_text(below))
    gained, alone = whole - baseline, found["offset"] - baseline
    yield row_of("biases", task, alone[learned] / gained[learned])
    yield row_of("all of it", f"{task}, of {depth} layers", found["enough"])


def below_text(below: Sequence[bool]) -> str:
    """How many networks are below the best baseline."""
    count = sum(map(bool, below))
    return f"below the baseline in {count} of {len(below)} networks" if count else ""


def compare(results: Mapping[str, Any], setup: Setup) -> list[Comparison]:
    """Whole model and baseline beside the published plotting code's, and what no path gives."""
    seeds = kept(results)
    whole, offset = (
        between(moments(results[n]["accuracy"][seeds], share=True)) for n in ("whole", "offset")
    )
    truncated = results["truncated"]["accuracy"][seeds].mean(axis=0)
    sets = {
        size: results["sets"][size]["accuracy"][seeds].mean(axis=2).mean(axis=0, dtype=float)
        for size in sorted(results["sets"], key=int)
    }
    return [
        Comparison(
            "token accuracy of the whole model",
            whole,
            setup.published["whole"],
            "published: a constant in the plotting code; quick runs train for fewer epochs or on "
            "other data than the paper's",
        ),
        Comparison(
            "best baseline, measured on the data",
            max(float(v[seeds].mean(dtype=float)) for v in results["baselines"].values()),
            setup.published["baseline"],
        ),
        Comparison(
            f"without paths longer than 0 .. {len(truncated) - 1}, self-consistent",
            ", ".join(f"{a:.3f}" for a in truncated),
        ),
        Comparison(
            "no path at all: the offset alone, frozen",
            offset,
            note="biases through the whole model's 1/σ",
        ),
        *(
            Comparison(
                f"best length of sets of {size} sampled paths",
                int(results["lengths"][np.argmax(accuracy)]),
                note=f"its accuracy {accuracy.max():.3f}",
            )
            for size, accuracy in sets.items()
        ),
    ]
