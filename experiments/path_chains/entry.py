"""run_path_chains' part of the report."""

from itertools import pairwise
from typing import Any

from experiments.shell.entry import Entry
from rank_collapse.report.page import Comparison


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Claims of the paper, and the checks of this figure."""
    chain = summary["median_chain_residual"]
    falls = all(b < a for a, b in pairwise(chain))
    few = min(summary["error_of_sampled_paths"]["5"])
    largest, common = summary["length_of_largest_residual"], summary["most_common_length"]
    return [
        Comparison(
            f"median residual of chains, length 1 and {summary['depth']}",
            f"{chain[0]:.2g}, {chain[-1]:.2g}",
            "falls with length",
            falls,
            "box plots of chained attention in the published notebook",
        ),
        Comparison(
            "length whose paths have the largest residual together",
            largest,
            "shorter than most paths",
            largest < common,
            f"most paths have length {common}",
        ),
        Comparison(
            "relative error of Σ_k C_k + offset",
            f"{summary['largest_sum_error']:.1e}",
            0,
            summary["largest_sum_error"] < 1e-5,
            "Theorem 2.1: the decomposition is exact",
        ),
        Comparison(
            "least relative error, over lengths, of a sum estimated from 5 paths",
            f"{few:.2g}",
            None,
            None,
            "the published sets have 5 or 20 paths",
        ),
    ]


def reading(summary: dict[str, Any]) -> str:
    """A sentence against the paper."""
    chain, depth = summary["median_chain_residual"], summary["depth"]
    rate = (chain[-1] / chain[0]) ** (1 / max(depth - 1, 1))
    return (
        f"Products of attention matrices lose a factor {1 / rate:.2g} of their residual per layer: "
        "exponentially, as products of stochastic matrices do; the cubic rate needs tokens that "
        "collapse with them. At initialisation all paths of length "
        f"{summary['length_of_largest_residual']} together have the largest residual, while most "
        f"paths have length {summary['most_common_length']}."
    )


ENTRY = Entry(
    title="Chained attention and the size of paths",
    claim="Products of attention matrices along a path approach rank one with its length, and "
    "short paths carry the network although most paths are long (published box plots of chained "
    "attention; section 4 on the effectiveness of paths).",
    presets={
        "quick": ("--num_seeds=2", "--depth=6", "--num_tokens=48", "--num_paths=50"),
        "paper": ("--num_seeds=8", "--depth=12", "--num_heads=12", "--d_model=192",
                  "--num_tokens=128", "--num_paths=200"),
    },
    compare=compare,
    reading=reading,
    captions={
        "path_chains": "Residual ratio of products of attention matrices along random paths, by "
        "path length: medians, quartiles, and outliers over paths and seeds.",
        "path_lengths": "Exact sums over all paths of each length: sizes and predicted sizes "
        "(left), shares beside the binomial count (middle), error of estimates from few sampled "
        "paths (right; above the dashed line worse than nothing).",
    },
)  # fmt: skip
