"""A network with attention weights, norm statistics and MLP gates held fixed: an affine map.

At a given input, P_h, 1/σ of each norm, φ(z)/z of each MLP and the shares of a router are
constants. With these frozen, every sublayer is linear plus a bias, so its input may be split into
channels that pass it one by one. Channels are [g, n, d] with `ones` [g], each channel's share of
the constants (biases, and the memory of cross-attention): 1 for the channel of the offset and 0 for
all others; [1] where all have the same share.

Axis letters: g channels, n queries, m keys, h heads, v value width, d and e widths, f MLP width.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.annotations import ArrayLike, Leaf
from rank_collapse.network import edits, layers
from rank_collapse.network.attention import apply_mix
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import add_to_stream
from rank_collapse.network.trace import LayerTrace
from rank_collapse.network.transformer import LayerValues, compute_layer
from rank_collapse.network.walk import Algebra, Layer, walk_layers


class FrozenLayer(struct.Struct):
    """The constants of one layer's affine map, from the forward pass; None for absent parts."""

    # {(kind, whether of the branch's output): 1/σ [n, 1] of that norm}
    scales: dict[tuple[str, bool], Leaf] | None = None
    weights: Leaf | None = None  # [h, n, n]  P_h
    gate: Leaf | None = None  # [n, f]  φ(z)/z, or φ(gate) of a gated MLP
    trace: LayerTrace | None = None  # all that the layer computed
    unedited: dict[str, Leaf] | None = None  # {name: value} of what an edit changes
    # (q, k, v) of an attention that computes its full output
    mix_inputs: tuple[Leaf, ...] | None = None
    head_gain: Leaf | None = None  # [h], multiplies what each head mixes; None for 1


def freeze_layer(layer: Layer, layer_values: LayerValues) -> FrozenLayer:
    """Collect the constants of one layer from its values in the forward pass.

    Args:
        layer: The layer.
        layer_values: Values that the layer computed.
    """
    config = layer.config
    scales, gate, mix_inputs = {}, None, None
    for kind, sublayer in layer_values.sublayers.items():
        scales[kind, False] = frozen_scale(sublayer.norm_input, config)
        branch_output = sublayer.branch_output if sublayer.spec.norms_branch else None
        scales[kind, True] = frozen_scale(branch_output, config)
    if "mlp" in layer_values.sublayers:
        gate = mlp_gate(layer.params.mlp, layer_values.sublayers["mlp"].branch_input, config)
    if config.mix is not None:
        saved = tuple(layer_values.edit_points.saved[name] for name in "qkv")
        if apply_mix(config.mix, *saved, layer.context)[1] is not None:
            mix_inputs = saved
    return FrozenLayer(
        scales=scales,
        weights=layer_values.trace.attention,
        gate=gate,
        trace=layer_values.trace,
        unedited=layer_values.edit_points.unedited,
        mix_inputs=mix_inputs,
    )


def freeze(
    params: TransformerParams,
    prepared: PreparedInputs,
    config: TransformerConfig,
    *,
    keep: tuple[str, ...] = (),
) -> tuple[FrozenLayer, FrozenLayer]:
    """Run the forward pass and collect its constants.

    Args:
        params, prepared: Parameters and inputs from `prepare_inputs`.
        config: The network.
        keep: Names of edit points whose values the layers' traces keep.

    Returns:
        The constants of all layers, with a leading axis, and the constants of the final norm.
    """

    def step(layer, x):
        layer_values = compute_layer(layer, x, keep=keep)
        return layer_values.trace.hidden, freeze_layer(layer, layer_values)

    last_state, constants = walk_layers(step, prepared.x, params, prepared, config)
    return constants, freeze_final(last_state, config)


def freeze_final(last_state: Float[Array, "n d"], config: TransformerConfig) -> FrozenLayer:
    """Collect the constants of the final norm, which reads X^L."""
    return FrozenLayer({("final", False): frozen_scale(last_state, config)})


class Frozen(Algebra):
    """Channels [g, n, d] in frozen layers, whose constants are `Layer.extra`, with their `ones`."""

    def __init__(self, ones: ArrayLike):
        self.ones = ones

    def apply_norm(self, layer, spec, c):
        """Compute (c − mean c)/σ · gain + ones · bias with the σ of the forward pass; RMSNorm has
        no mean and no bias.

        The channels c [g, n, d] are summands of the state; `ones` [g] says which share of each bias
        belongs to a channel (1 in all together).
        """
        scale = layer.extra.scales[spec.kind, spec.after_branch]
        if spec.norm_kind == "layer":
            c = c - c.mean(axis=-1, keepdims=True)
        c = c * (scale * spec.norm.gain[None, :])[None]
        return c if spec.norm.bias is None else c + _share_bias(spec.norm.bias, self.ones)

    def add_branch(self, layer, spec, c, branch_output):
        """Add the branch's channels to those of the stream, with the gains of both."""
        return add_to_stream(spec, c, branch_output)

    def edit_branch_input(self, layer, kind, c):
        """Apply the linear part of the caller's edit of what a branch reads, if there is one."""
        return carry_edit(layer, f"{kind}_input", c, self.ones)

    def edit_state(self, layer, name, c):
        """Apply the linear part of the caller's edit of this value, if there is one."""
        return carry_edit(layer, name, c, self.ones)

    def apply_attention(self, layer, branch_input):
        """Attend with the weights of the forward pass: (the output's channels, no further results:
        None)."""
        output = attend_channels(layer, "attention", branch_input, self.ones)
        return carry_edit(layer, "attention_branch", output, self.ones), None

    def apply_cross(self, layer, branch_input):
        """Attend to the memory with frozen weights: (the output, no further results: None)."""
        memory = layer.inputs.memory[None]
        output = attend_channels(layer, "cross", memory, jnp.ones(1, memory.dtype))
        output = jnp.broadcast_to(self.ones[:, None, None] * output, branch_input.shape)
        return carry_edit(layer, "cross_branch", output, self.ones), None

    def apply_mlp(self, layer, branch_input):
        """Compute (gate ∘ (c W_in + ones·b_in)) W_out + ones·b_out with the gate of the forward
        pass.

        The channels c [g, n, d] are summands of the MLP's input, and the gate φ(z)/z of the sum
        makes the MLP linear. `ones` [g] says which share of each bias belongs to a channel (1 in
        all together).

        Returns:
            (the output's channels, no further results: None).
        """
        params, ones = layer.params.mlp, self.ones
        units = branch_input @ params.w_in + _share_bias(params.b_in, ones)
        hidden = carry_edit(layer, "mlp_hidden", layer.extra.gate[None] * units, ones)
        output = hidden @ params.w_out + _share_bias(params.b_out, ones)
        return carry_edit(layer, "mlp_branch", output, ones), None


