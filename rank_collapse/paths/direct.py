"""The output as a sum of what every part wrote: input, heads, MLPs, biases (direct contributions).

Unlike paths, which pass what comes after them, a part here reaches the output by skips and frozen
norms alone: direct logit attribution reads these.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rank_collapse import struct
from rank_collapse.network import attention as attn
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import enter
from rank_collapse.network.gains import layer_gains
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.sublayer import looked_at, sites_of, sublayer
from rank_collapse.network.transformer import scan_layers
from rank_collapse.paths import frozen


@struct.dataclass
class DirectContributions:
    """Parts of the output that sum to it.

    Attributes:
        start: [n, d], the input X^0.
        heads: [L, h, n, d], P_h (x W_v + b_v) W_o of each head.
        mlps: [L, n, d], each MLP with its biases; None without.
        cross: [L, n, d], each cross-attention with its biases; None without.
        offset: [n, d], biases of attention outputs and of norms.
    """

    start: Any
    heads: Any
    mlps: Any
    cross: Any
    offset: Any

    @property
    def total(self) -> Array:
        """The sum of all parts: the output."""
        layers = [p.sum(axis=0) for p in (self.mlps, self.cross) if p is not None]
        return sum(layers, self.start + self.offset + self.heads.sum(axis=(0, 1)))


@full_precision
def direct_contributions(
    params: TransformerParams, x: Any, config: TransformerConfig, **inputs: Any
) -> DirectContributions:
    """What each part of the network adds to the output by itself, norm statistics held fixed.

    With post-norms a part passes every norm after it; with pre-norms the final norm alone.

    Args:
        params, x, config: As in `apply`.
        **inputs: mask, bias, memory, memory_mask, segments, positions and edit of `apply`; what an
            edit of a state does to its parts is as in `path_contributions`.

    Raises:
        ValueError: As `apply`.

    Source: the residual stream of Elhage et al. 2021, A mathematical framework for transformer
    circuits.
    """
    params, entry = enter(params, x, config, **inputs)
    return _direct(params, entry, config)


@jax.jit
def _direct(params, entry, config) -> DirectContributions:
    l, h, (n, d) = config.depth, config.num_heads, entry.x.shape
    last, constants, trace = frozen.freeze(params, entry, config)
    # Rows: the input, the heads, each layer's MLP, each layer's cross-attention, the offset.
    mlp_row, cross_row, num_rows = 1 + l * h, 1 + l * h + l, 2 + l * h + 2 * l
    ones = jnp.zeros(num_rows, entry.x.dtype).at[-1].set(1)

    def norm_by(scales):
        return frozen.norm_at(scales, ones, config)

    def body(c, step):
        layer, (index, own, computed, x, gains) = step
        sites = sites_of(layer, config, gains)

        def passed(name, c, ones=ones):
            return frozen.carry_edit(own, entry.edit, index, name, c, ones)

        def written(row, part):
            return lambda seen: (jnp.zeros_like(seen).at[row].set(part), None)

        def heads(seen):
            parts = attn.head_outputs(layer.attention, own.weights, looked_at(sites.attention, x))
            bias = jnp.broadcast_to(layer.attention.b_o, (1, n, d))
            shares = jnp.zeros(h + 1, c.dtype).at[-1].set(1)
            parts = passed("attention_branch", jnp.concatenate([parts, bias]), shares)
            empty = jnp.zeros_like(seen).at[-1].set(parts[-1])
            return jax.lax.dynamic_update_slice(empty, parts[:-1], (1 + index * h, 0, 0)), None

        start = c
        c, _ = sublayer(sites.attention, c, heads, norm_by(own.attention_scale))
        c = passed("after_attention", c)
        if config.cross_attention:
            cross = written(cross_row + index, computed.cross_branch)
            c, _ = sublayer(sites.cross, c, cross, norm_by(own.cross_scale))
            c = passed("after_cross", c)
        if config.mlp != "none":
            mlp = written(mlp_row + index, computed.mlp_branch)
            c, _ = sublayer(sites.mlp, c, mlp, norm_by(own.mlp_scale), start=start)
        return passed("hidden", c), None

    inputs = jnp.concatenate([entry.x[None], trace.hidden[:-1]])
    gains = layer_gains(config, entry.x.dtype, params)
    swept = (jnp.arange(l), constants, trace, inputs, gains)
    c = jnp.zeros((num_rows, n, d), entry.x.dtype).at[0].set(entry.x)
    c, _ = scan_layers(body, c, params, config, swept)
    if config.final_norm:
        c = frozen.frozen_norm(
            params.final_norm, frozen.frozen_scale(last, config), c, ones, config
        )
    return DirectContributions(
        start=c[0],
        heads=c[1:mlp_row].reshape(l, h, n, d),
        mlps=c[mlp_row:cross_row] if config.mlp != "none" else None,
        cross=c[cross_row:-1] if config.cross_attention else None,
        offset=c[-1],
    )
