"""The experiment on sorting, convex hull and memorization: accuracy by path length.

`measure` says what is measured of one trained network, `claims` what follows from that.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import xarray as xr

from experiments.shell import labelled
from experiments.shell.experiment import Drawing, Experiment, Finding
from experiments.shell.labelled import beside, rows
from experiments.shell.options import Flags
from experiments.trained import arguments
from experiments.trained.training import ALONE, Setup, arrays_of, models_of
from rank_collapse.paths.enumeration import ALL_HEADS
from rank_collapse.paths.sets import sample_path_sets
from rank_collapse.report import Comparison, figures
from rank_collapse.report.claims import Row
from rank_collapse.report.statistics import between, mean_of, slope
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training import path_accuracy
from rank_collapse.training.tasks.examples import majority_baseline, random_baseline, token_mask

PUBLISHED_SIZE = 20  # paths in the larger of the published sets
SET_SIZES = (5, PUBLISHED_SIZE)  # of the published figures
BASELINES = ["majority baseline", "random baseline"]
# Exact sums by length, see `path_accuracy.length_sums`.
LENGTHS = ("exact", "up_to", "from", "all_but", "shapley", "alone")
# Whose attention, norms and gates: the whole model's ("frozen"), or the truncated network's own.
SEMANTICS = dict.fromkeys(("offset", *LENGTHS), "frozen") | {"truncated": "self-consistent"}
PLACES = ("num_paths", "path_length", "repeat")  # axes of an evaluation but seeds and metrics


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
        table=table,
        figures=FIGURES,
        files=lambda found, setup, run: models_of({ALONE: setup}, run),
        claims=functools.partial(claims, task),
        compare=compare,
        **about,
    )


def measure_all(options: Flags, setup: Setup, run: RunFolder) -> xr.Dataset:
    """What `measure` finds of every seed, over "seed", "metric" and the axes of `PLACES`, and
    "fine": the seeds that did not diverge."""
    arrays = arrays_of(options, {ALONE: setup}, run, functools.partial(measure, options))[ALONE]
    axes = {"losses": ("epoch",), "covariance": ("path_length",), "alpha": ("sublayer",)}
    axes |= {"ranks": ("measure", "layer"), "seconds": ("part",)}
    places = ("num_paths", "metric", "path_length", "repeat")
    shown = {n: a for n, a in arrays.items() if not n.startswith("model/")}
    sets = {n: shown.pop(n) for n in [*shown] if n.startswith("sets/")}
    every = labelled.of_arrays(shown, ("metric", "path_length"), **axes)
    every = every.assign_coords(path_length=np.arange(setup.recipe.config.depth + 1))
    sampled = labelled.of_arrays(sets, places).assign_coords(path_length=path_lengths(options))
    sampled = sampled.rename(sets=sampled_as(setup))
    return xr.merge([every, sampled], join="outer").assign(fine=every.diverged_at < 0)


def sampled_as(setup: Setup) -> str:
    """What the sampled sets are called."""
    return "all heads" if setup.options.all_heads else "sampled"


def measure(options: Flags, setup: Setup, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """What the flags ask for of one seed.

    Returns:
        {evaluation: {metric: [] or [k]}}, those of `length_sums`, "whole", the baselines, and where
        asked for "whole_train"; "sets": {size: {metric: [k, r]}}; "tokens": [] evaluated, and where
        asked for "ranks": {name: [L + 1]} and "alpha": [L]; k path lengths, r repeats.
    """
    config, metrics, size = setup.recipe.config, setup.metrics, setup.batch_size
    key_paths, key_guess = jax.random.split(jax.random.fold_in(key, 1))
    held_out, outputs = data["eval"], setup.recipe.num_outputs
    guesses = (
        majority_baseline(data["train"], held_out, outputs),
        random_baseline(key_guess, held_out, outputs),
    )
    found = {
        "whole": path_accuracy.whole_model(model, held_out, config, metrics, size),
        **{n: {"accuracy": v} for n, v in zip(BASELINES, guesses, strict=True)},
        "sets": _path_sets(options, setup, model, held_out, key_paths),
    }
    found |= path_accuracy.length_sums(model, held_out, config, metrics, size)
    found["tokens"] = token_mask(held_out).sum()
    if options.do_rank:
        ranks = path_accuracy.layer_ranks(model, held_out, config)
        inputs = jnp.full(1, jnp.nan)  # attention's begin with layer 1
        found["ranks"] = ranks | {"attention_rank": jnp.append(inputs, ranks["attention_rank"])}
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


def table(found: xr.Dataset, setup: Setup) -> Iterator[dict[str, Any]]:
    """One row per seed, evaluation, path length and repeat; a column for each metric."""
    name = sampled_as(setup)
    frames = [
        found[evaluation]
        .to_dataset(dim="metric")
        .to_dataframe()
        .dropna(how="all")
        .reset_index()
        .assign(evaluation=evaluation)
        for evaluation in found.data_vars
        if "metric" in found[evaluation].dims
    ]
    long = pd.concat(frames).assign(diverged=lambda t: 1 - found.fine.values[t.seed])
    semantics = SEMANTICS | {name: setup.options.semantics}
    long["semantics"] = long.evaluation.map(semantics)
    places = [axis for axis in PLACES if axis in long]
    long[places] = long[places].astype("Int64")
    order = ["seed", "diverged", "evaluation", "semantics", *places, *setup.metrics]
    return labelled.records(long.sort_values("seed", kind="stable")[order])


def accuracies(found: xr.Dataset) -> xr.Dataset:
    """Accuracies of the seeds that did not diverge, and at which path lengths they come.

    a_k is the accuracy without paths longer than k (self-consistent), a_{−1} the best baseline's. A
    standard error is that of an accuracy as it was evaluated, √(a(1 − a)/tokens).

    Returns:
        What was measured, and over seeds: the best "baseline" and its "baseline_error"; "learned",
        whether the whole model exceeds the baseline by two standard errors; "fell_below", whether
        some a_k is below the baseline by two; "carried" = Σ_k k (a_k − a_{k−1})/(a_L − a_{−1}), the
        mean length at which the accuracy comes, NaN where nothing was learned and where the
        accuracy fell below the baseline, since with negative weights it is no mean; "enough", the
        least k whose a_k is within one standard error of the whole, NaN where nothing was learned.
    """
    own = found.sel(metric="accuracy", seed=found.fine, drop=True).astype(float)
    baseline, kept = np.maximum(*(own[name] for name in BASELINES)), own.truncated
    error, baseline_error = (np.sqrt(a * (1 - a) / own.tokens) for a in (own.whole, baseline))
    learned = own.whole > baseline + 2 * error
    below = kept.min("path_length") < baseline - 2 * baseline_error
    end = kept.isel(path_length=-1)
    rest = labelled.along(lambda a: (a[..., -1:] - a[..., :-1]).sum(-1), kept, "path_length")
    return own.assign(
        baseline=baseline,
        baseline_error=baseline_error,
        learned=learned,
        fell_below=below,
        carried=rest / (end - baseline).where(learned & ~below),
        enough=(kept >= own.whole - error).argmax("path_length").where(learned),
    )


def claims(task: str, found: xr.Dataset, setup: Setup) -> Iterator[Row]:
    """Whether short paths carry the network, do the task alone, and lengths fall.

    What is below the best baseline says nothing about paths: a network whose truncations or sampled
    sets are there has no number. `biases` and `all of it` are findings.
    """
    own, depth = accuracies(found), setup.recipe.config.depth
    below = below_text(own.fell_below)
    yield from rows("short suffice", own.carried - depth / 2, task, why=below)
    name, lengths = sampled_as(setup), path_lengths(setup.options)
    if name == "sampled" and 1 in lengths:
        sets = own[name].sel(num_paths=PUBLISHED_SIZE, path_length=slice(1, None), drop=True)
        sets = sets.mean("repeat")
        first = sets.sel(path_length=1, drop=True)
        yield from rows("one short", first - (own.whole + own.baseline) / 2, task)
        lost = sets.max("path_length") <= own.baseline + 2 * own.baseline_error
        falls = labelled.along(functools.partial(slope, sets.path_length), sets, "path_length")
        yield from rows("falls", falls.where(~lost), task, why=below_text(lost))
    learned = own.sel(seed=own.learned)
    yield from rows(
        "biases", (learned.offset - learned.baseline) / (learned.whole - learned.baseline), task
    )
    yield from rows("all of it", own.enough, f"{task}, of {depth} layers")


def below_text(below: xr.DataArray) -> str:
    """How many networks are below the best baseline."""
    count = int(below.sum())
    return f"below the baseline in {count} of {below.size} networks" if count else ""


def compare(found: xr.Dataset, setup: Setup) -> Iterator[Comparison]:
    """Whole model and baseline beside the published plotting code's, and what no path gives."""
    own = accuracies(found)
    whole, offset = (between(mean_of(own[n], share=True)) for n in ("whole", "offset"))
    yield Comparison(
        "token accuracy of the whole model",
        whole,
        setup.published["whole"],
        "published: a constant in the plotting code; quick runs train for fewer epochs or on "
        "other data than the paper's",
    )
    best = max(float(own[name].mean()) for name in BASELINES)
    yield Comparison("best baseline, measured on the data", best, setup.published["baseline"])
    yield from beside("without longer paths, self-consistent", own.truncated)
    note = "biases through the whole model's 1/σ"
    yield Comparison("no path at all: the offset alone, frozen", offset, note=note)
    by_length = own[sampled_as(setup)].mean(["seed", "repeat"])
    yield from beside("best length", by_length.idxmax("path_length").expand_dims("seed"))


