"""Attention forms: dot products, scaled or not, and additive attention against the width d_k.

Tests a claim of Vaswani et al., "Attention is all you need" (2017, section 3.2.1). For small d_k
dot-product and additive attention perform similarly. For large d_k additive attention outperforms
unscaled dot products, because their variance d_k pushes the softmax into regions with extremely
small gradients.

The experiment has two parts. The first measures scores, weights and gradients of random queries
and keys for each --d_k. The second trains networks to sort with each kind of attention for each
--trained_d_k, and compares their accuracy seed by seed. A fourth kind, additive scores that vary
as much within a row as dot products, separates the effect of the tanh from that of a small v.

    python -m experiments.run_attention_forms
    python -m experiments.run_attention_forms --d_k=8,512 --trained_d_k=64 --depth=2

Takes 275 s of CPU time on two cores. Expect additive attention to be as good as dot products at
d_k = 4 and far better at 256. There, scaled dot products are better than both, and additive scores
of the size of dot products are nearly as bad as unscaled dot products.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from experiments.attention_forms.score_functions import FORMS, LAWS, MEASURES, make_measure
from experiments.lab import (
    Executor,
    Experiment,
    Flags,
    Options,
    Run,
    RunFolder,
    cli,
    describe_figures,
    labelled,
    open_run,
    plots,
    shared_flags,
)
from experiments.train import arguments
from experiments.train.sorting import make_sorting_task
from experiments.train.train_networks import save_models, train_networks
from experiments.train.trained_tasks import (
    TrainedTask,
    diverged_seeds,
    measure_whole,
)
from experiments.verdicts import (
    Comparison,
    Row,
    TableRow,
    clipped_log10,
    format_interval,
    make_row,
    mean_with_interval,
)
from rank_collapse.report import figures
from rank_collapse.training.models import Model
from rank_collapse.training.tasks.examples import Examples

SOURCE, WIDTH = "Vaswani et al. 2017, section 3.2.1", r"width of queries and keys $d_k$"

FLAGS = arguments.make_flags(
    "attention_forms",
    shows="accuracy,part=trained",
    num_seeds=8,
    depth=1,
    num_heads=2,
    d_model=32,
    num_tokens=8,
    num_labels=10,
    n_train_data=1000,
    n_eval_data=200,
    n_epochs=30,
    batch_size=30,
    learning_rate=1e-3,
    weight_decay=0.0,
    dropout=0.0,
    no_repeat=False,
)
for name, default, text in (
    ("d_k", [2**i for i in range(1, 11)], "Widths of random queries and keys."),
    ("trained_d_k", [4, 32, 256], "Widths at which networks are trained."),
):
    shared_flags.define_numbers(FLAGS, name, default, text, lower_bound=1)
FLAGS.define("integer", "num_queries", 64, "Number of random queries and keys.", lower_bound=2)
FLAGS.define(
    "float",
    "saturation",
    0.99,
    "Largest weight from which a row counts as saturated.",
    lower_bound=0.0,
    upper_bound=1.0,
)


def make_setups(options: Options) -> dict[str, TrainedTask]:
    """Makes the training tasks of every form and width, by "trained form, d_k=d".

    Each score function is one program. Data and seeds are the same everywhere. Weights are drawn
    with variance 1/fan-in, so that queries and keys begin with unit variance, as in the paper;
    values are as wide as without d_k.

    Args:
        options: The flags.
    """
    setup = make_sorting_task(options)
    base = setup.recipe.config.replace(
        init="lecun", d_v=options.d_model // options.num_heads, scale_scores=False
    )
    setups = {}
    for d_k, (name, form) in itertools.product(ascending(options.trained_d_k), FORMS.items()):
        config = base.replace(d_qk=d_k, score=form.score)
        temperature = np.float32(form.options(d_k)["temperature"])
        setups[f"trained {name}, d_k={d_k}"] = dataclasses.replace(
            setup,
            recipe=dataclasses.replace(setup.recipe, config=config),
            floats={"network": {"temperature": temperature}},
            program=f"{form.score}, d_k={d_k}",
        )
    return setups


def ascending(widths: Sequence[int]) -> list[int]:
    """Sorts the widths of a flag, each of them once."""
    return sorted({*widths})


FormResults = dict[str, dict[str, dict[str, np.ndarray]]]  # {part: {form: {name: [s, w]}}}


def measure(options: Options, setups: Mapping[str, TrainedTask], folder: RunFolder) -> FormResults:
    """Measures random queries and keys, and trains networks with each attention function.

    Args:
        options: The flags.
        setups: Training tasks.
        folder: The run folder; results that it already holds are not computed again.

    Returns:
        {"random": from `measure_widths`, "trained": {form: {"d_k" [w], "accuracy" [s, w],
        "diverged" [s, w]}}}; widths ascend.
    """
    total = len(ascending(options.d_k)) * options.num_seeds
    with Executor(options, folder, "random queries and keys", total) as executor:
        random = measure_widths(options, executor)
    results = train_networks(options, setups, folder, measure_accuracy)
    trained, widths = {}, ascending(options.trained_d_k)
    for form in FORMS:
        by_width = [results[f"trained {form}, d_k={d_k}"] for d_k in widths]
        columns = [{"accuracy": r["accuracy"], "diverged": diverged_seeds(r)} for r in by_width]
        trained[form] = stack_widths(widths, columns)
    return {"random": random, "trained": trained}


def measure_widths(options: Options, executor: Executor) -> dict[str, dict[str, np.ndarray]]:
    """Measures scores, weights and gradients at the widths of the flags.

    Args:
        options: The flags.
        executor: Executor that computes the seeds.

    Returns:
        {form: {"d_k" [w], measure: [s, w], its law: [w]}}.
    """
    by_width, widths = [], ascending(options.d_k)  # {"form/measure": [s]} of each width
    for d_k in widths:
        measure = make_measure(d_k, options.num_queries, options.saturation)
        by_width += executor.measure(measure, {f"random d_k={d_k}": None}).values()
    results = {}
    for name, form in FORMS.items():
        measured = [{m: arrays[f"{name}/{m}"] for m in MEASURES} for arrays in by_width]
        results[name] = form.laws(widths) | stack_widths(widths, measured)
    return results


def measure_accuracy(
    task: TrainedTask, model: Model, data: dict[str, Examples], key: jax.Array
) -> dict[str, jax.Array]:
    """Measures {metric: number} of one seed."""
    return measure_whole(task, model, data, key)["whole"]


def stack_widths(widths: list[int], by_width: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stacks arrays [s] at each width to [s, w], and adds "d_k" [w]."""
    names = by_width[0]
    arrays = {n: np.stack([columns[n] for columns in by_width], axis=1) for n in names}
    return {"d_k": np.asarray(widths)} | arrays


