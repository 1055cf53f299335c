"""How run_attention_forms stands in the report."""

import math
from typing import Any

from experiments.attention_forms.results import between
from experiments.shell.entry import Entry
from rank_collapse.report.claims import ABOVE_ZERO, Claim, of_interval
from rank_collapse.report.page import Comparison

SOURCE = "Vaswani et al. 2017, section 3.2.1"


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """The law of the variance, the gradients' two averages, and accuracies at every width."""
    dot, scaled = (summary["random"][form] for form in ("dot", "scaled_dot"))
    d_k = dot["d_k"][-1]
    overall = [f["score_gradient"][-1][0] for f in (dot, scaled)]
    rows = [
        Comparison(
            f"variance of dot products at d_k = {d_k}", between(dot["variance"][-1], 1), d_k,
            f"{SOURCE}, footnote 4",
        ),
        Comparison(
            f"softmax gradient at d_k = {d_k}, root mean square over rows, unscaled and scaled",
            f"{overall[0]:.2g}, {overall[1]:.2g}",
        ),
    ]  # fmt: skip
    for width, found in summary["trained"].items():
        ahead, control = found["ahead"]["additive - dot"], found["ahead"]["additive_unscaled - dot"]
        name = f"accuracy at d_k = {width}"
        alike = "alike" if int(width) == min(map(int, summary["trained"])) else None
        rows += [
            Comparison(
                f"{name}, additive less dot products", between(ahead), alike, "paired by seed"
            ),
            Comparison(
                f"{name}, additive times √d_k less dot products", between(control),
                note="is it the tanh, or the size of v?",
            ),
        ]  # fmt: skip
    return rows


def claims(summary: dict[str, Any]) -> list[Claim]:
    """What saturates, whose gradients are small, and who is ahead after training."""
    dot, scaled = (summary["random"][form] for form in ("dot", "scaled_dot"))
    d_k, threshold = dot["d_k"][-1], summary["saturation"]
    widest = max(summary["trained"], key=int)
    share, typical = (
        [f[name][-1] for f in (dot, scaled)] for name in ("saturated", "median_score_gradient")
    )
    found = [
        (
            share[0], (_end(share[1], 2), math.inf), "pushes the softmax into saturation",
            f"share of rows with a weight > {threshold:g} at d_k = {d_k}, unscaled",
            f"no more than scaled, {between(share[1])}",
        ),
        (
            typical[0], (-math.inf, _end(typical[1], 1)), "makes its gradients extremely small",
            f"softmax gradient of the median row at d_k = {d_k}, unscaled",
            f"no less than scaled, {between(typical[1])}",
        ),
        (
            summary["trained"][widest]["ahead"]["additive - dot"], ABOVE_ZERO,
            "lets additive attention outperform them",
            f"accuracy at d_k = {widest}, additive less unscaled dot products, paired by seed", "0",
        ),
    ]  # fmt: skip
    return [
        of_interval(
            mean[0], None if mean[1] is None else (mean[1], mean[2]), summary["seeds"], claimed,
            statement=f"The variance d_k of unscaled dot products {what}.", section=SOURCE,
            statistic=statistic, null=null,
        )
        for mean, claimed, what, statistic, null in found
    ]  # fmt: skip


def _end(mean, index):
    """An end of an interval, or the mean where there is none."""
    return mean[0] if mean[index] is None else mean[index]


def reading(summary: dict[str, Any]) -> str:
    """What the numbers say against the note."""
    width = max(summary["trained"], key=int)
    ahead = summary["trained"][width]["ahead"]
    accuracy = {form: mean[0] for form, mean in summary["trained"][width]["accuracy"].items()}
    won, control = ahead["additive - dot"], ahead["additive_unscaled - dot"]
    said = (
        f"At d_k = {width} a network sorts {accuracy['additive']:.2f} of the letters with additive "
        f"attention, {accuracy['dot']:.2f} with dot products that are not scaled, "
        f"{accuracy['scaled_dot']:.2f} with scaled ones, and {accuracy['additive_unscaled']:.2f} "
        "with additive scores times √d_k"
    )
    if won[1] is None or won[1] <= 0:
        said += ": additive attention is not ahead of dot products, as far as these seeds show."
    elif control[0] < won[0] / 2:
        said += ": it is the size of the scores, which a small v keeps down, more than the form."
    else:
        said += ": the form is ahead, whatever the size of its scores."
    dot = summary["random"]["dot"]
    typical, overall = dot["median_score_gradient"][-1][0], dot["score_gradient"][-1][0]
    return said + (
        f" Before training the softmax gradient of a typical row of dot products is {typical:.1g} "
        f"at d_k = {dot['d_k'][-1]}, its root mean square over rows {overall:.2g}"
        f"{': few rows, near a tie, carry nearly all of it' if typical < overall / 10 else ''}."
    )


ENTRY = Entry(
    title="Attention functions against d_k",
    claim=f"{SOURCE}: for small d_k additive and dot-product attention perform similarly, for "
    "large d_k additive attention outperforms dot products without scaling, whose variance d_k "
    "pushes the softmax into regions of extremely small gradients.",
    presets={
        "quick": ("--num_seeds=4", "--d_k=2", "--d_k=32", "--d_k=512", "--trained_d_k=128",
                  "--n_epochs=12", "--n_train_data=600"),
        "paper": (),
    },
    claims=claims,
    compare=compare,
    reading=reading,
    captions={
        "random": "Random queries and keys of unit variance, means and standard deviations over "
        "seeds. Gradients of a loss that moves every output by as much, to a query moved by its "
        "own size and to the scores; solid: root mean square over rows, dashed: median row.",
        "trained": "Left: accuracy of every seed after training, black: means. Right: the same "
        "less that of dot products without scaling, paired by seed, with 95 % intervals.",
    },
)  # fmt: skip
