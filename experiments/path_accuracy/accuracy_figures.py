"""The figures of accuracy by path length."""

import numpy as np
import xarray as xr

from experiments.lab import labelled
from experiments.path_accuracy.accuracy_results import accuracies, largest_sets
from experiments.path_accuracy.evaluation import BASELINES
from experiments.train.trained_tasks import TrainedTask
from rank_collapse.printed import format_count
from rank_collapse.report import figures


@figures.styled
def short_paths_figure(results: xr.Dataset, task: TrainedTask):
    """Accuracy (vertical axis) by path length k (horizontal axis), which is the number of heads on
    a path. One line shows the network without paths longer than k. The other line shows sampled
    paths of length k alone, without all other paths. Lines are means and bands are standard
    deviations over seeds. Horizontal lines show the accuracy of the full model and of a guess."""
    shares = accuracies(results)
    fig, ((ax,),) = figures.figure(1, 1)
    lengths = shares.path_length.values
    figures.band(ax, lengths, shares.truncated, "without paths longer than k")
    sets = largest_sets(shares).dropna("path_length", how="all").transpose("seed", ...)
    label = f"{int(sets.num_paths)} sampled paths of length k"
    figures.band(ax, sets.path_length, sets, label, 1)
    levels = ((shares.whole, "full model", "-"), (shares.baseline, "guess", "--"))
    for value, text, dashes in levels:
        ax.axhline(float(value.mean()), label=text, color=figures.DARK_GREY, linestyle=dashes, lw=1)
    ax.set(xlabel="path length k, in layers", ylabel="accuracy", ylim=(0, 1.02), title=task.title)
    ax.set_xticks(lengths)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


@figures.styled
def paths_figure(results: xr.Dataset, task: TrainedTask):
    """Accuracy (vertical axis) by path length k (horizontal axis). Left: paths of length k alone,
    either 5 or 20 sampled paths or the exact sum over all paths of this length. Sampled paths
    compute attention weights from their own states, and the exact sum uses the attention weights of
    the full model. Right: the truncated network, the exact sum over the lengths 0 to k, and the
    exact sum over the k + 1 longest lengths. The truncated network computes its attention weights
    without paths longer than k. Horizontal lines show the accuracy of the full model, of a guess
    and of the biases alone. Dotted lines on the left are published accuracies. Bars and bands are
    standard deviations over seeds."""
    fig, axes = figures.figure(1, 2, width=4.0, height=4.2, sharey=True)
    (sampled_ax, lengths_ax), shares = axes[0], accuracies(results)
    sets = shares.sampled.mean("repeat")
    for index, (point, accuracy) in enumerate(labelled.iterate_points(sets, "seed", "path_length")):
        size = point["num_paths"]
        sampled_ax.errorbar(
            accuracy.path_length + 0.08 * (index - 0.5),
            accuracy.mean("seed"),
            accuracy.std("seed"),
            label=f"{format_count(size, 'sampled path')}, recomputed",
            capsize=2,
            color=figures.color(index),
            marker=figures.MARKERS[index],
            linewidth=1.0,
        )
    curves = (
        (sampled_ax, shares.exact, "all paths of length k, attention of the full model"),
        (lengths_ax, shares.truncated, "paths up to k, attention recomputed"),
        (lengths_ax, shares.up_to, "lengths 0 to k, attention of the full model"),
        (lengths_ax, shares["from"][:, ::-1], "lengths L−k to L, attention of the full model"),
    )
    lengths = shares.path_length.values
    for index, (ax, values, label) in enumerate(curves, sets.sizes["num_paths"]):
        figures.band(ax, lengths, values, label=label, index=index)
    whole_accuracy, offset = float(shares.whole.mean()), float(shares.offset.mean())
    best = max(BASELINES, key=lambda name: float(shares[name].mean()))
    baseline = float(shares[best].mean())
    measured = [
        (whole_accuracy, f"full model ({whole_accuracy:.2f})", "black", "-"),
        (baseline, f"{best} ({baseline:.2f})", "dimgray", "--"),
        (offset, f"no path: biases alone ({offset:.2f})", "firebrick", "-."),
    ]
    published = [
        (task.published[key], f"{label}, published ({task.published[key]:g})", "tab:gray", ":")
        for key, label in (("whole", "full model"), ("baseline", "baseline"))
    ]
    for ax, levels in ((sampled_ax, measured + published), (lengths_ax, measured)):
        for value, label, color, style in levels:
            ax.axhline(value, label=label, color=color, linestyle=style, linewidth=1.1)
        ax.set(xlabel="path length k", xticks=lengths, ylim=(0, 1.02))
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
    sampled_ax.set(ylabel="token accuracy", title="one length")
    lengths_ax.set(title="several lengths together")
    fig.suptitle(f"{task.title}, {count_seeds(shares)}")
    return fig


