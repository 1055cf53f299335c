"""Attention forms: dot products, scaled or not, and additive attention against the width d_k.

The claim of Vaswani et al., "Attention is all you need" (2017, section 3.2.1): for small d_k the
two functions perform similarly; for large d_k additive attention outperforms unscaled dot products,
because their variance d_k pushes the softmax into regions of extremely small gradients.
Two parts: scores, weights and gradients on random queries and keys of each --d_k, and the accuracy
of networks that have learned to sort with each function at each --trained_d_k, seed by seed. A
fourth function, additive scores that vary as much within a row as dot products, separates the
effect of the tanh from that of a small v.

    python -m experiments.run_attention_forms
    python -m experiments.run_attention_forms --d_k=8,512 --trained_d_k=64 --depth=2

Two CPU cores: 275 s of CPU time. Expected: additive attention as good as dot products at d_k = 4
and far better at 256. There scaled dot products are better than both, and additive scores of the
size of dot products are nearly as bad as unscaled dot products.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.lab import cli, labelled, vocabulary
from experiments.lab.executor import Executor
from experiments.lab.experiment import Experiment, Shown, name_figures, open_run
from experiments.lab.flags import Flags
from experiments.lab.folder import RunFolder
from experiments.lab.statements import make_row
from experiments.note.attention_forms.measure import FORMS, LAWS, MEASURES, make_measure
from experiments.train import arguments
from experiments.train.sorting import sorting_setup
from experiments.train.training import TrainedTask, diverged, model_files, results_of, whole_model
from experiments.verdicts import Comparison
from experiments.verdicts.statistics import clipped_log10, format_interval, mean_with_interval
from rank_collapse.report import figures

SOURCE, WIDTH = "Vaswani et al. 2017, section 3.2.1", r"width of queries and keys $d_k$"

FLAGS = arguments.make_flags(
    "attention_forms",
    shows="accuracy,part=trained",
    num_seeds=8,
    no_repeat=False,
    dropout=0.0,
    depth=1,
    d_model=32,
    n_epochs=30,
)
for name, default, text in (
    ("d_k", [2**i for i in range(1, 11)], "Widths of random queries and keys."),
    ("trained_d_k", [4, 32, 256], "Widths at which networks are trained."),
):
    vocabulary.define_numbers(FLAGS, name, default, text, lower_bound=1)
define = cli.definer(FLAGS)
define("integer", "num_queries", 64, "Random queries, and as many keys.", lower_bound=2)
text = "Largest weight from which a row counts as saturated."
define("float", "saturation", 0.99, text, lower_bound=0.0, upper_bound=1.0)


def measure_all(options: Flags, setup: Flags, run: RunFolder) -> dict[str, Any]:
    """{"random": what `measure_widths` gives, "trained": {form: {"d_k" [w], "accuracy" [s, w],
    "diverged" [s, w]}}}."""
    total = len(options.d_k) * options.num_seeds
    with Executor(options, run, "random queries and keys", total) as executor:
        random = measure_widths(options, executor)
    found, widths = results_of(options, setups_of(options), run, accuracy_of), options.trained_d_k
    shown = {n: {"accuracy": o["accuracy"], "diverged": diverged(o)} for n, o in found.items()}
    return {
        "random": random,
        "trained": {
            form: stacked(widths, [shown[f"trained {form}, d_k={d_k}"] for d_k in widths])
            for form in FORMS
        },
    }


def measure_widths(options: Flags, executor: Executor) -> dict[str, dict[str, np.ndarray]]:
    """{form: {"d_k" [w], measure: [s, w], its law: [w]}} at the widths of the flags."""
    by_width = []
    for d_k in options.d_k:
        measure = make_measure(d_k, options.num_queries, options.saturation)
        by_width += executor.measure(measure, {f"random d_k={d_k}": None}).values()
    return {
        name: form.laws(options.d_k)
        | stacked(options.d_k, [{m: own[f"{name}/{m}"] for m in MEASURES} for own in by_width])
        for name, form in FORMS.items()
    }


def setups_of(options: Flags) -> dict[str, TrainedTask]:
    """{"trained form, d_k=d": what is trained} of every form and width; a score is one program.

    The same data and seeds everywhere. Weights are drawn with variance 1/fan-in, so that queries
    and keys begin with unit variance, as the note has them; values stay as wide as without d_k.
    """
    setup = sorting_setup(options)
    base = setup.recipe.config.replace(
        init="lecun", d_v=options.d_model // options.num_heads, scale_scores=False
    )

    def setup_of(d_k, form):
        config = base.replace(d_qk=d_k, score=form.score)
        return dataclasses.replace(
            setup,
            recipe=dataclasses.replace(setup.recipe, config=config),
            floats={"network": {"temperature": np.float32(form.options(d_k)["temperature"])}},
            program=f"{form.score}, d_k={d_k}",
        )

    every = itertools.product(options.trained_d_k, FORMS.items())
    return {f"trained {name}, d_k={d_k}": setup_of(d_k, form) for d_k, (name, form) in every}


def accuracy_of(setup: TrainedTask, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """{metric: number} of one seed."""
    return whole_model(setup, model, data, key)["whole"]


def stacked(widths: list[int], by_width: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays [s, w] of those [s] at each width, and "d_k" [w]."""
    arrays = {n: np.stack([own[n] for own in by_width], axis=1) for n in by_width[0]}
    return {"d_k": np.asarray(widths)} | arrays


