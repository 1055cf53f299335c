"""How long the paths of a network are: counted, weighted by branch shares, and by exact sums."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from rank_collapse.paths.lengths import path_length_law

COUNTED, ROLLOUT, BY_NORM = "counted", "rollout", "exact sums by norm"


def compute_length_laws(
    num_heads: int, attention_share: Float[Any, "b l"], path_size: Float[Any, "b k"]
) -> dict[str, Float[np.ndarray, "b k"]]:
    """Compute three distributions of the path length, which answer "how long?" very differently.

    Counted, each of the (1 + H)^L paths weighs the same. In the rollout a layer's attention counts
    with its share λ_l of the stream. The exact sum over the paths of length k counts with its norm.

    Args:
        num_heads: H.
        attention_share: λ [b, L] of each text, in [0, 1].
        path_size: ‖C_k‖ [b, L + 1], of `rc.path_contributions`.

    Returns:
        {weighting: probabilities [b, L + 1] of the lengths 0 .. L}; NaN where all sizes are 0, as
        of weights so small that products of them are.

    Source: Dong et al. 2021; arXiv 2602.16837 for the shares.
    """
    share = np.clip(np.asarray(attention_share, np.float64), 0, 1)
    size = np.asarray(path_size, np.float64)
    total = size.sum(axis=1, keepdims=True)
    return {
        COUNTED: path_length_law(np.full_like(share, num_heads / (1 + num_heads))),
        ROLLOUT: path_length_law(share),
        BY_NORM: np.divide(size, total, out=np.full_like(size, np.nan), where=total > 0),
    }


def mean_lengths(laws: Mapping[str, Float[np.ndarray, "b k"]]) -> dict[str, float]:
    """Compute the mean path length Σ_k k p_k of each law, averaged over texts.

    Args:
        laws: Result of `compute_length_laws`.
    """
    return {name: float((law @ np.arange(law.shape[1])).mean()) for name, law in laws.items()}


def tabulate_lengths(laws: Mapping[str, Float[np.ndarray, "b k"]]) -> list[dict[str, Any]]:
    """Tabulate mean, median and 99 % quantile of the path length by each law, a row for each.

    A law that is NaN, of some text, has None.

    Args:
        laws: Result of `compute_length_laws`.
    """
    rows = []
    for name, mean in mean_lengths(laws).items():
        cumulative = np.cumsum(laws[name].mean(axis=0))
        if np.isnan(mean):
            quantiles = dict.fromkeys(("mean length", "median", "99 % at most"))
            rows.append({"paths weighted": name, **quantiles})
            continue
        row = {
            "paths weighted": name,
            "mean length": mean,
            "median": int(np.argmax(cumulative >= 0.5)),
            "99 % at most": int(np.argmax(cumulative >= 0.99)),
        }
        rows.append(row)
    return rows
