"""run_path_chains' part of the report."""

import math
from typing import Any

from experiments.shell.entry import Entry
from experiments.shell.paper import said
from rank_collapse.report.claims import BELOW_ZERO, Claim, test_mean
from rank_collapse.report.page import Comparison


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """What the figures show in numbers; none is published."""
    chain = summary["median_chain_residual"]
    few = min(summary["error_of_sampled_paths"]["5"])
    return [
        Comparison(
            f"median residual of chains, length 1 and {summary['depth']}",
            f"{chain[0]:.2g}, {chain[-1]:.2g}", "falls with length",
            "box plots of chained attention in the published notebook",
        ),
        Comparison(
            "least relative error, over lengths, of a sum estimated from 5 paths", f"{few:.2g}",
            note="the published sets have 5 or 20 paths",
        ),
    ]  # fmt: skip


def claims(summary: dict[str, Any]) -> list[Claim]:
    """Chains lose rank, short paths are the large ones, and the sum over all is the output."""
    most, where = summary["most_common_length"], "at initialisation"
    rounding = summary["float_eps"] * summary["depth"] * summary["d_model"]
    return [
        test_mean(
            summary["chain_slope"], BELOW_ZERO, **said("chains", where), null="0",
            statistic="slope over lengths of log10 of the median residual ratio of P_path",
        ),
        test_mean(
            [k - most for k in summary["length_of_largest_residual_by_seed"]], BELOW_ZERO,
            statistic=f"length whose paths together have the largest residual, less {most}, the "
            "length that most paths have", null="0", **said("short at first", where),
        ),
        test_mean(
            summary["sum_error"], (-math.inf, rounding), **said("decomposition", where),
            statistic="‖Σ_k C_k + offset − output‖/‖output‖, claimed to be within rounding, "
            f"L d eps = {rounding:.1g}", null="the share of a length left out",
        ),
    ]  # fmt: skip


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
        "quick": ("--num_seeds=4", "--depth=6", "--num_tokens=48", "--num_paths=50"),
        "paper": ("--num_seeds=8", "--depth=12", "--num_heads=12", "--d_model=192",
                  "--num_tokens=128", "--num_paths=200"),
    },
    claims=claims,
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
