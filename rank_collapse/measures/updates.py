"""How updates of the weights change the output, layer by layer; gradients and updates by matrix."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.measures.residuals import effective_rank
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


def matrices_of(params: TransformerParams) -> dict[str, dict[str, Array]]:
    """The weight matrices of the layers by part and name, each [L, ...]; heads are one matrix."""
    parts = {part: getattr(params.layers, part) for part in MATRICES}
    return {
        part: {n: w for n in MATRICES[part] if (w := getattr(found, n)) is not None}
        for part, found in parts.items()
        if found is not None
    }


def with_matrices(params: TransformerParams, matrices: Any) -> TransformerParams:
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

    return with_matrices(params, jax.tree.map(step, matrices_of(params), direction))


def gradient_norms(
    loss: Callable[[TransformerParams], Array], params: TransformerParams
) -> dict[str, dict[str, Float[Array, "l"]]]:
    """‖∂loss/∂W‖_F of W_Q, W_K, W_V, W_O and the MLP's matrices, by layer, all heads together.

    Args:
        loss: Scalar function of the parameters, such as
            lambda p: jnp.sum(target * rc.apply(p, x, config).output).

    Returns:
        {part: {matrix: [L]}}; the rows of shared parameters where layers share them.

    Source: Noci et al. 2022, "Signal propagation in Transformers", for those of W_Q and W_K.
    """
    of_matrices = jax.grad(lambda m: loss(with_matrices(params, m)))
    return norms_of(of_matrices(matrices_of(params)))


def update_ranks(
    params: TransformerParams, other: TransformerParams
) -> dict[str, dict[str, Float[Array, "l"]]]:
    """Effective rank of W* − W of W_Q, W_K, W_V, W_O and the MLP's matrices, by layer.

    exp(−Σ_i p_i log p_i), p_i = σ_i/Σ_j σ_j; 0 where nothing moved. All heads are one matrix, W_Q
    [d, h·k] and W_O [h·v, d].

    Args:
        params, other: Weights before and after an update or a training; for the rank of a gradient
            zeros and the gradient.

    Returns:
        {part: {matrix: [L]}}; the rows of shared parameters where layers share them.

    Source: Roy and Vetterli 2007 for the rank.
    """

    def rank(path, a, b):
        update = b - a
        if update.ndim == 4 and path[-1].key != "w_o":
            update = jnp.moveaxis(update, 1, 2).reshape(len(update), update.shape[2], -1)
        return effective_rank(update.reshape(len(update), -1, update.shape[-1]))

    return jax.tree_util.tree_map_with_path(rank, matrices_of(params), matrices_of(other))


def norms_of(matrices: dict[str, dict[str, Array]]) -> dict[str, dict[str, Float[Array, "l"]]]:
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