def carry_edit(
    layer: Layer, name: str, c: Float[Array, "g *s"], ones: Float[Array, "#g"]
) -> Float[Array, "g *s"]:
    """Carry channels of a value through its edit, frozen to its linear part: `carry_channels`.

    Args:
        layer: The layer, with its constants in `Layer.extra`.
        name: Name of the edit point.
        c, ones: The channels and their shares of constants.
    """
    if layer.inputs.edit is None or name not in layer.inputs.edit:
        return c
    edit = layer.inputs.edit[name]
    return edits.carry_channels(lambda v: edit(v, layer.index), layer.extra.unedited[name], c, ones)


def attend_channels(
    layer: Layer, kind: str, c: Float[Array, "g m e"], ones: Float[Array, "#g"]
) -> Float[Array, "g n d"]:
    """Compute Σ_h P_h (c W_V + ones·b_V) W_O + ones·b_O with the weights P_h of the forward pass.

    Channels c are summands of the tokens, such as the sums over paths of one length; the value and
    output projections are one matrix product over all channels and heads.

    Args:
        layer: The layer, with its constants in `Layer.extra`.
        kind: "attention", or "cross" for the attention to the memory.
        c: Channels of the keys' tokens.
        ones: Share of the biases in each channel.
    """
    constants, params = layer.extra, getattr(layer.params, kind)
    is_cross = kind == "cross"
    prefix = "cross_" if is_cross else ""
    h, _, v = params.w_v.shape
    g, m, _ = c.shape
    values = jnp.einsum("gme,hev->gmhv", c, params.w_v)
    values = values + ones[:, None, None, None] * params.b_v[None, None]
    values = carry_edit(layer, f"{prefix}v", values.transpose(0, 2, 1, 3), ones)  # [g, h, m, v]
    if constants.mix_inputs is not None and not is_cross:
        mixed = _mix_channels(layer, values, ones).transpose(0, 2, 1, 3)
    else:
        weights = constants.trace.cross_attention if is_cross else constants.weights
        values = values.transpose(1, 2, 0, 3).reshape(h, m, g * v)
        mixed = jnp.einsum("hnm,hmx->hnx", weights, values).reshape(h, -1, g, v)
        mixed = mixed.transpose(2, 1, 0, 3)
    if constants.head_gain is not None and not is_cross:
        mixed = mixed * constants.head_gain[None, None, :, None]
    name = f"{prefix}head_output"
    if name in (layer.inputs.edit or ()):
        heads = jnp.einsum("gnhv,hvd->ghnd", mixed, params.w_o)
        output = carry_edit(layer, name, heads, ones).sum(axis=1)
    else:
        output = jnp.einsum("gnhv,hvd->gnd", mixed, params.w_o)
    return output + _share_bias(params.b_o, ones)


def _mix_channels(layer, values, ones):
    """Carry channels of values [g, h, m, v] through an attention that computes its full output."""
    q, k, v = layer.extra.mix_inputs

    def mix_values(v):
        return apply_mix(layer.config.mix, q, k, v, layer.context)[1]

    return edits.carry_channels(mix_values, v, values, ones)


def mlp_gate(
    params: layers.MLPParams, x: Float[Array, "n d"], config: TransformerConfig
) -> Float[Array, "n f"]:
    """Compute g with MLP(x) = (g ∘ (x W_in + b_in)) W_out + b_out.

    φ(z)/z, or φ of a gated MLP's gate, times the router's shares of a mixture of experts.

    Args:
        params: Parameters of the MLP.
        x: Input of the MLP.
        config: The network.
    """
    if config.mlp in layers.GATED:
        gate = layers.compute_gate(params, x, config.mlp)
    else:
        units = x @ params.w_in + params.b_in[None, :]
        gate = layers.get_activation(config.mlp).gate(units)
    routing = config.routing
    return gate if routing is None else gate * layers.unit_shares(params, x, routing)


def frozen_scale(x: ArrayLike, config: TransformerConfig) -> Leaf | None:
    """Compute 1/σ [n, 1] of each token that a norm is applied to; None for None."""
    if x is None:
        return None
    return layers.norm_statistics(x, config.norm, config.norm_eps)[1].astype(x.dtype)


def _share_bias(bias, ones):
    """Multiply a bias [d] by each channel's share: [g, 1, d]."""
    return ones[:, None, None] * bias[None, None, :]
