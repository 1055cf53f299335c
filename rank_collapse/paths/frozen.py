"""A network with attention weights, norm statistics and MLP gates held fixed: an affine map.

At a given input, P_h, 1/σ of each norm, φ(z)/z of each MLP and the shares that a router gives are
constants; with them frozen every sublayer is linear plus a bias, so that its input may be split
into channels that pass it one by one. Channels are [g, n, d] with `ones` [g], the share of each
constant (biases, and the memory of cross-attention) a channel takes: 1 for the channel of the
offset, 0 for all others; [1] where all take the same.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import edits, layers, streams
from rank_collapse.network.attention import AttentionParams, apply_mix
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import ResidualSpec, add_to_stream, final_spec
from rank_collapse.network.streams import Connection
from rank_collapse.network.transformer import LayerValues, compute_layer
from rank_collapse.network.walk import Algebra, Layer, walk_layers


class FrozenLayer(struct.Struct):
    """The constants of one layer's affine map, from the forward pass; None for absent parts."""

    scales: Any = None  # {(kind, whether of the branch's output): 1/σ [n, 1] of that norm}
    weights: Any = None  # [h, n, n]  P_h
    gate: Any = None  # [n, f]  φ(z)/z, or φ(gate) of a gated MLP
    trace: Any = None  # LayerTrace, all that the layer computed
    unedited: Any = None  # {name: value} of what an edit changes
    mixed: Any = None  # (q, k, v) of the caller's own attention
    connections: Any = None  # {kind: streams.Connection}, of several streams
    head_gain: Any = None  # [h], multiplies what each head mixes; None for 1


def freeze_layer(layer: Layer, seen: LayerValues) -> FrozenLayer:
    """The constants of one layer from what it computed."""
    config, gate, mixed, scales, connections = layer.config, None, None, {}, {}
    for kind, passage in seen.sublayers.items():
        connections[kind] = layer.connection(passage.spec, passage.state)
        scales[kind, False] = frozen_scale(passage.norm_input, config)
        part = passage.branch_output if passage.spec.norms_branch else None
        scales[kind, True] = frozen_scale(part, config)
    if "mlp" in seen.sublayers:
        read = seen.sublayers["mlp"].branch_input
        gate = mlp_gate(layer.params.mlp, read, config)
    if config.mix is not None:
        own = tuple(seen.places.kept[name] for name in "qkv")
        mixed = None if apply_mix(config.mix, *own, layer.context)[1] is None else own
    unedited = seen.places.unedited
    return FrozenLayer(scales, seen.trace.attention, gate, seen.trace, unedited, mixed, connections)


def freeze(
    params: TransformerParams,
    prepared: PreparedInputs,
    config: TransformerConfig,
    *,
    keep: tuple[str, ...] = (),
) -> tuple[FrozenLayer, FrozenLayer]:
    """(constants of all layers, with a leading axis; those of the final norm) of one pass."""

    def step(layer, x):
        seen = compute_layer(layer, x, keep=keep)
        return seen.trace.hidden, freeze_layer(layer, seen)

    last, constants = walk_layers(step, prepared.x, params, prepared, config)
    return constants, freeze_final(params, last, config)


def freeze_final(
    params: TransformerParams, last: Float[Array, "*s n d"], config: TransformerConfig
) -> FrozenLayer:
    """The constants of the norm after the last layer, and of what it reads of several streams."""
    layer = Layer(None, None, config.depth, config, None)
    own = layer.connection(final_spec(params, config), last)
    scale = frozen_scale(streams.merge_streams(own, last), config)
    return FrozenLayer({("final", False): scale}, connections={"final": own})


class Frozen(Algebra):
    """Channels [g, n, d] in frozen layers, whose constants are `Layer.extra`, with their `ones`."""

    def __init__(self, ones: Any):
        self.ones = ones

    def apply_norm(self, layer, spec, c):
        """(c − mean c)/σ · gain + ones · bias with σ frozen; RMSNorm without mean and bias."""
        scale = layer.extra.scales[spec.kind, spec.after_branch]
        if spec.norm_kind == "layer":
            c = c - c.mean(axis=-1, keepdims=True)
        c = c * (scale * spec.norm.gain[None, :])[None]
        return c if spec.norm.bias is None else c + _bias(spec.norm.bias, self.ones)

    def edit_branch_input(self, layer, kind, c):
        return carry_edit(layer, f"{kind}_input", c, self.ones)

    def add_branch(self, layer, spec, c, part):
        return add_to_stream(spec, c, part)

    def apply_attention(self, layer, branch_input):
        part = self_attention(layer, branch_input, self.ones)
        return carry_edit(layer, "attention_branch", part, self.ones), None

    def apply_cross(self, layer, branch_input):
        memory = layer.inputs.memory[None]
        part = cross_attention(layer, memory, jnp.ones(1, memory.dtype))
        part = jnp.broadcast_to(self.ones[:, None, None] * part, branch_input.shape)
        return carry_edit(layer, "cross_branch", part, self.ones), None

    def apply_mlp(self, layer, branch_input):
        """(gate ∘ (c W_in + ones·b_in)) W_out + ones·b_out with the gate frozen."""
        params, ones = layer.params.mlp, self.ones
        hidden = layer.extra.gate[None] * (branch_input @ params.w_in + _bias(params.b_in, ones))
        hidden = carry_edit(layer, "mlp_hidden", hidden, ones)
        part = hidden @ params.w_out + _bias(params.b_out, ones)
        return carry_edit(layer, "mlp_branch", part, ones), None

    def edit_state(self, layer, name, c):
        return carry_edit(layer, name, c, self.ones)


