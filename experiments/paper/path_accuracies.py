"""Accuracies of paths by length: what follows from them, seed by seed, and their figures."""

import numpy as np
import xarray as xr

from experiments.lab import labelled
from experiments.lab.experiment import Finding, name_figures
from experiments.train.training import TrainedTask
from rank_collapse.report import figures

BASELINES = ["majority baseline", "random baseline"]


def sampled_as(setup: TrainedTask) -> str:
    """What the sampled sets are called."""
    return "all heads" if setup.options.all_heads else "sampled"


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
    rest = labelled.apply_along(lambda a: (a[..., -1:] - a[..., :-1]).sum(-1), kept, "path_length")
    return own.assign(
        baseline=baseline,
        baseline_error=baseline_error,
        learned=learned,
        fell_below=below,
        carried=rest / (end - baseline).where(learned & ~below),
        enough=(kept >= own.whole - error).argmax("path_length").where(learned),
    )


def most_sampled(own: xr.Dataset, setup: TrainedTask) -> xr.DataArray:
    """Accuracy of the largest sampled sets by path length, mean over repeats."""
    sets = own[sampled_as(setup)].mean("repeat")
    return sets.sel(num_paths=sets.num_paths.max())


def finding(done: str, found: xr.Dataset, setup: TrainedTask) -> Finding | None:
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


def short_paths_figure(found: xr.Dataset, setup: TrainedTask):
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


def paths_figure(found: xr.Dataset, setup: TrainedTask):
    """Accuracy by path length. Left: sampled sets, which attend from their own states, beside the
    exact sum over all paths of the length in the whole model's attention. Right: the network
    without paths longer than k, the sums of the k + 1 shortest and of the k + 1 longest lengths.
    Bars and bands: standard deviation over seeds."""
    fig, axes = figures.figure(1, 2, width=4.0, height=4.2, sharey=True)
    (one, together), own = axes[0], accuracies(found)
    sets = own[sampled_as(setup)].mean("repeat")
    for index, (point, v) in enumerate(labelled.iterate_points(sets, "seed", "path_length")):
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


def shares_figure(found: xr.Dataset, setup: TrainedTask):
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


def loss_figure(found: xr.Dataset, setup: TrainedTask):
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


def ranks_figure(found: xr.Dataset, setup: TrainedTask):
    """Ranks of hidden states and attention matrices by layer, and the residual."""
    if "ranks" not in found:
        return None
    ranks = found.ranks.sel(seed=found.fine)
    groups = [["rank", "effective_rank", "attention_rank"], ["residual_ratio"]]
    fig, axes = figures.figure(1, 2)
    for ax, names in zip(axes[0], groups, strict=True):
        for index, name in enumerate(names):
            own = ranks.sel(measure=name)
            figures.band(ax, own.layer, own, name.replace("_", " "), index)
    figures.finish_axes(list(axes[0]), "layer")
    fig.suptitle(setup.title)
    return fig


def alpha_figure(found: xr.Dataset, setup: TrainedTask):
    """α_l, the weight of the skip, by layer."""
    if "alpha" not in found:
        return None
    alpha = found.alpha.sel(seed=found.fine).rename(sublayer="layer")
    alpha = alpha.assign_coords(layer=1 + np.arange(alpha.sizes["layer"]))
    fig, axes = labelled.plot_facets(alpha, ylabel="α, weight of the skip")
    axes[0, 0].set(ylim=(0, 1), title=setup.title)
    return fig


def _seeds(found):
    count = found.sizes["seed"]
    return f"{count} seed{'s' * (count != 1)}"


FIGURES = name_figures(
    short_paths_figure, paths_figure, shares_figure, loss_figure, ranks_figure, alpha_figure
)
