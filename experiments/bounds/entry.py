"""check_bounds' part of the report."""

from typing import Any

from experiments.shell.entry import Entry
from experiments.shell.paper import said
from rank_collapse.report.claims import Claim, never
from rank_collapse.report.page import Comparison

# {count: (claim, what it is of, where its condition holds, one of them)}
CLAIMS = {
    "lemma_violations": ("lemma", "a head", "admissible", "heads"),
    "head_violations": ("bound", "a head", "admissible", "heads"),
    "layer_violations": ("bound", "a layer", "layers_admissible", "layers"),
    "stack_violations": ("bound", "a whole network", "stacks_admissible", "networks"),
}
FREE_BOUNDS = {
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
    """The lemma and the bounds, wherever the lemma's condition holds."""
    return [
        never(
            summary[name], summary[among], summary["draws"],
            statistic=f"{unit} above it, of those where max D_ii ≤ 1.256",
            **said(claim, f"{what}, random networks"),
        )
        for name, (claim, what, among, unit) in CLAIMS.items()
    ]  # fmt: skip


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
    return text + "."


ENTRY = Entry(
    title="The lemma and the bounds on random draws",
    brief="the technical lemma and the bounds on thousands of random draws, violations counted",
    claim="The technical lemma and Theorems 2.2 and 2.3 hold wherever max D_ii ≤ 1.256 (appendix; "
    "there is no such table in the paper).",
    presets={
        "quick": ("--num_draws=1000", "--cases=8x16x4,16x8x2,8x16x2-causal"),
        "paper": ("--num_draws=50000",),
    },
    claims=claims,
    compare=compare,
    reading=reading,
    captions={
        "tightness": "How many powers of ten the bounds lie above what happens, where the lemma's "
        "condition holds (paper's) and everywhere (around the mean, diameter) (left), and γ* of "
        "every head (right)."
    },
)