def connection(layer: Layer, spec: ResidualSpec) -> Connection | None:
    """How a frozen sublayer is connected to several streams; None where there is one."""
    return layer.extra.connections[spec.kind] if layer.config.streams else None


def carry_edit(
    layer: Layer, name: str, c: Float[Array, "g *s"], ones: Float[Array, "#g"]
) -> Float[Array, "g *s"]:
    """Channels of a value after its edit, which is frozen into its linear part: `edits.carried`."""
    if layer.inputs.edit is None or name not in layer.inputs.edit:
        return c
    edit = layer.inputs.edit[name]
    return edits.carry_channels(lambda v: edit(v, layer.index), layer.extra.unedited[name], c, ones)


def self_attention(
    layer: Layer, c: Float[Array, "g n d"], ones: Float[Array, "#g"]
) -> Float[Array, "g n d"]:
    """Self-attention of channels in a layer whose constants are `Layer.extra`."""
    extra, mix = layer.extra, None
    if extra.mixed is not None:
        q, k, v = extra.mixed

        def mix(values):
            return edits.carry_channels(
                lambda v: apply_mix(layer.config.mix, q, k, v, layer.context)[1], v, values, ones
            )

    carry = functools.partial(carry_edit, layer)
    by_head = "head_output" in (layer.inputs.edit or ())
    return frozen_attention(
        layer.params.attention,
        extra.weights,
        c,
        ones,
        carry=carry,
        mix=mix,
        head_gain=extra.head_gain,
        by_head=by_head,
    )


def cross_attention(
    layer: Layer, c: Float[Array, "g m e"], ones: Float[Array, "#g"]
) -> Float[Array, "g n d"]:
    """Attention of channels of the memory in a layer whose constants are `Layer.extra`."""

    def carry(name, c, ones):
        return carry_edit(layer, f"cross_{name}", c, ones)

    params, weights = layer.params.cross, layer.extra.trace.cross_attention
    by_head = "cross_head_output" in (layer.inputs.edit or ())
    return frozen_attention(params, weights, c, ones, carry=carry, by_head=by_head)


def mlp_gate(
    params: layers.MLPParams, x: Float[Array, "n d"], config: TransformerConfig
) -> Float[Array, "n f"]:
    """g with MLP(x) = (g ∘ (x W_in + b_in)) W_out + b_out: φ(z)/z, or φ of a gated MLP's gate.

    Times the router's shares of a mixture of experts.
    """
    routing = config.routing
    if config.mlp in layers.GATED:
        gate = layers.compute_gate(params, x, config.mlp)
    else:
        units = x @ params.w_in + params.b_in[None, :]
        gate = layers.get_activation(config.mlp).gate(units)
    return gate if routing is None else gate * layers.unit_shares(params, x, routing)


def frozen_scale(x: Any, config: TransformerConfig) -> Any:
    """1/σ [n, 1] of each token that a norm is applied to; None for None."""
    if x is None:
        return None
    return layers.norm_statistics(x, config.norm, config.norm_eps)[1].astype(x.dtype)


def frozen_attention(
    params: AttentionParams,
    weights: Float[Array, "h n m"],
    c: Float[Array, "g m e"],
    ones: Float[Array, "#g"],
    *,
    carry: Callable | None = None,
    mix: Callable | None = None,
    head_gain: Any = None,
    by_head: bool = False,
) -> Float[Array, "g n d"]:
    """Σ_h P_h (c W_V + ones·b_V) W_O + ones·b_O with P_h frozen.

    The value and output projections are one matrix product over all channels and heads.

    Args:
        params, weights: Of the layer.
        c, ones: The channels.
        carry: (name, channels, ones) -> channels after the edits of "v" and "head_output".
        mix: What mixes values [g, h, m, v] in the place of the weights.
        head_gain: [h], multiplies what each head mixes; None for 1.
        by_head: Whether there is an edit of "head_output".
    """
    h, _, v = params.w_v.shape
    g, m, _ = c.shape
    carry = (lambda name, c, ones: c) if carry is None else carry
    values = jnp.einsum("gme,hev->gmhv", c, params.w_v)
    values = values + ones[:, None, None, None] * params.b_v[None, None]
    values = carry("v", values.transpose(0, 2, 1, 3), ones)  # [g, h, m, v]
    if mix is None:
        values = values.transpose(1, 2, 0, 3).reshape(h, m, g * v)
        mixed = jnp.einsum("hnm,hmx->hnx", weights, values).reshape(h, -1, g, v)
        mixed = mixed.transpose(2, 1, 0, 3)
    else:
        mixed = mix(values).transpose(0, 2, 1, 3)
    if head_gain is not None:
        mixed = mixed * head_gain[None, None, :, None]
    if by_head:
        heads = carry("head_output", jnp.einsum("gnhv,hvd->ghnd", mixed, params.w_o), ones)
        return heads.sum(axis=1) + _bias(params.b_o, ones)
    return jnp.einsum("gnhv,hvd->gnd", mixed, params.w_o) + _bias(params.b_o, ones)


def _bias(bias, ones):
    return ones[:, None, None] * bias[None, None, :]