def make_rows(results: FormResults, options: Options) -> Iterator[TableRow]:
    """Makes a row for each part, form, width and seed.

    Args:
        results: Results of `measure`.
        options: The flags.
    """
    for part, names in {"random": (*MEASURES, *LAWS), "trained": ("accuracy", "diverged")}.items():
        for form, arrays in results[part].items():
            columns = {name: np.atleast_2d(arrays[name]).T for name in names}  # [w, s] or [w, 1]
            axes = {"d_k": arrays["d_k"], "seed": range(options.num_seeds)}
            for row in labelled.product_rows(axes | columns, tuple(axes), names):
                yield {"part": part, "form": form} | row


@figures.styled
def random_figure(results: FormResults, options: Options):
    """Attention between random queries and keys of unit variance. The horizontal axes are the width
    d_k of queries and keys. Each colour is one kind of score. A row is the list of the scores, or
    of the attention weights, of one query. Upper left: variance of the scores; dotted lines show
    its formula. Upper middle: entropy of a row of weights; the dashed line is the entropy of equal
    weights. Upper right: largest weight of a row. Lower left: share of rows whose largest weight is
    nearly 1. Lower middle: norm of the gradient of a loss with respect to one query. Lower right:
    norm of the gradient of this loss with respect to the scores of one row. The loss is a sum of
    all outputs, each times a random number. In the lower middle and lower right panels, solid lines
    are the root mean square over rows, and dashed lines show the median row. Solid lines in the
    other panels are means over seeds. Bands are one standard deviation over seeds."""
    panels = {
        "variance": ("variance of the scores", "dotted: closed form"),
        "entropy": ("entropy of a row, nats", f"dashed: uniform, log {options.num_queries}"),
        "largest_weight": ("largest weight of a row", ""),
        "saturated": (f"share of rows with a weight > {options.saturation:g}", ""),
        "query_gradient": ("gradient to a query, norm", "root mean square; dashed: median row"),
        "score_gradient": (
            "gradient to the scores of a row",
            "root mean square; dashed: median row",
        ),
    }
    fig, axes = figures.figure(2, 3, width=3.9, height=3.0)
    for ax, (name, (label, title)) in zip(axes.flat, panels.items(), strict=True):
        scale = "log" if name == "variance" or name.endswith("gradient") else "linear"
        draw = figures.log_band if scale == "log" else figures.band
        for index, (form, arrays) in enumerate(results["random"].items()):
            d_k, style = arrays["d_k"], {"color": figures.color(index), "lw": 1}
            draw(ax, d_k, arrays[name], FORMS[form].label, index)
            if name == "variance":
                ax.plot(d_k, arrays["variance_law"], ls=":", **style)
            if name.endswith("gradient"):
                ax.plot(d_k, np.median(arrays[f"median_{name}"], axis=0), ls="--", **style)
        ax.set(xlabel=WIDTH, ylabel=label)
        ax.set_title(title, fontsize=8)
        ax.set_xscale("log", base=2)
        ax.set_yscale(scale)
    axes[0, 1].axhline(np.log(options.num_queries), color=figures.DARK_GREY, lw=0.9, ls="--")
    axes[1, 0].set_ylim(-0.02, 1.02)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return fig


