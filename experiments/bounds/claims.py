"""What check_bounds says of the paper: claims, comparisons, a reading."""

from typing import Any

from experiments.shell.paper import said
from rank_collapse.report.claims import Claim, test_never
from rank_collapse.report.page import Comparison

# {count: (claim, what it is of, where its condition holds, one of them)}
CLAIMS = {
    "lemma_violations": ("lemma", "a head", "admissible", "heads"),
    "head_violations": ("bound", "a head", "admissible", "heads"),
    "published_layer_violations": (
        "bound", "a layer of several heads", "published_layers_admissible", "layers",
    ),
    "published_stack_violations": (
        "bound", "a whole network", "published_stacks_admissible", "networks",
    ),
}  # fmt: skip
BUILT = ("published_layer_violations", "published_stack_violations")
FREE_BOUNDS = {
    "layer": "a layer, with sums over heads",
    "stack": "the network, with sums over heads",
    "mean_head": "a head around the mean token",
    "mean_layer": "a layer around the mean token",
    "diameter_layer": "a layer's diameter, with tanh",
    "cubic_diameter_layer": "a layer's diameter, c diam³",
    "diameter": "the network's diameter, layer by layer",
}


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Violations of the bounds that need no condition, which are not the paper's, beside none."""
    return [
        Comparison(
            f"bound of {what}: violations", summary[f"{name}_violations"], 0,
            f"derived here; of {summary[f'{name}s']} cases, no number in "
            f"{summary[f'{name}s_refused']}: rows that see different keys, or a residual of NaN",
        )
        for name, what in FREE_BOUNDS.items()
    ]  # fmt: skip


def claims(summary: dict[str, Any]) -> list[Claim]:
    """The lemma and the published bounds, wherever the lemma's condition holds.

    The construction of two heads is a layer, and a network of one layer.
    """
    return [_claim(name, summary) for name in CLAIMS]


def _claim(name, summary):
    claim, what, among, unit = CLAIMS[name]
    count, total, why, where = summary[name], summary[among], "", "random networks"
    if name in BUILT:
        against = summary["constructions_against_published"]
        count, total = count + against, total + summary["constructions"]
        where += " and a construction of two heads"
        why = (
            f"{against} of {summary['constructions']} constructions; γ of each head is the least "
            "that its lemma admits"
        )
    return test_never(
        count, total, summary["draws"], why=why,
        statistic=f"{unit} above it, of those where max D_ii ≤ 1.256",
        **said(claim, f"{what}, {where}"),
    )  # fmt: skip


def reading(summary: dict[str, Any]) -> str:
    """A sentence against the paper."""
    broken = sum(summary[name] for name in CLAIMS)
    broken += sum(summary[f"{name}_violations"] for name in FREE_BOUNDS)
    text = f"Of {summary['draws']} random networks of two layers, {broken} violations"
    if summary["admissible"]:
        text += (
            f"; the bound of a head lies {summary['tightness_min']:.2g} to "
            f"{summary['tightness_max']:.2g} powers of ten above the residual, with γ* from "
            f"{summary['gamma_min']:.2g} to {summary['gamma_max']:.2g}"
        )
    ours, theirs = (summary[f"{w}_tightness_median_admissible"] for w in ("mean_head", "head"))
    if ours is not None:
        text += (
            f"; there the bound around the mean token, which needs no condition, is at "
            f"{ours:.2g} where the paper's is at {theirs:.2g} (medians)"
        )
    text += (
        f". The published bound of a layer of several heads is below the residual in "
        f"{summary['constructions_against_published']} of {summary['constructions']} networks "
        f"built for it, by a factor of {summary['largest_over_published']:.3g} at most"
    )
    if summary["smallest_against_published"] is not None:
        text += f" and from n = d = {summary['smallest_against_published']} on"
    least = summary["ascent_least_layer"], summary["ascent_least_mean_layer"]
    return (
        f"{text}; the form with sums over heads holds there, and gradient ascent comes no nearer "
        f"to it than {least[0]:.2g} powers of ten, {least[1]:.2g} for the one around the mean."
    )