@figures.styled
def shares_figure(results: xr.Dataset, task: TrainedTask):
    """Left: accuracy of the best baseline (a guess), of the biases alone, and of the full model. If
    all paths are removed, the biases still give an output, which is called the offset. The final
    norm of the offset divides by the standard deviation that the states have in the full model.
    Middle: accuracy that each path length adds, with the attention weights of the full model. It is
    a Shapley value: we add the path lengths one after another, and take the mean of the gain over
    all orders. Right: share of the offset and of each path length in the logits, which is the
    covariance of its contribution with the logits, divided by the variance of the logits. The title
    of the panel has the sum of the norms of all contributions ‖C_k‖, divided by the norm ‖Y‖ of the
    logits. A share below 0 or above 1 means that contributions cancel. Error bars are standard
    deviations over seeds."""
    fig, axes = figures.figure(1, 3, width=3.5, height=3.0)
    shares = accuracies(results)
    offset_share = 1 - shares.covariance.sum("path_length")  # the shares of all parts sum to 1
    lengths = list(map(str, shares.path_length.values))
    panels = (
        (
            np.stack([shares.baseline, shares.offset, shares.whole], axis=1),
            ["best\nbaseline", "offset:\nno path", "full\nmodel"],
            "token accuracy",
        ),
        (shares.shapley.values, lengths, "Shapley value of the accuracy"),
        (
            np.column_stack([offset_share, shares.covariance]),
            ["offset", *lengths],
            "covariance share of the logits",
        ),
    )
    for ax, (values, names, label) in zip(axes[0], panels, strict=True):
        style = {"capsize": 2, "color": figures.color(0), "alpha": 0.8}
        ax.bar(names, values.mean(axis=0), yerr=values.std(axis=0), **style)
        ax.axhline(0, color="black", lw=0.8)
        ax.set(ylabel=label)
    for ax in axes[0, 1:]:
        ax.set(xlabel="path length k, frozen")
    axes[0, 2].axhline(1, color="dimgray", lw=0.9, ls="--")
    axes[0, 2].tick_params("x", labelsize=8)
    ratio = float(shares.cancellation.mean())
    total = float(shares.shapley.sum("path_length").mean())
    axes[0, 2].set_title(rf"$\Sigma\,\|C_k\| \,/\, \|Y\|$ = {ratio:.2f}")
    axes[0, 1].set_title(f"sum {total:.2f}: full model minus offset")
    axes[0, 0].set_title("what the biases carry")
    fig.suptitle(f"{task.title}, {count_seeds(shares)}")
    return fig


@figures.styled
def loss_figure(results: xr.Dataset, task: TrainedTask):
    """Training loss (vertical axis) by epoch (horizontal axis). The line is the mean and the band
    is the standard deviation over the seeds whose training did not diverge. Each seed whose
    training diverged has a line of its own, which ends at the epoch of the divergence."""
    if not results.losses.size:  # no epoch
        return None
    fig, ((ax,),) = figures.figure(1, 1)
    fine = results.losses.sel(seed=results.fine)
    diverged = results.losses.sel(seed=~results.fine)
    epochs = fine.epoch + 1
    figures.band(ax, epochs, fine, label=count_seeds(fine), marker="")
    lines = ax.plot(epochs, diverged.T, color=figures.color(1), linewidth=0.8, marker=".")
    for line in lines[:1]:
        line.set_label(f"diverged: {len(diverged)}")
    ax.set(xlabel="epoch", ylabel="training loss", title=task.title)
    figures.integer_ticks(ax)
    ax.legend()
    return fig


def count_seeds(values: xr.Dataset | xr.DataArray) -> str:
    """Returns the number of seeds in words, "3 seeds"."""
    return format_count(values.sizes["seed"], "seed")
