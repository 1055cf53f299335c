"""The weight matrices of a network's layers, by part: taken out, put back, and their sizes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network.measured.updates import MATRICES
from rank_collapse.network.parameters import TransformerParams

Matrices = dict[str, dict[str, Array]]  # {part of a layer: {name: [L, ...]}}


def get_weight_matrices(params: TransformerParams) -> Matrices:
    """Return the weight matrices of the layers, {part: {name: [L, ...]}}; heads are one matrix."""
    matrices = {}
    for part_name, names in MATRICES.items():
        part = getattr(params.layers, part_name)
        if part is not None:
            weights = {name: getattr(part, name) for name in names}
            matrices[part_name] = {name: w for name, w in weights.items() if w is not None}
    return matrices


def replace_weight_matrices(params: TransformerParams, matrices: Matrices) -> TransformerParams:
    """Return parameters with these matrices, a tree as `get_weight_matrices` returns.

    Args:
        params: Parameters of the network.
        matrices: {part: {name: [L, ...]}}; parts and names that are absent stay.
    """
    layers = params.layers
    parts = {part: getattr(layers, part).replace(**new) for part, new in matrices.items()}
    return params.replace(layers=layers.replace(**parts))


def compute_matrix_norms(
    matrices: Matrices,
) -> dict[str, dict[str, Float[Array, "l"]]]:
    """Compute Frobenius norms by layer of matrices as `get_weight_matrices` returns them."""
    return jax.tree.map(
        lambda w: jnp.sqrt(jnp.sum(jnp.square(w), axis=tuple(range(1, w.ndim)))), matrices
    )