def most_sampled(own: xr.Dataset, setup: Setup) -> xr.DataArray:
    """Accuracy of the largest sampled sets by path length, mean over repeats."""
    sets = own[sampled_as(setup)].mean("repeat")
    return sets.sel(num_paths=sets.num_paths.max())


def finding(done: str, found: xr.Dataset, setup: Setup) -> Finding | None:
    """How few layers a path needs to pass, and what sampled paths do alone.

    Args:
        done: What the accuracy is, such as "of the letters are sorted".
    """
    own, depth = accuracies(found).mean("seed"), setup.recipe.config.depth
    near = own.truncated >= own.baseline + 0.9 * (own.whole - own.baseline)
    k = int(near.argmax("path_length"))
    sets = most_sampled(own, setup)
    if 1 not in sets.path_length:
        return None
    one, full = (float(sets.sel(path_length=n)) for n in (1, depth))
    return Finding(
        "short_paths",
        f"{own.truncated[k]:.2f} {done} without paths through more than {k} of {depth} layers "
        f"({own.whole:.2f} with all paths, {own.baseline:.2f} by a guess); "
        f"{int(sets.num_paths)} sampled paths of length 1 give {one:.2f}, of length {depth} "
        f"{full:.2f}.",
    )


def short_paths_figure(found: xr.Dataset, setup: Setup):
    """Accuracy of the network without paths longer than k, and of sampled paths of length k alone;
    mean and standard deviation over seeds."""
    own = accuracies(found)
    fig, ((ax,),) = figures.figure(1, 1)
    lengths = own.path_length.values
    figures.band(ax, lengths, own.truncated, "without paths longer than k")
    sets = most_sampled(own, setup).transpose("seed", ...)
    label = f"{int(sets.num_paths)} sampled paths of length k"
    figures.band(ax, sets.path_length, sets, label, 1)
    for value, text, dashes in ((own.whole, "whole network", "-"), (own.baseline, "guess", "--")):
        ax.axhline(float(value.mean()), label=text, color="#555555", linestyle=dashes, lw=1)
    ax.set(xlabel="path length k, in layers", ylabel="accuracy", ylim=(0, 1.02), title=setup.title)
    ax.set_xticks(lengths)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


