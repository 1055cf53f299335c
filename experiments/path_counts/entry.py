"""run_path_counts' part of the report."""

from typing import Any

from experiments.shell.entry import Entry
from rank_collapse.report.page import Comparison


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Mean length beside the binomial law's, and the number of paths."""
    rows = []
    for name, numbers in summary.items():
        heads, layers = numbers["heads"], numbers["layers"]
        law = layers * heads / (1 + heads)
        rows.append(
            Comparison(
                f"{name} (H={heads}, L={layers}): mean path length",
                numbers["mean_length"],
                law,
                abs(numbers["mean_length"] - law) < 1e-9 * layers,
                f"published: L H/(1+H); 10^{numbers['log10_paths']:.1f} paths, "
                f"{numbers['share_at_most_half_depth']:.2g} of them at most L/2 long",
            )
        )
    return rows


def reading(summary: dict[str, Any]) -> str:
    """One sentence against the paper."""
    furthest = max(n["largest_difference_from_binomial"] for n in summary.values())
    short = max(n["share_at_most_half_depth"] for n in summary.values())
    return (
        "As published, nearly all paths are long: at most "
        f"{short:.1%} of any architecture's paths pass half of the layers or fewer. Exact counts "
        f"and the binomial law differ by at most {furthest:.0e}."
    )


ENTRY = Entry(
    title="Paths by length",
    claim="Path decomposition: a network of L layers and H heads is a sum over (1+H)^L paths, "
    "whose lengths follow Binomial(L, H/(1+H)), so most paths are long, although long paths "
    "contribute least (published figure of path length distributions).",
    presets={"quick": (), "paper": ()},
    compare=compare,
    reading=reading,
    captions={"path_counts": "Share of paths by length: exact counts (bars) and law (dots)."},
)
