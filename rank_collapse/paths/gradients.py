"""The gradient at the input, split by the length of the paths that carry it, exactly.

With attention weights, norm statistics and gates frozen the output is Σ_k M_k X^0 + offset, so that
a gradient v of the output reaches the input as Σ_k M_kᵀ v: one term for each path length.

Axis letters: k path lengths 0 .. L, n tokens, d width.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import Entry, enter
from rank_collapse.network.gains import layer_gains
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import Layer, run
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import block
from rank_collapse.paths import frozen
from rank_collapse.paths.channels import Channels, Layout
from rank_collapse.paths.contributions import moved


@full_precision
def length_gradients(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    cotangent: Float[Array, "n d"],
    *,
    mask: Any = None,
    bias: Any = None,
    segments: Any = None,
    positions: Any = None,
) -> Float[Array, "k n d"]:
    """G_k = M_kᵀ v, what reaches X^0 of a gradient v of the output along paths of length k.

    C_k = M_k X^0 are the sums of `path_contributions`; Σ_k G_k is the gradient of the frozen
    network, and ⟨G_k, X^0⟩ = ⟨v, C_k⟩. Paths through derivatives of attention weights, norm
    statistics and gates are not in it: a frozen network has none.

    Args:
        params, x, config, mask, bias, segments, positions: As in `apply`.
        cotangent: v, the gradient of a loss with respect to the output.

    Raises:
        ValueError: As `apply`; a network with cross-attention or without attention skips.

    Source: Veit et al. 2016, section 4.3, who sample paths and measure the gradient at the input;
    here all paths of a length are summed.
    """
    require_lengths(config)
    params, entry = enter(
        params, x, config, mask=mask, bias=bias, segments=segments, positions=positions
    )
    if cotangent.shape != entry.x.shape:
        raise ValueError(f"cotangent of shape {cotangent.shape} is not {entry.x.shape}")
    return _length_gradients(params, entry, config, cotangent)


@jax.jit
def _length_gradients(params, entry, config, cotangent):
    states = run(StatePass(), params, entry, config)

    def body(gradients, step):
        layer, (x, gains, index) = step
        return pulled_back(layer, gains, index, x, gradients, entry, config), None

    start = at_output(params, states[-1], cotangent, config)
    swept = states[:-1], layer_gains(config, entry.x.dtype, params), jnp.arange(config.depth)
    if config.layer_map:
        rows = jnp.asarray(config.layer_map)
        params = params.replace(layers=jax.tree.map(lambda a: a[rows], params.layers))
    gradients, _ = jax.lax.scan(body, start, (params.layers, swept), reverse=True)
    return gradients[::-1]


def require_lengths(config: TransformerConfig) -> None:
    """Refuses networks whose gradients are not split by length.

    Raises:
        ValueError: One.
    """
    if config.cross_attention:
        raise ValueError("cross_attention=True: a memory has gradients of its own")
    if not config.attention_skip:
        raise ValueError("attention_skip=False: all paths have length L")


def at_output(
    params: TransformerParams,
    last: Float[Array, "n d"],
    cotangent: Float[Array, "n d"],
    config: TransformerConfig,
) -> Float[Array, "k n d"]:
    """The gradients behind the last layer, by L less the length of the paths behind it.

    Args:
        params: The final norm is read of them.
        last: X^L.
        cotangent: The gradient of the output.
        config: The network.
    """
    if config.final_norm:
        scale, none = frozen.frozen_scale(last, config), jnp.zeros(1, last.dtype)

        def norm(c):
            return frozen.frozen_norm(params.final_norm, scale, c[None], none, config)[0]

        (cotangent,) = jax.linear_transpose(norm, last)(cotangent)
    return jnp.zeros((config.depth + 1, *last.shape), last.dtype).at[-1].set(cotangent)


def pulled_back(
    params: Any,
    gains: Any,
    index: Any,
    x: Float[Array, "n d"],
    gradients: Float[Array, "k n d"],
    entry: Entry,
    config: TransformerConfig,
) -> Float[Array, "k n d"]:
    """The gradients before a layer from those behind it: the transpose of how it moves channels.

    Slot L − j holds what came along j heads: a layer moves channels one slot up, and its transpose
    moves gradients one slot down.

    Args:
        params, gains, index: Of the layer.
        x: What comes into it.
        gradients: Behind it.
        entry: From `enter`.
        config: The network.
    """
    layout = Layout(config=config, count_mlps=False)
    trace = block(params, x, config, gains, entry, layer=index)
    layer = Layer(params, gains, index, x, trace)
    live = jnp.arange(config.depth + 1) >= index  # depth − index slots behind, one more before

    def forward(start):
        zeros = jnp.zeros_like(x)
        channels = Channels(start[:, None], None, zeros, live=live, biased=False)
        return moved(layer, channels, entry, layout, gains).start[:, 0]

    (before,) = jax.linear_transpose(forward, gradients)(gradients)
    return before


@dataclasses.dataclass(frozen=True)
class StatePass:
    """The hidden states [L + 1, n, d] of all layers: a `LayerPass`."""

    forward: ClassVar[bool] = True

    def begin(self, entry: Entry, config: TransformerConfig) -> tuple[()]:
        """Nothing."""
        return ()

    def step(
        self, layer: Layer, carry: Any, entry: Entry, config: TransformerConfig
    ) -> tuple[Any, Float[Array, "n d"]]:
        """What comes out of the layer."""
        return carry, layer.trace.hidden

    def finish(
        self, params: Any, last: Any, carry: Any, told: Any, entry: Entry, config: TransformerConfig
    ) -> Float[Array, "l n d"]:
        """X^0 .. X^L."""
        return jnp.concatenate([entry.x[None], told])


def gradient_effects(gradients: Float[Array, "k n d"]) -> dict[str, Float[Array, "k"]]:
    """How much of the gradient comes along paths of each length.

    gradient_share   ‖G_k‖_F/Σ_j ‖G_j‖_F
    gradient_size    ‖G_k‖_F/‖Σ_j G_j‖_F, above 1 where lengths cancel
    """
    size = jnp.sqrt(jnp.sum(jnp.square(gradients), axis=(-2, -1)))
    whole = jnp.sqrt(jnp.sum(jnp.square(gradients.sum(axis=0))))
    return {"gradient_share": size / size.sum(), "gradient_size": size / whole}
