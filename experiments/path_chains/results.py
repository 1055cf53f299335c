"""What run_path_chains writes: rows, figures, summary, and its part of the report."""

from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.shell.entry import Entry
from rank_collapse.network.config import TransformerConfig
from rank_collapse.paths import chains
from rank_collapse.paths.enumeration import count_paths
from rank_collapse.report import figures
from rank_collapse.report.page import Comparison

SAMPLES = (5, 20)
CHAINS = {"chain_mean": "against $1p^T$", "chain_rank_one": "against the best rank one"}


def predictions(results: dict[str, Any], config: TransformerConfig) -> dict[str, Any]:
    """α, the contraction, and predicted log10 sizes by length, from all seeds together.

    The contraction c is that of single attention matrices: their mean log residual ratio is that
    of R_0/c², the formula's value at length 1.
    """
    sizes = (jnp.asarray(results["skip_size"]), jnp.asarray(results["branch_size"]))
    alpha = np.asarray(chains.skip_share(*sizes))
    skip, branch = results["skip_size"].sum(), results["branch_size"].sum()
    contraction = float(np.exp(-0.5 * np.log(results["chain_mean"][:, 0]).mean()))
    common = (config.depth, config.num_heads, results["initial_residual"].mean(), contraction)
    return {
        "alpha": float(skip / (skip + branch)),
        "alpha_by_layer": alpha,
        "contraction": contraction,
        "one": np.asarray(chains.predicted_sizes(skip / (skip + branch), *common)),
        "by_layer": np.asarray(chains.predicted_sizes(alpha, *common)),
    }


def rows_of(results: dict[str, Any], config: TransformerConfig) -> list[dict[str, Any]]:
    """One row per seed and length."""
    told = predictions(results, config)
    counts = count_paths(config.depth, config.num_heads)
    rows = []
    for seed in range(len(results["log10_norm"])):
        for k in range(config.depth + 1):
            row = {"seed": seed, "length": k, "paths": counts[k]}
            row |= {n: float(results[n][seed, k]) for n in ("log10_norm", "log10_residual")}
            row["predicted_log10_residual"] = float(told["by_layer"][k])
            row["predicted_log10_residual_one_alpha"] = float(told["one"][k])
            if k:
                row["alpha_of_layer"] = float(told["alpha_by_layer"][k - 1])
                for name in CHAINS:
                    row[f"{name}_median"] = float(np.median(results[name][seed, k - 1]))
                for i, size in enumerate(SAMPLES):
                    error = np.median(results["estimate_error"][seed, i, k - 1])
                    row[f"error_of_{size}_paths"] = float(error)
            rows.append(row)
    return rows


def figures_of(results: dict[str, Any], config: TransformerConfig) -> dict[str, Figure]:
    """The paper's box plots, and contributions by length with what predicts them."""
    return {
        "path_chains": chain_figure(results),
        "path_lengths": length_figure(results, config),
    }


@figures.styled
def chain_figure(results: dict[str, Any]) -> Figure:
    """Box plots by path length on a logarithmic axis; seeds and paths pooled."""
    fig, axes = figures.figure(1, 2, sharey=True)
    for ax, (name, title) in zip(axes[0], CHAINS.items(), strict=True):
        values = np.maximum(np.swapaxes(results[name], 0, 1), np.finfo(float).tiny)
        values = values.reshape(len(values), -1)
        boxes = ax.boxplot(
            list(values), positions=np.arange(1, len(values) + 1), patch_artist=True,
            flierprops={"marker": ".", "markersize": 2, "markeredgecolor": "#8A8A8A"},
            medianprops={"color": "black"},
        )  # fmt: skip
        for box in boxes["boxes"]:
            box.set(facecolor=figures.color(5), linewidth=0.8)
        ax.set(yscale="log", xlabel="path length", title=title)
    axes[0, 0].set_ylabel(r"$\|\mathrm{res}(P_{path})\|_{1,\infty}\,/\,\|P_{path}\|_{1,\infty}$")
    return fig


