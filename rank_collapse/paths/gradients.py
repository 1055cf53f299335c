"""The gradient at the input, split by the length of the paths that carry it, exactly.

With attention weights, norm statistics and gates frozen the output is Σ_k M_k X^0 + offset, so that
a gradient v of the output reaches the input as Σ_k M_kᵀ v: one term for each path length.

Axis letters: k path lengths 0 .. L, n tokens, d width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network import (
    CROSS,
    Covers,
    Layer,
    PreparedInputs,
    TransformerConfig,
    TransformerParams,
    everything_but,
    final_norm,
    forward,
)
from rank_collapse.paths.channels import Channels, Layout
from rank_collapse.paths.contributions import moved
from rank_collapse.paths.frozen import Frozen, freeze_final

# A memory has gradients of its own; without attention skips all paths have length L.
COVERS = Covers("a gradient by path length", everything_but(*CROSS) | {"attention_skip": (True,)})


def at_output(
    params: TransformerParams,
    last: Float[Array, "n d"],
    cotangent: Float[Array, "n d"],
    prepared: PreparedInputs,
    config: TransformerConfig,
) -> Float[Array, "k n d"]:
    """The gradients after the last layer, indexed by L minus the length of the paths after it.

    The cotangent [n, d] is the gradient of a loss with respect to the output.
    """

    def output(c):
        algebra = Frozen(jnp.zeros(1, c.dtype))
        extra = freeze_final(params, last, config)
        return final_norm(algebra, c[None], params, prepared, config, extra)[0]

    (cotangent,) = jax.linear_transpose(output, last)(cotangent)
    return jnp.zeros((config.depth + 1, *last.shape), last.dtype).at[-1].set(cotangent)


def pulled_back(
    layer: Layer, x: Float[Array, "n d"], gradients: Float[Array, "k n d"]
) -> Float[Array, "k n d"]:
    """The gradients before a layer from those after it: the transpose of how it moves channels.

    C_k = M_k X^0 are the sums of `path_contributions`. G_k = M_kᵀ v is what reaches X^0 of a
    gradient v of the output along paths of length k: Σ_k G_k is the gradient of the frozen network,
    and ⟨G_k, X^0⟩ = ⟨v, C_k⟩. Paths through derivatives of attention weights, norm statistics and
    gates are not in it: a frozen network has none. Slot L − j holds what came along j heads: a
    layer moves channels one slot up, and its transpose moves gradients one slot down.

    Source: Veit et al. 2016, section 4.3, who sample paths and measure the gradient at the input;
    here all paths of a length are summed.
    """
    config = layer.config
    layout, seen = Layout(config=config, count_mlps=False), forward(layer, x)
    # depth − index slots after, one more before
    live = jnp.arange(config.depth + 1) >= layer.index

    def forward_channels(start):
        zeros = jnp.zeros_like(x)
        channels = Channels(start[:, None], None, zeros, live=live, biased=False)
        return moved(layer, seen, channels, layout).start[:, 0]

    (before,) = jax.linear_transpose(forward_channels, gradients)(gradients)
    return before


def gradient_effects(gradients: Float[Array, "k n d"]) -> dict[str, Float[Array, "k"]]:
    """How much of the gradient comes along paths of each length.

    gradient_share   ‖G_k‖_F/Σ_j ‖G_j‖_F
    gradient_size    ‖G_k‖_F/‖Σ_j G_j‖_F, above 1 where lengths cancel
    """
    size = jnp.sqrt(jnp.sum(jnp.square(gradients), axis=(-2, -1)))
    whole = jnp.sqrt(jnp.sum(jnp.square(gradients.sum(axis=0))))
    return {"gradient_share": size / size.sum(), "gradient_size": size / whole}
