"""Norms of a loss's gradient by matrix and layer."""

from collections.abc import Callable
from typing import Any

import jax

from experiments.train.weight_matrices import (
    compute_matrix_norms,
    get_weight_matrices,
    replace_weight_matrices,
)


def gradient_norms(loss: Callable[[Any], Any], params: Any) -> dict[str, dict[str, Any]]:
    """‖∂loss/∂W‖_F of the layers' matrices, all heads together: {part: {matrix: [L]}}."""
    gradient = jax.grad(lambda matrices: loss(replace_weight_matrices(params, matrices)))
    return compute_matrix_norms(gradient(get_weight_matrices(params)))