def paths_figure(found: xr.Dataset, setup: Setup):
    """Accuracy by path length. Left: sampled sets, which attend from their own states, beside the
    exact sum over all paths of the length in the whole model's attention. Right: the network
    without paths longer than k, the sums of the k + 1 shortest and of the k + 1 longest lengths.
    Bars and bands: standard deviation over seeds."""
    fig, axes = figures.figure(1, 2, width=4.0, height=4.2, sharey=True)
    (one, together), own = axes[0], accuracies(found)
    sets = own[sampled_as(setup)].mean("repeat")
    for index, (point, v) in enumerate(labelled.points(sets, "seed", "path_length")):
        size = point["num_paths"]
        one.errorbar(
            v.path_length + 0.08 * (index - 0.5),
            v.mean("seed"),
            v.std("seed"),
            label=f"{size} sampled path{'s' * (size > 1)}, {setup.options.semantics}",
            capsize=2,
            color=figures.color(index),
            marker=figures.MARKERS[index],
            linewidth=1.0,
        )
    curves = (
        (one, own.exact, "all paths of length k, attention of the whole"),
        (together, own.truncated, "paths up to k, attention recomputed"),
        (together, own.up_to, "lengths 0 to k, attention of the whole"),
        (together, own["from"][:, ::-1], "lengths L−k to L, attention of the whole"),
    )
    every = own.path_length.values
    for index, (ax, values, label) in enumerate(curves, sets.sizes["num_paths"]):
        figures.band(ax, every, values, label=label, index=index)
    whole, nothing = float(own.whole.mean()), float(own.offset.mean())
    best = max(BASELINES, key=lambda name: float(own[name].mean()))
    baseline = float(own[best].mean())
    measured = [
        (whole, f"whole model ({whole:.2f})", "black", "-"),
        (baseline, f"{best} ({baseline:.2f})", "dimgray", "--"),
        (nothing, f"no path: biases alone ({nothing:.2f})", "firebrick", "-."),
    ]
    published = [
        (setup.published[key], f"{label}, published ({setup.published[key]:g})", "tab:gray", ":")
        for key, label in (("whole", "whole model"), ("baseline", "baseline"))
    ]
    for ax, levels in ((one, measured + published), (together, measured)):
        for value, label, color, style in levels:
            ax.axhline(value, label=label, color=color, linestyle=style, linewidth=1.1)
        ax.set(xlabel="path length k", xticks=every, ylim=(0, 1.02))
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
    one.set(ylabel="token accuracy", title="one length")
    together.set(title="several lengths together")
    fig.suptitle(f"{setup.title}, {_seeds(own)}")
    return fig


