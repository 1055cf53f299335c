"""The walk through the layers of the one network, which the forward pass and all others share.

    walk_layers        the loop over the layers, a `jax.lax.scan`
    walk_layer         one layer: attention, cross-attention and MLP, each
                       N(λ x + γ N'(branch(N(x)))) with skip λ, gain γ and norms N, N'
    apply_final_norm   the norm after the last layer

An `Algebra` defines a kind of state and how it is normalised, added, attended to and passed through
an MLP, and lists the networks that it covers. States are tokens (`transformer.TokenAlgebra`), sums
of paths by length, a mean with a logarithmic residual, or a kernel of tokens under random weights.

Everything is written for one example; `jax.vmap` adds axes of batches and seeds. Axis letters:
l layers, h heads, n tokens, m memory tokens, d width.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse import struct
from rank_collapse.annotations import Number, Tree
from rank_collapse.network.attention_weights import AttentionContext
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import EVERYTHING, Covers
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.network.residual import (
    LayerGains,
    ResidualSpec,
    final_spec,
    layer_gains,
    residual_specs,
)

State = Tree  # what an algebra carries from layer to layer: tokens, sums of paths, a kernel


class Layer(struct.Struct):
    """One layer of a network on one example."""

    params: BlockParams | None  # None at the final norm
    gains: LayerGains | None  # None at the final norm
    index: Number  # traced: one program serves all layers
    config: TransformerConfig
    inputs: PreparedInputs | None  # of the network
    extra: Tree = None  # what else an algebra needs in this layer, such as frozen weights

    @property
    def context(self) -> AttentionContext:
        """Masks, biases and positions of this layer's self-attention."""
        gains, config = self.gains, self.config
        context = self.inputs.context.for_layer(gains.window, gains.rotated)
        if config.normalise is None and config.mix is None:
            return context
        sizes = config.depth, config.num_heads
        return context.replace(layer=self.index, sizes=sizes)

    @property
    def score_options(self) -> dict[str, object]:
        """The arguments of `attention.multi_head_attention` that define the scores."""
        config = self.config
        return {
            "score": config.score,
            "scale": config.scale_scores,
            "norm_eps": config.norm_eps,
            "temperature": self.gains.temperature,
        }


class SublayerValues(NamedTuple):
    """Everything that one sublayer computed; under jit unused values are not computed."""

    spec: ResidualSpec
    state: State  # before the sublayer
    branch_input: State  # what the branch read, after its norm
    branch_output: State  # before N'
    aux: Tree  # what else the branch returned
    norm_input: State  # what N was applied to; None where there is no N
    output_state: State  # after the sublayer, and of attention after its edit


class Algebra:
    """How one kind of state passes the operations of a layer, and the networks that this covers."""

    covers: ClassVar[Covers] = EVERYTHING

    def apply_norm(self, layer: Layer, spec: ResidualSpec, state: State) -> State:
        """Normalise a state by the spec's norm, or a branch's output where `spec.after_branch`."""
        raise NotImplementedError

    def add_branch(
        self, layer: Layer, spec: ResidualSpec, state: State, branch_output: State
    ) -> State:
        """Compute γ branch_output + λ state·[skip]."""
        raise NotImplementedError

    def edit_branch_input(self, layer: Layer, kind: str, branch_input: State) -> State:
        """Apply the edit at "attention_input", "cross_input" or "mlp_input"."""
        return branch_input

    def apply_branch(self, layer: Layer, kind: str, branch_input: State) -> tuple[State, Tree]:
        """Compute (output, aux) of a sublayer's branch, by the method of its kind."""
        return getattr(self, f"apply_{kind}")(layer, branch_input)

    def apply_attention(self, layer: Layer, branch_input: State) -> tuple[State, Tree]:
        """Compute (output, aux) of self-attention."""
        raise NotImplementedError

    def apply_cross(self, layer: Layer, branch_input: State) -> tuple[State, Tree]:
        """Compute (output, aux) of the attention to the memory."""
        raise NotImplementedError

    def apply_mlp(self, layer: Layer, branch_input: State) -> tuple[State, Tree]:
        """Compute (output, aux) of the MLP."""
        raise NotImplementedError

    def edit_state(self, layer: Layer, name: str, state: State) -> State:
        """Apply the edit at "after_attention", "after_cross" or "residual"."""
        return state


