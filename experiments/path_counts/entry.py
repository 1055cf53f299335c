"""run_path_counts' part of the report."""

from typing import Any

from experiments.shell.entry import Entry
from experiments.shell.paper import said
from rank_collapse.report.claims import Claim, test_never
from rank_collapse.report.page import Comparison

ROUNDING = 1e-12  # of shares in float64


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Mean length beside the binomial law's, and the number of paths."""
    return [
        Comparison(
            f"{name} (H={n['heads']}, L={n['layers']}): mean path length",
            n["mean_length"], n["layers"] * n["heads"] / (1 + n["heads"]),
            f"published: L H/(1+H); 10^{n['log10_paths']:.1f} paths, "
            f"{n['share_at_most_half_depth']:.2g} of them at most L/2 long",
        )
        for name, n in summary.items()
    ]  # fmt: skip


def claims(summary: dict[str, Any]) -> list[Claim]:
    """Exact counts against the law; nothing is drawn, so that every architecture is a case."""
    off = [n for n in summary.values() if n["largest_difference_from_binomial"] > ROUNDING]
    few = [n for n in summary.values() if n["share_at_most_half_depth"] >= 0.5]
    cases = {"total": len(summary), "seeds": len(summary), **said("lengths")}
    return [
        test_never(
            len(off), statistic="architectures whose exact counts are not Binomial(L, H/(1+H))",
            **cases,
        ),
        test_never(
            len(few), statistic="architectures with half of their paths no longer than L/2", **cases
        ),
    ]  # fmt: skip


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
    claims=claims,
    compare=compare,
    reading=reading,
    captions={"path_counts": "Share of paths by length: exact counts (bars) and law (dots)."},
)
