"""The paper's trained tasks: data made on the device from a key, with their metrics."""

from rank_collapse.training.tasks.examples import (
    Examples,
    area_under_curve,
    cross_entropy,
    exact_match,
    majority_baseline,
    random_baseline,
    squared_error,
    token_accuracy,
)

__all__ = [
    "Examples",
    "area_under_curve",
    "cross_entropy",
    "exact_match",
    "majority_baseline",
    "random_baseline",
    "squared_error",
    "token_accuracy",
]
