"""Numbers of paths by length: exact integers, their logarithms, and the binomial law."""

import math
from fractions import Fraction
from typing import Any

from rank_collapse.paths.enumeration import count_paths

MAX_EXACT_DEPTH = 1000  # beyond it, logarithms: the integers have thousands of digits


def path_table(heads: int, layers: int) -> list[dict[str, Any]]:
    """One row per length k: the number of paths (exact, or its logarithm), share, and law."""
    counted = logarithms if layers > MAX_EXACT_DEPTH else exact_counts
    law = binomial(layers, heads)
    return [
        {"length": k, "paths": count, "log10_paths": log10, "share": share, "binomial": law[k]}
        for k, (count, log10, share) in enumerate(counted(heads, layers))
    ]


def exact_counts(heads: int, layers: int) -> list[tuple[int, float, float]]:
    """(number, log10 of it, share) of the paths of each length, C(L, k) H^k of (1+H)^L."""
    counts = count_paths(layers, heads)
    total = sum(counts)
    return [(count, math.log10(count), float(Fraction(count, total))) for count in counts]


def logarithms(heads: int, layers: int) -> list[tuple[str, float, float]]:
    """The same for any depth; the number itself is left out."""
    total = layers * math.log(1 + heads)
    logs = [log_choose(layers, k) + k * math.log(heads) for k in range(layers + 1)]
    return [("", value / math.log(10), math.exp(value - total)) for value in logs]


def binomial(layers: int, heads: int) -> list[float]:
    """Binomial(L, H/(1+H)) at 0 .. L, through logarithms of factorials."""
    log_head, log_skip = math.log(heads / (1 + heads)), -math.log(1 + heads)
    return [
        math.exp(log_choose(layers, k) + k * log_head + (layers - k) * log_skip)
        for k in range(layers + 1)
    ]


def log_choose(n: int, k: int) -> float:
    """log C(n, k)."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