def accuracy_gain(results: FormResults, form: str) -> np.ndarray:
    """Computes the accuracy of a form minus the accuracy of dot products, seed by seed, [s, w]."""
    trained = results["trained"]
    return trained[form]["accuracy"].astype(float) - trained["dot"]["accuracy"].astype(float)


@figures.styled
def trained_figure(results: FormResults):
    """Left: accuracy of each seed after training (vertical axis) by the width d_k of queries and
    keys (horizontal axis). Each colour is one kind of score, and black bars are means over seeds.
    Right: accuracy with the other kinds of scores, minus the accuracy with unscaled dot products at
    the same seed (vertical axis), by d_k (horizontal axis). Markers are means over seeds, and bars
    are 95 % intervals of these means."""
    fig, ((accuracy, less),) = figures.figure(1, 2, width=4.4)
    widths = list(map(str, results["trained"]["dot"]["d_k"]))
    for i, (index, (name, form)) in itertools.product(range(len(widths)), enumerate(FORMS.items())):
        values = results["trained"][name]["accuracy"][:, i]
        label = None if i else form.label  # one entry of the legend for each form
        x = i + 0.18 * (index - 1.5)
        accuracy.plot(
            np.full(len(values), x),
            values,
            ls="none",
            alpha=0.6,
            label=label,
            color=figures.color(index),
            marker=figures.MARKERS[index],
        )
        accuracy.plot([x - 0.07, x + 0.07], 2 * [np.mean(values)], color="black", lw=1.2)
        if name != "dot":
            mean, interval = mean_with_interval(accuracy_gain(results, name)[:, i])
            plots.draw_interval(less, i + 0.18 * (index - 2), mean, interval, label, index)
    less.axhline(0, color=figures.DARK_GREY, lw=0.9, ls="--")
    labels = "accuracy of letters after training", "accuracy less that of dot products"
    for ax, label in zip((accuracy, less), labels, strict=True):
        ax.set_xticks(range(len(widths)), widths)
        ax.set(xlabel=WIDTH, ylabel=label, xlim=(-0.6, len(widths) - 0.4))
    fig.legend(*accuracy.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return fig


def judge_claims(results: FormResults) -> Iterator[Row]:
    """Tests which form saturates, which has small gradients, and which is ahead after training.

    Networks of a single width say nothing about small widths.

    Args:
        results: Results of `measure`.
    """
    dot, scaled = results["random"]["dot"], results["random"]["scaled_dot"]
    dot_gradients = clipped_log10(dot["median_score_gradient"][:, -1])  # at the largest width, [s]
    scaled_gradients = clipped_log10(scaled["median_score_gradient"][:, -1])
    text, widths = f"d_k = {dot['d_k'][-1]}", results["trained"]["dot"]["d_k"]
    yield make_row("saturation", text, (dot["saturated"] - scaled["saturated"])[:, -1])
    yield make_row("small gradients", text, dot_gradients - scaled_gradients)
    smallest = [("additive small", "additive", 0)] if len(widths) > 1 else []
    largest = [("additive", "additive", -1), ("additive form", "additive_matched", -1)]
    for key, form, place in smallest + largest:
        gains = accuracy_gain(results, form)[:, place]
        yield make_row(key, f"sorting, d_k = {widths[place]}", gains)


def compare_results(results: FormResults) -> Iterator[Comparison]:
    """Compares the variance with its law, and lists accuracies at every width.

    Args:
        results: Results of `measure`.
    """
    random = results["random"]["dot"]
    variance, d_k = random["variance"][:, -1], int(random["d_k"][-1])
    text, law = f"variance of dot products at d_k = {d_k}", f"{SOURCE}, footnote 4"
    widths = results["trained"]["dot"]["d_k"]
    yield Comparison(text, format_interval(mean_with_interval(variance), 1), d_k, law)
    for (i, width), form in itertools.product(enumerate(widths), list(FORMS)[1:]):
        is_published = form == "additive" and i == 0 and len(widths) > 1
        yield Comparison(
            f"accuracy at d_k = {width}, {form.replace('_', ' ')} less dot products",
            format_interval(mean_with_interval(accuracy_gain(results, form)[:, i])),
            "alike" if is_published else None,
        )


EXPERIMENT = Experiment(
    order=110,
    title="Attention functions against d_k",
    brief="scaled dot products, unscaled dot products and additive attention, for several widths "
    "d_k of queries and keys: saturation, gradients, and accuracy after training",
    claim=f"{SOURCE}, compares ways to compute attention scores from queries and keys. The width "
    "of queries and keys is d_k. For small d_k, networks with additive scores and networks with "
    "dot products perform similarly. For large d_k, networks with additive scores perform better "
    "than networks with unscaled dot products. The paper gives a reason: unscaled dot products "
    "have the variance d_k, and such large scores push the softmax into regions of extremely small "
    "gradients.",
    presets={
        "quick": "--d_k=2,32,1024 --trained_d_k=256 --num_seeds=6 --n_epochs=12 --n_train_data=600",
        "reported": "--seed=3000 --num_seeds=6",
        "tiny": f"{arguments.TINY} --depth=1 --num_labels=4 --num_queries=4 --d_k=2 "
        "--trained_d_k=2",
    },
    figures=describe_figures(random_figure, trained_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_setups) as run:
        for point in run.measure(measure):
            results = point.results
            point.save_table(make_rows(results, point.options))
            point.save_figure("random", random_figure, results, point.options)
            point.save_figure("trained", trained_figure, results)
            point.save_claims(judge_claims(results))
            point.save_comparisons(compare_results(results))
            save_models(point, point.setup)
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
