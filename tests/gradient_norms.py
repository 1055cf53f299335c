"""Norms of a loss's gradient by matrix and layer, and updates of equal relative size."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rank_collapse.network.measured import updates


def gradient_norms(loss: Callable[[Any], Any], params: Any) -> dict[str, dict[str, Any]]:
    """‖∂loss/∂W‖_F of the layers' matrices, all heads together: {part: {matrix: [L]}}."""
    gradient = jax.grad(lambda matrices: loss(updates.replace_weight_matrices(params, matrices)))
    return updates.compute_matrix_norms(gradient(updates.get_weight_matrices(params)))


def move_weights(params: Any, direction: Any, size: Any) -> Any:
    """W* = W + size ‖W‖_F U/‖U‖_F for every matrix of every layer: updates of equal relative size.

    Args:
        direction: U, a tree as `get_weight_matrices` returns; where U = 0 nothing moves.
        size: ‖W* − W‖_F/‖W‖_F.
    """

    def move(w, u):
        axes = tuple(range(1, w.ndim))
        length = [jnp.sqrt(jnp.sum(jnp.square(a), axis=axes, keepdims=True)) for a in (w, u)]
        unit = u / jnp.where(length[1] == 0, 1, length[1])
        return w + jnp.asarray(size, w.dtype) * length[0] * unit

    matrices = jax.tree.map(move, updates.get_weight_matrices(params), direction)
    return updates.replace_weight_matrices(params, matrices)
