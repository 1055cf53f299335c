"""Norms of a loss's gradient by matrix and layer."""

from collections.abc import Callable
from typing import Any

import jax

from rank_collapse.network.measured import updates


def gradient_norms(loss: Callable[[Any], Any], params: Any) -> dict[str, dict[str, Any]]:
    """‖∂loss/∂W‖_F of the layers' matrices, all heads together: {part: {matrix: [L]}}."""
    gradient = jax.grad(lambda matrices: loss(updates.replace_weight_matrices(params, matrices)))
    return updates.compute_matrix_norms(gradient(updates.get_weight_matrices(params)))
