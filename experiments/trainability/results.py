"""Table, summary and printed lines of the trainability experiment.

`results` is {cell: {"losses" [s, epochs], "accuracy" [s, t], "token_cosine" [s, t, L + 1],
"gradients" [s, t, 6, L], ...}}, t the looks: before training, and after each chunk of it.
"""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
from absl import flags

from experiments.trainability.cells import Cell
from experiments.trainability.measure import GRADIENTS
from rank_collapse.report.shares import wilson_interval

# WMT'14 English-German BLEU at 6, 12 and 18 layers, Liu et al. 2020, table 1; None: diverged.
PUBLISHED = {
    "post": {6: 27.80, 12: None, 18: None},
    "pre": {6: 27.27, 12: 28.26, 18: 28.38},
    "admin": {6: 27.90, 12: 28.58, 18: 29.03},
}


def guess_limit(tokens: int, letters: int) -> float:
    """Accuracy below which a guess cannot be told from what is learned.

    1/c + 2.58 √((1/c)(1 − 1/c)/tokens): one guess of 200 lies above it.
    """
    share = 1 / letters
    return share + 2.58 * math.sqrt(share * (1 - share) / tokens)


def limit_of(options: flags.FlagValues) -> float:
    """`guess_limit` of the evaluation."""
    return guess_limit(options.n_eval_data * options.seq_len, options.num_labels)


def failed(found: dict[str, Any], limit: float) -> np.ndarray:
    """Which seeds diverged (a loss that is not finite) or still guess at the end, [s]."""
    return ~np.isfinite(found["losses"]).all(axis=1) | ~(found["accuracy"][:, -1] > limit)


def gradient(found: dict[str, Any], matrix: str) -> np.ndarray:
    """Norm of the loss's gradient to one matrix, [s, t, L]."""
    return found["gradients"][:, :, GRADIENTS.index(matrix)]


def rows_of(results: dict[Cell, Any], options: flags.FlagValues) -> list[dict[str, Any]]:
    """One row per cell and seed."""
    rows = []
    for cell, found in results.items():
        fails = failed(found, limit_of(options))
        for seed in range(len(fails)):
            row = asdict(cell) | {"seed": seed, "failed": int(fails[seed])}
            row["diverged"] = int(not np.isfinite(found["losses"][seed]).all())
            row["accuracy"] = float(found["accuracy"][seed, -1])
            row["training_loss"] = float(found["losses"][seed, -1])
            for when, t in (("before", 0), ("after", -1)):
                for name in ("residual_ratio", "token_cosine"):
                    row[f"{name}_{when}"] = float(found[name][seed, t, -1])
                for name in ("w_q", "w_k", "w_v"):
                    row[f"gradient_{name}_{when}"] = float(gradient(found, name)[seed, t, -1])
            rows.append(row)
    return rows


def summary_of(results: dict[Cell, Any], options: flags.FlagValues) -> dict[str, Any]:
    """Per cell: how many seeds failed, with the interval, and what their networks were like."""
    limit, cells = limit_of(options), []
    for cell, found in results.items():
        fails = failed(found, limit)
        cells.append(
            asdict(cell)
            | {
                "seeds": len(fails),
                "failed": int(fails.sum()),
                "diverged": int((~np.isfinite(found["losses"]).all(axis=1)).sum()),
                "interval": list(wilson_interval(int(fails.sum()), len(fails))),
                "accuracy": float(np.mean(found["accuracy"][:, -1])),
                "training_loss": float(np.nanmean(found["losses"][:, -1])),
                "residual_ratio_before": float(found["residual_ratio"][:, 0, -1].mean()),
                "residual_ratio_after": float(np.nanmean(found["residual_ratio"][:, -1, -1])),
                "token_cosine_before": float(found["token_cosine"][:, 0, -1].mean()),
                "query_over_value_gradient_before": float(
                    np.median(gradient(found, "w_q")[:, 0] / gradient(found, "w_v")[:, 0])
                ),
                "seconds": float(found["seconds"]),
            }
        )
    return {
        "cells": cells,
        "guess_limit": limit,
        "baseline": 1 / options.num_labels,
        "steps": options.n_steps,
        "task": f"{options.task}, {options.seq_len} of {options.num_labels} letters",
    }


def title_of(cell: dict[str, Any]) -> str:
    """A cell of the summary in words."""
    gain = "" if cell["gain"] is None else f", gain {cell['gain']:g}"
    return (
        f"{cell['design']}{gain}, {cell['depth']} layers, rate {cell['learning_rate']:g}, "
        f"warm-up {cell['warmup']}, batch {cell['batch_size']}"
    )


def show(summary: dict[str, Any]) -> None:
    """Prints one line per cell."""
    print(f"{summary['task']}, {summary['steps']} steps; failed: accuracy at most "
          f"{summary['guess_limit']:.3f}, or a loss that is not finite")  # fmt: skip
    for cell in summary["cells"]:
        low, high = cell["interval"]
        print(
            f"{title_of(cell):>58s}: failed {cell['failed']} of {cell['seeds']} "
            f"({low:.2f} to {high:.2f}), accuracy {cell['accuracy']:.3f}; residual ratio before "
            f"training {cell['residual_ratio_before']:.2g}, after it "
            f"{cell['residual_ratio_after']:.2g}; gradient of W_Q over that of W_V before it "
            f"{cell['query_over_value_gradient_before']:.2g}"
        )
