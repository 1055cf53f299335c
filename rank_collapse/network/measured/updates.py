"""How updates of the weights change the output, layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.annotations import ArrayLike
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.input_checks import as_mask
from rank_collapse.network.layers import apply_norm
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import apply

MATRICES = {
    "attention": ("w_q", "w_k", "w_v", "w_o"),
    "cross": ("w_q", "w_k", "w_v", "w_o"),
    "mlp": ("w_in", "w_gate", "w_out"),
}


@full_precision
def output_change(
    params: TransformerParams,
    other: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    **inputs: ArrayLike | None,
) -> Float[Array, "l"]:
    """Compute |x̂_l − x̂*_l|²/d of two sets of weights after every layer, a mean over tokens.

    States are normalised before they are compared, as the norm that reads a pre-norm stream does.
    The first l layers are the network of l layers, if the gains do not depend on the depth.

    Args:
        params, other: The weights, before and after an update.
        x, config, **inputs: See `apply`; padded tokens (mask Bool [n]) are left out.

    Returns:
        [L + 1], 2 for unrelated outputs. At L it is |F(x, W) − F(x, W*)|² of Liu et al. 2020.
    """

    def normalise_states(weights):
        hidden = apply(weights, x, config, **inputs).hidden
        return jax.vmap(lambda h: apply_norm(None, h, config.norm, config.norm_eps))(hidden)

    difference = normalise_states(params) - normalise_states(other)
    mask = inputs.get("mask")
    token_mask = None if mask is None or np.ndim(mask) > 1 else as_mask(mask)
    return jnp.mean(jnp.mean(jnp.square(difference), axis=2), axis=1, where=token_mask)