@figures.styled
def length_figure(results: dict[str, Any], config: TransformerConfig) -> Figure:
    """Exact contribution by length, counting beside size, and the error of sampling."""
    told, k = predictions(results, config), np.arange(config.depth + 1)
    fig, axes = figures.figure(1, 3, width=3.9, height=3.3)
    ax = axes[0, 0]
    figures.band(ax, k, results["log10_norm"], r"$\|C_k\|$, measured", 0)
    figures.band(ax, k, results["log10_residual"], r"$\|\mathrm{res}(C_k)\|$, measured", 1)
    for index, (name, label) in enumerate((("one", r"one $\alpha$"), ("by_layer", r"$\alpha_l$"))):
        style = {"color": "black", "linestyle": ("--", ":")[index], "marker": ""}
        shown = told[name] > results["log10_residual"].min() - 6
        ax.plot(k[shown], told[name][shown], label=f"predicted, {label}", **style)
    ax.set(ylabel=r"$\log_{10}\|\cdot\|_{1,\infty}$", title="all paths of one length")
    ax = axes[0, 1]
    counts = np.array([float(c) for c in count_paths(config.depth, config.num_heads)])
    ax.bar(k, counts / counts.sum(), width=0.85, color=figures.color(5), label="share of paths")
    for index, name in enumerate(("log10_norm", "log10_residual")):
        size = 10 ** (results[name] - results[name].max(axis=1, keepdims=True))
        share = size / size.sum(axis=1, keepdims=True)
        label = ("share of the norms", "share of the residuals")[index]
        figures.band(ax, k, share, label, index)
    ax.set(ylabel="share", title="counted and weighed")
    ax.set_ylim(0, 1.35 * ax.get_ylim()[1])  # room for the legend
    ax = axes[0, 2]
    for index, size in enumerate(SAMPLES):
        error = results["estimate_error"][:, index]
        error = np.moveaxis(error, 1, 2).reshape(-1, config.depth)
        style = {"color": figures.color(index), "marker": figures.MARKERS[index]}
        ax.plot(k[1:], np.median(error, axis=0), label=f"{size} sampled paths", **style)
        low, high = np.quantile(error, (0.25, 0.75), axis=0)
        ax.fill_between(k[1:], low, high, color=style["color"], alpha=0.2, linewidth=0)
    ax.axhline(1, color="#555555", lw=0.9, ls="--")
    ax.set(yscale="log", ylabel="relative error", title="a sum estimated from few paths")
    for ax in axes[0]:
        ax.set_xlabel("path length")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend(loc="best", fontsize=7)
    return fig


def summary_of(results: dict[str, Any], config: TransformerConfig) -> dict[str, Any]:
    """The headline numbers."""
    told = predictions(results, config)
    counts = count_paths(config.depth, config.num_heads)
    chains = {n: np.median(results[n], axis=(0, 2)) for n in CHAINS}
    rest, norm = results["log10_residual"].mean(axis=0), results["log10_norm"].mean(axis=0)
    errors = np.median(results["estimate_error"], axis=(0, 3))
    return {
        "depth": config.depth,
        "num_heads": config.num_heads,
        "median_chain_residual": chains["chain_mean"].tolist(),
        "median_chain_rank_one": chains["chain_rank_one"].tolist(),
        "most_common_length": int(np.argmax([float(c) for c in counts])),
        "length_of_largest_norm": int(norm.argmax()),
        "length_of_largest_residual": int(rest.argmax()),
        "log10_norm": norm.tolist(),
        "log10_residual": rest.tolist(),
        "predicted_log10_residual": told["by_layer"].tolist(),
        "alpha": told["alpha"],
        "alpha_by_layer": told["alpha_by_layer"].tolist(),
        "contraction": told["contraction"],
        "error_of_sampled_paths": dict(zip(map(str, SAMPLES), errors.tolist(), strict=True)),
        "largest_sum_error": float(results["sum_error"].max()),
    }


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