def shares_figure(found: xr.Dataset, setup: Setup):
    """What the biases carry through the whole model's 1/σ, without any path (left), and what each
    length adds in its attention: exact Shapley values of the accuracy (middle), and covariance
    shares of the logits, the offset's first (right): one outside 0..1 says that parts cancel."""
    fig, axes = figures.figure(1, 3, width=3.5, height=3.0)
    own = accuracies(found)
    rest = 1 - own.covariance.sum("path_length")  # the shares of all parts sum to 1
    lengths = list(map(str, own.path_length.values))
    for ax, values, names, label in zip(
        axes[0],
        (
            np.stack([own.baseline, own.offset, own.whole], axis=1),
            own.shapley.values,
            np.column_stack([rest, own.covariance]),
        ),
        (["best\nbaseline", "offset:\nno path", "whole\nmodel"], lengths, ["offset", *lengths]),
        ("token accuracy", "Shapley value of the accuracy", "covariance share of the logits"),
        strict=True,
    ):
        style = {"capsize": 2, "color": figures.color(0), "alpha": 0.8}
        ax.bar(names, values.mean(axis=0), yerr=values.std(axis=0), **style)
        ax.axhline(0, color="black", lw=0.8)
        ax.set(ylabel=label)
    for ax in axes[0, 1:]:
        ax.set(xlabel="path length k, frozen")
    axes[0, 2].axhline(1, color="dimgray", lw=0.9, ls="--")
    axes[0, 2].tick_params("x", labelsize=8)
    ratio, total = float(own.cancellation.mean()), float(own.shapley.sum("path_length").mean())
    axes[0, 2].set_title(rf"$\Sigma\,\|C_k\| \,/\, \|Y\|$ = {ratio:.2f}")
    axes[0, 1].set_title(f"sum {total:.2f}: whole model less offset")
    axes[0, 0].set_title("what the biases carry")
    fig.suptitle(f"{setup.title}, {_seeds(own)}")
    return fig


def loss_figure(found: xr.Dataset, setup: Setup):
    """Training loss, mean and standard deviation over seeds that did not diverge; of those that did
    until they did."""
    fig, ((ax,),) = figures.figure(1, 1)
    fine, apart = (found.losses.sel(seed=own) for own in (found.fine, ~found.fine))
    epochs = fine.epoch + 1
    figures.band(ax, epochs, fine, label=_seeds(fine), marker="")
    lines = ax.plot(epochs, apart.T, color=figures.color(1), linewidth=0.8)
    for line in lines[:1]:
        line.set_label(f"diverged: {len(apart)}")
    ax.set(xlabel="epoch", ylabel="training loss", title=setup.title)
    ax.legend()
    return fig


def ranks_figure(found: xr.Dataset, setup: Setup):
    """Ranks of hidden states and attention matrices by layer, and the residual."""
    ranks = found.ranks.sel(seed=found.fine)
    groups = [["rank", "effective_rank", "attention_rank"], ["residual_ratio"]]
    fig, axes = figures.figure(1, 2)
    for ax, names in zip(axes[0], groups, strict=True):
        for index, name in enumerate(names):
            own = ranks.sel(measure=name)
            figures.band(ax, own.layer, own, name.replace("_", " "), index)
    figures.finish(list(axes[0]), "layer")
    fig.suptitle(setup.title)
    return fig


def alpha_figure(found: xr.Dataset, setup: Setup):
    """α_l, the weight of the skip, by layer."""
    alpha = found.alpha.sel(seed=found.fine).rename(sublayer="layer")
    alpha = alpha.assign_coords(layer=1 + np.arange(alpha.sizes["layer"]))
    fig, axes = labelled.facets(alpha, ylabel="α, weight of the skip")
    axes[0, 0].set(ylim=(0, 1), title=setup.title)
    return fig


def _seeds(found):
    count = found.sizes["seed"]
    return f"{count} seed{'s' * (count != 1)}"


FIGURES = Drawing.all(short_paths_figure, paths_figure, shares_figure, loss_figure) | {
    "ranks": Drawing(ranks_figure, there=lambda found, setup: "ranks" in found),
    "alpha": Drawing(alpha_figure, there=lambda found, setup: "alpha" in found),
}
