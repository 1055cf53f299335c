"""What run_path_chains makes of its measurements: rows, and headline numbers beside α's law.

`results` is {measure: [s, ...]}, as `measure.make_measure` gives it.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.path_chains.measure import SAMPLES
from rank_collapse.network.config import TransformerConfig
from rank_collapse.paths import chains
from rank_collapse.paths.enumeration import count_paths

CHAINS = {"chain_mean": "against $1p^T$", "chain_rank_one": "against the best rank one"}


def law_of(results: dict[str, Any], config: TransformerConfig) -> chains.AlphaLaw:
    """What the layers' α predict, from all seeds together."""
    names = ("skip_size", "branch_size", "initial_residual")
    sizes = (jnp.asarray(results[name]) for name in names)
    return chains.alpha_law(*sizes, jnp.asarray(results["chain_mean"][:, 0]), config.num_heads)


def rows_of(results: dict[str, Any], config: TransformerConfig) -> list[dict[str, Any]]:
    """One row per seed and length."""
    law = law_of(results, config)
    counts = count_paths(config.depth, config.num_heads)
    rows = []
    for seed in range(len(results["log10_norm"])):
        for k in range(config.depth + 1):
            row = {"seed": seed, "length": k, "paths": counts[k]}
            row |= {n: float(results[n][seed, k]) for n in ("log10_norm", "log10_residual")}
            row["predicted_log10_residual"] = float(law.by_layer[k])
            row["predicted_log10_residual_one_alpha"] = float(law.one[k])
            if k:
                row["alpha_of_layer"] = float(law.alpha_by_layer[k - 1])
                for name in CHAINS:
                    row[f"{name}_median"] = float(np.median(results[name][seed, k - 1]))
                for i, size in enumerate(SAMPLES):
                    error = np.median(results["estimate_error"][seed, i, k - 1])
                    row[f"error_of_{size}_paths"] = float(error)
            rows.append(row)
    return rows


def summary_of(results: dict[str, Any], config: TransformerConfig) -> dict[str, Any]:
    """The headline numbers."""
    law = law_of(results, config)
    counts = count_paths(config.depth, config.num_heads)
    medians = {n: np.median(results[n], axis=(0, 2)) for n in CHAINS}
    rest, norm = results["log10_residual"].mean(axis=0), results["log10_norm"].mean(axis=0)
    errors = np.median(results["estimate_error"], axis=(0, 3))
    return {
        "depth": config.depth,
        "num_heads": config.num_heads,
        "median_chain_residual": medians["chain_mean"].tolist(),
        "median_chain_rank_one": medians["chain_rank_one"].tolist(),
        "most_common_length": int(np.argmax([float(c) for c in counts])),
        "length_of_largest_norm": int(norm.argmax()),
        "length_of_largest_residual": int(rest.argmax()),
        "log10_norm": norm.tolist(),
        "log10_residual": rest.tolist(),
        "predicted_log10_residual": np.asarray(law.by_layer).tolist(),
        "alpha": float(law.alpha),
        "alpha_by_layer": np.asarray(law.alpha_by_layer).tolist(),
        "contraction": float(law.contraction),
        "error_of_sampled_paths": dict(zip(map(str, SAMPLES), errors.tolist(), strict=True)),
        "sum_error": results["sum_error"].tolist(),
        "chain_slope": chain_slope(results["chain_mean"]).tolist(),
        "length_of_largest_residual_by_seed": results["log10_residual"].argmax(axis=1).tolist(),
        "float_eps": float(np.finfo(results["sum_error"].dtype).eps),
        "d_model": config.d_model,
    }


def chain_slope(ratios: np.ndarray) -> np.ndarray:
    """Least-squares slope over lengths of log10 of each seed's median ratio, [s]; ratios [s, L, p].

    NaN where there is one length only, or a product is of rank one to the last digit.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        medians = np.log10(np.median(ratios, axis=2))
        away = np.arange(medians.shape[1]) - (medians.shape[1] - 1) / 2
        return (medians @ away) / (away @ away)
