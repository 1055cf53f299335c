"""How run_attention_forms stands in the report."""

from typing import Any

from experiments.attention_forms.results import between
from experiments.shell.entry import Entry
from rank_collapse.report.page import Comparison

SOURCE = "Vaswani et al. 2017, section 3.2.1"


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """The law of the variance, what saturates, and who is ahead after training."""
    random, threshold = summary["random"], summary["saturation"]
    dot, scaled = random["dot"], random["scaled_dot"]
    d_k = dot["d_k"][-1]
    variance, share = dot["variance"][-1][0], dot["saturated"][-1][0]
    typical = [f["median_score_gradient"][-1][0] for f in (dot, scaled)]
    overall = [f["score_gradient"][-1][0] for f in (dot, scaled)]
    rows = [
        Comparison(
            f"variance of dot products at d_k = {d_k}", variance, d_k,
            abs(variance / d_k - 1) < 0.05, f"{SOURCE}, footnote 4; agrees within 5 %",
        ),
        Comparison(
            f"share of rows with a weight > {threshold:g} at d_k = {d_k}, unscaled and scaled",
            f"{share:.2f}, {scaled['saturated'][-1][0]:.2f}", "saturated, not",
            share > scaled["saturated"][-1][0], SOURCE,
        ),
        Comparison(
            f"softmax gradient of a typical row at d_k = {d_k}, unscaled and scaled",
            f"{typical[0]:.2g}, {typical[1]:.2g}", "extremely small, not",
            typical[0] < 0.1 * typical[1],
            f"agrees below a tenth; root mean square over rows {overall[0]:.2g}, {overall[1]:.2g}",
        ),
    ]  # fmt: skip
    return rows + [c for width in summary["trained"] for c in _ahead(summary, int(width))]


def _ahead(summary, d_k):
    """Additive attention against dot products at one width, and the control."""
    found = summary["trained"][str(d_k)]["ahead"]
    widths = [int(w) for w in summary["trained"]]
    ahead, control = found["additive - dot"], found["additive_unscaled - dot"]
    claim, agrees = None, None
    if ahead[1] is not None and len(widths) > 1 and d_k == min(widths):
        claim, agrees = "alike", ahead[1] <= 0 <= ahead[2]
    elif ahead[1] is not None and d_k == max(widths):
        claim, agrees = "additive ahead", ahead[1] > 0
    name = f"accuracy at d_k = {d_k}"
    return [
        Comparison(
            f"{name}, additive less dot products", between(ahead), claim, agrees,
            "paired by seed, 95 % interval",
        ),
        Comparison(
            f"{name}, additive times √d_k less dot products", between(control), None, None,
            "no claim: is it the tanh, or the size of v?",
        ),
    ]  # fmt: skip


def reading(summary: dict[str, Any]) -> str:
    """What the numbers say against the note."""
    width = max(summary["trained"], key=int)
    ahead = summary["trained"][width]["ahead"]
    accuracy = {form: mean[0] for form, mean in summary["trained"][width]["accuracy"].items()}
    dot = summary["random"]["dot"]
    low = ahead["additive - dot"][1]
    won = low is not None and low > 0
    return (
        f"At d_k = {width} a network sorts {accuracy['additive']:.2f} of the letters with additive "
        f"attention and {accuracy['dot']:.2f} with dot products that are not scaled"
        f"{'' if won else ', no difference that these seeds show'}; scaled ones reach "
        f"{accuracy['scaled_dot']:.2f}, additive scores times √d_k "
        f"{accuracy['additive_unscaled']:.2f}: what counts is the size of the scores, which the "
        "usual small v keeps down, more than the form. At initialisation the softmax gradient of "
        f"a typical row of dot products is {dot['median_score_gradient'][-1][0]:.1g} at d_k = "
        f"{dot['d_k'][-1]}, but its root mean square over rows is "
        f"{dot['score_gradient'][-1][0]:.2g}: few rows, at a tie, carry nearly all of it."
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
