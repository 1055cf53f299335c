"""How updates of the weights change the output, layer by layer; their sizes by matrix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import as_mask
from rank_collapse.network.layers import norm
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import apply

MATRICES = {
    "attention": ("w_q", "w_k", "w_v", "w_o"),
    "cross": ("w_q", "w_k", "w_v", "w_o"),
    "mlp": ("w_in", "w_gate", "w_out"),
}


def get_weight_matrices(params: TransformerParams) -> dict[str, dict[str, Array]]:
    """The weight matrices of the layers by part and name, each [L, ...]; heads are one matrix."""
    parts = {part: getattr(params.layers, part) for part in MATRICES}
    return {
        part: {n: w for n in MATRICES[part] if (w := getattr(found, n)) is not None}
        for part, found in parts.items()
        if found is not None
    }


def replace_weight_matrices(params: TransformerParams, matrices: Any) -> TransformerParams:
    """The parameters with their matrices replaced by these."""
    layers = params.layers
    new = {part: getattr(layers, part).replace(**found) for part, found in matrices.items()}
    return params.replace(layers=layers.replace(**new))


def moved(params: TransformerParams, direction: Any, size: Any) -> TransformerParams:
    """W* = W + size ‖W‖_F U/‖U‖_F for every matrix of every layer: updates of equal relative size.

    Args:
        direction: U, a tree as `matrices_of` gives; where U = 0 nothing moves.
        size: ‖W* − W‖_F/‖W‖_F.
    """

    def step(w, u):
        axes = tuple(range(1, w.ndim))
        length = [jnp.sqrt(jnp.sum(jnp.square(a), axis=axes, keepdims=True)) for a in (w, u)]
        unit = u / jnp.where(length[1] == 0, 1, length[1])
        return w + jnp.asarray(size, w.dtype) * length[0] * unit

    return replace_weight_matrices(
        params, jax.tree.map(step, get_weight_matrices(params), direction)
    )


def compute_matrix_norms(
    matrices: dict[str, dict[str, Array]],
) -> dict[str, dict[str, Float[Array, "l"]]]:
    """Frobenius norms of matrices as `matrices_of` gives them, by layer."""

    def size(w):
        return jnp.sqrt(jnp.sum(jnp.square(w), axis=tuple(range(1, w.ndim))))

    return jax.tree.map(size, matrices)


@full_precision
def output_change(
    params: TransformerParams,
    other: TransformerParams,
    x: Any,
    config: TransformerConfig,
    **inputs: Any,
) -> Float[Array, "l"]:
    """|x̂_l − x̂*_l|²/d, averaged over tokens that exist, after every layer of two sets of weights.

    States are normalised before they are compared, as by the norm that reads a pre-norm stream; the
    first l layers are the network of l layers where the gains do not depend on the depth.

    Args:
        params, other: The weights, before and after an update.
        x, config, **inputs: As in `apply`; padded tokens (mask Bool [n]) are left out.

    Returns:
        [L + 1], 2 for unrelated outputs. At L it is |F(x, W) − F(x, W*)|² of Liu et al. 2020.
    """

    def states(weights):
        hidden = apply(weights, x, config, **inputs).hidden
        return jax.vmap(lambda h: norm(None, h, config.norm, config.norm_eps))(hidden)

    by_token = jnp.mean(jnp.square(states(params) - states(other)), axis=2)
    mask = inputs.get("mask")
    exists = None if mask is None or np.ndim(mask) > 1 else as_mask(mask)
    return jnp.mean(by_token, axis=1, where=exists)
