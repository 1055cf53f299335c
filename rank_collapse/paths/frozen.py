"""A network with attention weights, norm statistics and MLP gates held fixed: an affine map.

At a given input, P_h, 1/σ of each norm, φ(z)/z of each MLP and the shares that a router gives are
constants; with them frozen every sublayer is linear plus a bias, so that its input may be split
into channels that pass it one by one. Channels are [g, n, d] with `ones` [g], the share of each
constant (biases, and the memory of cross-attention) a channel takes: 1 for the channel of the
offset, 0 for all others; [1] where all take the same.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import edits, layers
from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import ResidualSpec, token_sum
from rank_collapse.network.transformer import Forward, forward
from rank_collapse.network.walk import Algebra, Layer, walk


@struct.dataclass
class FrozenLayer:
    """What one layer's affine map takes from the forward pass; None for absent parts."""

    scales: Any  # {(kind, whether of the branch's output): 1/σ [n, 1] of that norm}
    weights: Any = None  # [h, n, n]  P_h
    gate: Any = None  # [n, f]  φ(z)/z, or φ(gate) of a gated MLP
    trace: Any = None  # LayerTrace, all that the layer computed


def freeze_layer(layer: Layer, seen: Forward) -> FrozenLayer:
    """The constants of one layer from what it computed."""
    config, gate, scales = layer.config, None, {}
    for kind, passage in seen.passages.items():
        scales[kind, False] = frozen_scale(passage.normed, config)
        part = passage.part if passage.spec.norms_branch else None
        scales[kind, True] = frozen_scale(part, config)
    if "mlp" in seen.passages:
        read = seen.passages["mlp"].branch_input
        gate = mlp_gate(layer.params.mlp, read, config.mlp, config.routing)
    return FrozenLayer(scales, seen.trace.attention, gate, seen.trace)


def freeze(
    params: TransformerParams,
    prepared: PreparedInputs,
    config: TransformerConfig,
    *,
    keep_heads: bool = False,
) -> tuple[FrozenLayer, FrozenLayer]:
    """(constants of all layers, with a leading axis; those of the final norm) of one pass."""

    def step(layer, x):
        seen = forward(layer, x, keep_heads=keep_heads)
        return seen.trace.hidden, freeze_layer(layer, seen)

    last, constants = walk(step, prepared.x, params, prepared, config)
    return constants, freeze_final(last, config)


def freeze_final(last: Float[Array, "n d"], config: TransformerConfig) -> FrozenLayer:
    """The constants of the norm behind the last layer."""
    return FrozenLayer({("final", False): frozen_scale(last, config)})


class Frozen(Algebra):
    """Channels [g, n, d] in frozen layers, whose constants are `Layer.extra`.

    Args:
        ones: The share of constants that each channel takes, [g] or [1].
    """

    def __init__(self, ones: Any):
        self.ones = ones

    def norm(self, layer, spec, c):
        scale = layer.extra.scales[spec.kind, spec.after_branch]
        return frozen_norm(spec.norm, scale, c, self.ones, spec)

    def add(self, layer, spec, c, part):
        return token_sum(spec, c, part)

    def attention(self, layer, seen):
        part = frozen_attention(layer.params.attention, layer.extra.weights, seen, self.ones)
        return carry_edit(layer, "attention_branch", part, self.ones), None

    def cross(self, layer, seen):
        params, memory = layer.params.cross, layer.inputs.memory[None]
        one = jnp.ones(1, memory.dtype)
        part = frozen_attention(params, layer.extra.trace.cross_attention, memory, one)
        part = jnp.broadcast_to(self.ones[:, None, None] * part, seen.shape)
        return carry_edit(layer, "cross_branch", part, self.ones), None

    def mlp(self, layer, seen):
        part = frozen_mlp(layer.params.mlp, layer.extra.gate, seen, self.ones)
        return carry_edit(layer, "mlp_branch", part, self.ones), None

    def after(self, layer, name, c):
        return carry_edit(layer, name, c, self.ones)


def carry_edit(
    layer: Layer, name: str, c: Float[Array, "g n d"], ones: Float[Array, "#g"]
) -> Float[Array, "g n d"]:
    """Channels of a state after its edit, which is frozen into its linear part: `edits.carried`."""
    edit = layer.inputs.edit
    if edit is None or name not in layer.extra.trace.unedited:
        return c

    def changed(value):
        return edits.edited(edit, layer.index, name, value)

    return edits.carried(changed, layer.extra.trace.unedited[name], c, ones)


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


def frozen_scale(x: Any, config: TransformerConfig) -> Any:
    """1/σ [n, 1] of each token that a norm is applied to; None for None."""
    if x is None:
        return None
    return layers.norm_statistics(x, config.norm, config.norm_eps)[1].astype(x.dtype)


def frozen_norm(
    params: layers.NormParams,
    scale: Float[Array, "n 1"],
    c: Float[Array, "g n d"],
    ones: Float[Array, "#g"],
    spec: ResidualSpec,
) -> Float[Array, "g n d"]:
    """(c − mean c)/σ · gain + ones · bias with σ frozen; RMSNorm without mean and bias."""
    if spec.norm_kind == "layer":
        c = c - c.mean(axis=-1, keepdims=True)
    c = c * (scale * params.gain[None, :])[None]
    return c if params.bias is None else c + _bias(params.bias, ones)


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