def walk_layer(
    algebra: Algebra, layer: Layer, state: State
) -> tuple[State, dict[str, SublayerValues]]:
    """Pass a state through one layer: attention, cross-attention and MLP in turn.

    Each sublayer is x ← N(λ x + γ N'(branch(N(x)))); its spec chooses the norms that exist.

    Args:
        algebra: Rules by which states of this kind are normalised, added and passed through
            branches.
        layer: The layer.
        state: State before the layer.

    Returns:
        The state after the layer, and the values that each sublayer computed, by kind.
    """
    specs = residual_specs(layer.params, layer.config, layer.gains)
    layer_input, sublayers = state, {}
    for kind in layer.config.kinds:
        spec = specs[kind]
        stream = layer_input if spec.parallel else state
        branch_input = _normalise_branch_input(algebra, layer, spec, stream)
        branch_input = algebra.edit_branch_input(layer, kind, branch_input)
        branch_output, aux = algebra.apply_branch(layer, kind, branch_input)
        summand = branch_output
        if spec.norms_branch:
            summand = algebra.apply_norm(layer, spec.at_branch, branch_output)
        output_state = algebra.add_branch(layer, spec, state, summand)
        norm_input = stream if spec.norms_input else None
        if spec.norms_sum:
            norm_input = output_state
            output_state = algebra.apply_norm(layer, spec, output_state)
        if kind != "mlp":
            output_state = algebra.edit_state(layer, f"after_{kind}", output_state)
        sublayers[kind] = SublayerValues(
            spec, state, branch_input, branch_output, aux, norm_input, output_state
        )
        state = output_state
    return algebra.edit_state(layer, "residual", state), sublayers


def _normalise_branch_input(algebra, layer, spec, stream):
    """Normalise the input of the branch, where the spec asks for it and this layer is not exempt.

    Args:
        algebra, layer: See `walk_layer`.
        spec: Specification of the sublayer.
        stream: Stream that the branch reads.
    """
    if not spec.norms_input:
        return stream
    normed = algebra.apply_norm(layer, spec, stream)
    if spec.unnormed is None:
        return normed
    if isinstance(spec.unnormed, np.bool_ | np.ndarray):  # on the host
        return stream if spec.unnormed else normed
    return jax.tree.map(lambda raw, a: jnp.where(spec.unnormed, raw, a), stream, normed)


def walk_layers(
    step: Callable[[Layer, State], tuple[State, Tree]],
    state: State,
    params: TransformerParams,
    prepared: PreparedInputs,
    config: TransformerConfig,
    *,
    extra: Tree = None,
) -> tuple[State, Tree]:
    """Scan a step over the layers.

    Args:
        step: (layer, state) → (state, layer result), such as a call of `walk_layer`.
        state: State before the first layer.
        params, prepared: Parameters and inputs from `prepare_inputs`.
        config: The network.
        extra: `Layer.extra` of all layers, leaves [L, ...].

    Returns:
        The state after the last layer, and the layer results [L, ...].
    """
    gains = layer_gains(config, prepared.x.dtype, params)
    indices = jnp.arange(config.depth)
    # Shared parameters are gathered layer by layer, by row, never copied as a stack.
    blocks_or_rows = jnp.asarray(config.layer_map) if config.layer_map else params.layers

    def body(state, layer_fields):
        """Call `step` on one layer, with its row of the parameters."""
        block, index, layer_gain, layer_extra = layer_fields
        if config.layer_map:
            row = block
            block = jax.tree.map(lambda a: a[row], params.layers)
        return step(Layer(block, layer_gain, index, config, prepared, layer_extra), state)

    return jax.lax.scan(body, state, (blocks_or_rows, indices, gains, extra), unroll=config.unroll)


def walk_network(
    algebra: Algebra,
    state: State,
    params: TransformerParams,
    prepared: PreparedInputs,
    config: TransformerConfig,
) -> State:
    """Pass a state through all layers and the final norm, without keeping results of the layers.

    Args:
        algebra: Rules by which states of this kind pass a layer.
        state: State before the first layer.
        params, prepared, config: See `walk_layers`.
    """

    def step(layer, state):
        return walk_layer(algebra, layer, state)[0], None

    state, _ = walk_layers(step, state, params, prepared, config)
    return apply_final_norm(algebra, state, params, prepared, config)


def apply_final_norm(
    algebra: Algebra,
    state: State,
    params: TransformerParams,
    prepared: PreparedInputs,
    config: TransformerConfig,
    extra: Tree = None,
) -> State:
    """Normalise the state after the last layer, if the network does so.

    Args:
        algebra, params, prepared, config: See `walk_network`.
        state: State after the last layer.
        extra: `Layer.extra` that the algebra's norm reads.
    """
    if not config.final_norm:
        return state
    layer = Layer(None, None, config.depth, config, prepared, extra)
    return algebra.apply_norm(layer, final_spec(params, config), state)
