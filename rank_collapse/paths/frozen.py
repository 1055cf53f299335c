"""A network with attention weights, norm statistics and MLP gates held fixed: an affine map.

At a given input, P_h, 1/σ of each norm, φ(z)/z of each MLP and the shares that a router gives are
constants; with them frozen every sublayer is linear plus a bias, so that its input may be split
into channels that pass it one by one. Channels are [g, n, d] with `ones` [g], the share of each
bias a channel takes: 1 for the channel of the offset, 0 for all others; [1] where all take the
same.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import edits, layers
from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import Entry
from rank_collapse.network.gains import LayerGains, layer_gains
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.network.sublayer import Site, looked_at, norm_input, sites_of
from rank_collapse.network.transformer import LayerTrace, block, scan_layers


@struct.dataclass
class Scales:
    """1/σ [n, 1] of the norms of one sublayer; None for absent ones."""

    outer: Any = None  # before the branch or after the sum
    branch: Any = None  # of what the branch puts out

    def at(self, site: Site) -> Any:
        """Of the norm at a site."""
        return self.branch if site.after_branch else self.outer


@struct.dataclass
class FrozenLayer:
    """What one layer's affine map takes from the forward pass; None for absent parts."""

    weights: Any  # [h, n, n]  P_h
    attention_scale: Any = None  # Scales of the attention sublayer's norms
    cross_weights: Any = None  # [h, n, m]
    cross_scale: Any = None
    gate: Any = None  # [n, f]  φ(z)/z, or φ(gate) of a gated MLP
    mlp_scale: Any = None
    unedited: Any = None  # {name: [n, d]}, states that an edit changes


def freeze_layer(
    params: BlockParams,
    x: Float[Array, "n d"],
    trace: LayerTrace,
    config: TransformerConfig,
    gains: LayerGains,
) -> FrozenLayer:
    """The constants of one layer from its input and what `transformer.block` computed.

    Matrix products here repeat the block's own; under jit the compiler computes them once.
    """
    sites = sites_of(params, config, gains)

    def scale(site, x, part):
        seen = (norm_input(s, x, part) for s in (site, site.at_branch))
        return Scales(*(None if a is None else frozen_scale(a, config) for a in seen))

    fields = {
        "unedited": trace.unedited,
        "weights": trace.attention,
        "attention_scale": scale(sites.attention, x, trace.attention_branch),
    }
    start, x = x, trace.after_attention
    if config.cross_attention:
        fields["cross_weights"] = trace.cross_attention
        fields["cross_scale"] = scale(sites.cross, x, trace.cross_branch)
        x = trace.after_cross
    if config.mlp != "none":
        x = start if sites.mlp.parallel else x
        fields["gate"] = mlp_gate(params.mlp, looked_at(sites.mlp, x), config.mlp, config.routing)
        fields["mlp_scale"] = scale(sites.mlp, x, trace.mlp_branch)
    return FrozenLayer(**fields)


def freeze(
    params: TransformerParams, entry: Entry, config: TransformerConfig
) -> tuple[Float[Array, "n d"], FrozenLayer, LayerTrace]:
    """(X^L, constants, traces) of one pass; the last two with a leading layer axis."""

    def body(x, step):
        layer, (index, gains) = step
        trace = block(layer, x, config, gains, entry, layer=index)
        return trace.hidden, (freeze_layer(layer, x, trace, config, gains), trace)

    gains = layer_gains(config, entry.x.dtype, params)
    last, told = scan_layers(body, entry.x, params, config, (jnp.arange(config.depth), gains))
    return last, *told


def carry_edit(
    constants: FrozenLayer,
    edit: Any,
    layer: Any,
    name: str,
    c: Float[Array, "g n d"],
    ones: Float[Array, "#g"],
) -> Float[Array, "g n d"]:
    """Channels of a state after its edit, which is frozen into its linear part: `edits.carried`."""
    if edit is None or name not in constants.unedited:
        return c
    here = functools.partial(edits.edited, edit, layer, name)
    return edits.carried(here, constants.unedited[name], c, ones)


def mlp_gate(
    params: layers.MLPParams,
    x: Float[Array, "n d"],
    kind: str,
    routing: layers.Routing | None = None,
) -> Float[Array, "n f"]:
    """g with MLP(x) = (g ∘ (x W_in + b_in)) W_out + b_out: φ(z)/z, or φ of a gated MLP's gate.

    Times the router's shares of a mixture of experts.
    """
    activation = layers.activation_of(kind)
    if kind in layers.GATED:
        gate = activation.fn(x @ params.w_gate + params.b_gate[None, :])
    else:
        gate = activation.gate(x @ params.w_in + params.b_in[None, :])
    return gate if routing is None else gate * layers.unit_shares(params, x, routing)


def frozen_scale(x: Float[Array, "n d"], config: TransformerConfig) -> Float[Array, "n 1"]:
    """1/σ of each token of the state that a norm sees."""
    return layers.norm_statistics(x, config.norm, config.norm_eps)[1].astype(x.dtype)


def frozen_norm(
    params: layers.NormParams,
    scale: Float[Array, "n 1"],
    c: Float[Array, "g n d"],
    ones: Float[Array, "#g"],
    config: TransformerConfig,
) -> Float[Array, "g n d"]:
    """(c − mean c)/σ · gain + ones · bias with σ frozen; RMSNorm without mean and bias."""
    if config.norm == "layer":
        c = c - c.mean(axis=-1, keepdims=True)
    c = c * (scale * params.gain[None, :])[None]
    return c if params.bias is None else c + _bias(params.bias, ones)


def norm_at(
    scales: Scales, ones: Float[Array, "#g"], config: TransformerConfig
) -> Callable[[Site, Array], Array]:
    """`frozen_norm` as `sublayer` takes it: (site, channels) → channels.

    Args:
        scales: 1/σ of the sublayer's norms.
        ones: The share of a bias that each channel takes.
        config: The network.
    """
    return lambda site, c: frozen_norm(site.norm, scales.at(site), c, ones, config)


def frozen_attention(
    params: AttentionParams,
    weights: Float[Array, "h n m"],
    c: Float[Array, "g m e"],
    ones: Float[Array, "#g"],
) -> Float[Array, "g n d"]:
    """Σ_h P_h (c W_V + ones·b_V) W_O + ones·b_O with P_h frozen.

    The value and output projections are one matrix product over all channels and heads.
    """
    h, _, v = params.w_v.shape
    g, m, _ = c.shape
    values = jnp.einsum("gme,hev->gmhv", c, params.w_v)
    values = values + ones[:, None, None, None] * params.b_v[None, None]
    mixed = jnp.einsum("hnm,hmx->hnx", weights, values.transpose(2, 1, 0, 3).reshape(h, m, g * v))
    mixed = mixed.reshape(h, -1, g, v).transpose(2, 1, 0, 3)
    return jnp.einsum("gnhv,hvd->gnd", mixed, params.w_o) + _bias(params.b_o, ones)


def frozen_mlp(
    params: layers.MLPParams,
    gate: Float[Array, "n f"],
    c: Float[Array, "g n d"],
    ones: Float[Array, "#g"],
) -> Float[Array, "g n d"]:
    """(gate ∘ (c W_in + ones·b_in)) W_out + ones·b_out with the gate frozen."""
    z = c @ params.w_in + _bias(params.b_in, ones)
    return (gate[None] * z) @ params.w_out + _bias(params.b_out, ones)


def _bias(bias, ones):
    return ones[:, None, None] * bias[None, None, :]
