"""What run_path_counts makes of its tables: rows and headline numbers.

`tables` is {architecture: rows of `counts.path_table`}. They follow from two integers in closed
form, so that nothing but results.csv is stored.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

Tables = dict[str, list[dict[str, Any]]]


def column(table: list[dict[str, Any]], name: str) -> np.ndarray:
    """One column as numbers."""
    return np.array([row[name] for row in table])


def rows_of(tables: Tables, sizes: dict[str, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """One row per architecture and length."""
    for name, table in tables.items():
        heads, layers = sizes[name]
        for row in table:
            yield {"architecture": name, "heads": heads, "layers": layers} | row


def summary_of(tables: Tables, sizes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Per architecture: number of paths, mean and spread of the length, distance from the law."""
    summary = {}
    for name, table in tables.items():
        heads, layers = sizes[name]
        share, law = column(table, "share"), column(table, "binomial")
        length = np.arange(layers + 1)
        mean = float(share @ length)
        summary[name] = {
            "heads": heads,
            "layers": layers,
            "log10_paths": layers * math.log10(1 + heads),
            "mean_length": mean,
            "std_length": float(np.sqrt(share @ (length - mean) ** 2)),
            "most_common_length": int(share.argmax()),
            "share_at_most_half_depth": float(share[: layers // 2 + 1].sum()),
            "largest_difference_from_binomial": float(np.abs(share - law).max()),
        }
    return summary