def rows_of(results, options):
    """One row per part, form, width and seed."""
    for part, names in {"random": (*MEASURES, *LAWS), "trained": ("accuracy", "diverged")}.items():
        for form, found in results[part].items():
            columns = {name: np.atleast_2d(found[name]).T for name in names}  # [w, s] or [w, 1]
            axes = {"d_k": found["d_k"], "seed": range(options.num_seeds)}
            for row in labelled.product_rows(axes | columns, tuple(axes), names):
                yield {"part": part, "form": form} | row


def ahead(results: dict[str, Any], form: str) -> np.ndarray:
    """Accuracy of a form less that of dot products, seed by seed, at each width: [s, w]."""
    own, dot = (results["trained"][name]["accuracy"].astype(float) for name in (form, "dot"))
    return own - dot


def random_figure(results, options):
    """Random queries and keys of unit variance, means and standard deviations over seeds. Gradients
    of a loss that moves every output by as much, to a query moved by its own size and to the
    scores; solid: root mean square over rows, dashed: median row."""
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
        for index, (form, found) in enumerate(results["random"].items()):
            d_k, style = found["d_k"], {"color": figures.color(index), "lw": 1}
            draw(ax, d_k, found[name], FORMS[form].label, index)
            if name == "variance":
                ax.plot(d_k, found["variance_law"], ls=":", **style)
            if name.endswith("gradient"):
                ax.plot(d_k, np.median(found[f"median_{name}"], axis=0), ls="--", **style)
        ax.set(xlabel=WIDTH, ylabel=label)
        ax.set_title(title, fontsize=8)
        ax.set_xscale("log", base=2)
        ax.set_yscale(scale)
    axes[0, 1].axhline(np.log(options.num_queries), color="#555555", lw=0.9, ls="--")
    axes[1, 0].set_ylim(-0.02, 1.02)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return fig


def trained_figure(results, options):
    """Left: accuracy of every seed after training, black: means. Right: the same less that of dot
    products without scaling, paired by seed, with 95 % intervals."""
    fig, ((accuracy, less),) = figures.figure(1, 2, width=4.4)
    widths = list(map(str, results["trained"]["dot"]["d_k"]))
    for i, (index, (name, form)) in itertools.product(range(len(widths)), enumerate(FORMS.items())):
        values, label = results["trained"][name]["accuracy"][:, i], None if i else form.label
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
            mean, ends = mean_with_interval(ahead(results, name)[:, i])
            figures.draw_interval(less, i + 0.18 * (index - 2), mean, ends, label, index)
    less.axhline(0, color="#555555", lw=0.9, ls="--")
    labels = "accuracy of letters after training", "accuracy less that of dot products"
    for ax, label in zip((accuracy, less), labels, strict=True):
        ax.set_xticks(range(len(widths)), widths)
        ax.set(xlabel=WIDTH, ylabel=label, xlim=(-0.6, len(widths) - 0.4))
    fig.legend(*accuracy.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return fig


def claims(results, options):
    """What saturates, whose gradients are small, and who is ahead after training."""
    dot, scaled = (results["random"][form] for form in ("dot", "scaled_dot"))
    gradients = (clipped_log10(own["median_score_gradient"][:, -1]) for own in (dot, scaled))
    where, widths = f"d_k = {options.d_k[-1]}", results["trained"]["dot"]["d_k"]
    yield make_row("saturation", where, (dot["saturated"] - scaled["saturated"])[:, -1])
    yield make_row("small gradients", where, np.subtract(*gradients))
    values = dict(zip(map(int, widths), ahead(results, "additive_matched").T, strict=True))
    for width, key in {min(values): "additive small", max(values): "additive"}.items():
        yield make_row(key, f"sorting, d_k = {width}", values[width])


def compare(results, options):
    """The law of the variance, and accuracies at every width."""
    variance, d_k = results["random"]["dot"]["variance"][:, -1], options.d_k[-1]
    text, law = f"variance of dot products at d_k = {d_k}", f"{SOURCE}, footnote 4"
    widths = results["trained"]["dot"]["d_k"]
    yield Comparison(text, format_interval(mean_with_interval(variance), 1), d_k, law)
    for (i, width), form in itertools.product(enumerate(widths), list(FORMS)[1:]):
        yield Comparison(
            f"accuracy at d_k = {width}, {form.replace('_', ' ')} less dot products",
            format_interval(mean_with_interval(ahead(results, form)[:, i])),
            "alike" if width == min(widths) and form == "additive" else None,
        )


EXPERIMENT = Experiment(
    order=110,
    title="Attention functions against d_k",
    brief="dot products, scaled or not, and additive attention against d_k: saturation, "
    "gradients, accuracy after training",
    claim=f"{SOURCE}: for small d_k additive and dot-product attention perform similarly, for "
    "large d_k additive attention outperforms dot products without scaling, whose variance d_k "
    "pushes the softmax into regions of extremely small gradients.",
    presets={
        "quick": "--d_k=2,32,1024 --trained_d_k=256 --num_seeds=6 --n_epochs=12 --n_train_data=600",
        "paper": "",
        "tiny": f"{arguments.TINY} --depth=1 --num_labels=4 --num_queries=4 --d_k=2 "
        "--trained_d_k=2",
    },
)
FIGURES = name_figures(random_figure, trained_figure)


def files(results: Any, options: Flags, run: RunFolder) -> dict[str, Callable[[], bytes]]:
    """Makes the files of trained weights, where they were kept."""
    return model_files(results, setups_of(options), run)


def main(options: Flags) -> Shown:
    """Measures what the run lacks, and shows it."""
    with open_run(options) as run:
        points = run.measure(measure_all)
        return run.publish(
            points,
            table=rows_of,
            figures=FIGURES,
            claims=claims,
            compare=compare,
            files=files,
        )


if __name__ == "__main__":
    cli.run(main, FLAGS)
