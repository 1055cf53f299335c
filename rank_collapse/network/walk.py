"""The walk through a network: the order of its sublayers, written once for every kind of state.

A layer passes attention, cross-attention and MLP in turn, each as N(λ x + γ N'(branch(N(x)))).
What a state is differs: tokens, sums of paths by length, a mean with a logarithmic residual, a
kernel of tokens under random weights. An `Algebra` says how its kind of state is normalised, added,
attended and sent through an MLP, and which networks that covers.

Axis letters: l layers.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse import struct
from rank_collapse.network.attention import AttentionContext
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import EVERYTHING, Covers
from rank_collapse.network.inputs import PreparedInputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import (
    LayerGains,
    ResidualSpec,
    final_spec,
    layer_gains,
    residual_specs,
)
from rank_collapse.network.streams import Connection, compute_connection


class Layer(struct.Struct):
    """One layer of a network on one example."""

    params: Any
    gains: Any
    index: Any  # traced: one program serves all layers
    config: Any
    inputs: Any  # what the network starts from
    extra: Any = None  # what else an algebra needs here, such as frozen attention weights

    @property
    def context(self) -> AttentionContext:
        """Masks, biases and positions of this layer's self-attention."""
        gains, config = self.gains, self.config
        context = self.inputs.context.of_layer(gains.window, gains.rotated)
        if config.normalise is config.mix is None:
            return context
        return context.replace(layer=self.index)

    def passed(self, kind: str) -> Any:
        """The number of sublayers before this layer's of that kind; "final": before the layer."""
        kinds = self.config.kinds
        return self.index * len(kinds) + (kinds.index(kind) if kind in kinds else 0)

    def connection(self, spec: ResidualSpec, x: Any) -> Connection | None:
        """How a sublayer is connected to several streams [s, n, d]; None where there is one."""
        return compute_connection(spec.connection, x, self.config, self.passed(spec.kind))

    @property
    def score_options(self) -> dict[str, Any]:
        """The arguments of `attention.multi_head_attention` that define the scores."""
        config = self.config
        return {
            "score": config.score,
            "scale": config.scale_scores,
            "norm_eps": config.norm_eps,
            "temperature": self.gains.temperature,
        }


class SublayerValues(NamedTuple):
    """The values of one sublayer; under jit unused ones are not computed."""

    spec: ResidualSpec
    state: Any  # before the sublayer
    branch_input: Any  # what the branch read
    branch_output: Any  # the branch's output, before N'
    aux: Any  # what else the branch returned
    norm_input: Any  # what N was applied to; None where there is no N
    output_state: Any  # the state after the sublayer, before `Algebra.after`


class Algebra:
    """How one kind of state passes the operations of a layer, of the networks that it covers."""

    covers: ClassVar[Covers] = EVERYTHING

    def merge_streams(self, layer: Layer, spec: ResidualSpec, state: Any) -> Any:
        """What a branch, or the final norm, reads of a state: several streams as one."""
        return state

    def apply_norm(self, layer: Layer, spec: ResidualSpec, state: Any) -> Any:
        """The spec's norm of a state; of a branch's output where `spec.after_branch`."""
        raise NotImplementedError

    def add_branch(self, layer: Layer, spec: ResidualSpec, state: Any, part: Any) -> Any:
        """γ part + λ state·[skip]."""
        raise NotImplementedError

    def edit_branch_input(self, layer: Layer, kind: str, branch_input: Any) -> Any:
        """A branch's input after the edit at "attention_input", "cross_input" or "mlp_input"."""
        return branch_input

    def apply_branch(self, layer: Layer, kind: str, branch_input: Any) -> tuple[Any, Any]:
        """(output, aux) of a sublayer's branch: of the method of its kind."""
        return getattr(self, f"apply_{kind}")(layer, branch_input)

    def apply_attention(self, layer: Layer, branch_input: Any) -> tuple[Any, Any]:
        """(output, aux) of self-attention."""
        raise NotImplementedError

    def apply_cross(self, layer: Layer, branch_input: Any) -> tuple[Any, Any]:
        """(output, aux) of the attention to the memory."""
        raise NotImplementedError

    def apply_mlp(self, layer: Layer, branch_input: Any) -> tuple[Any, Any]:
        """(output, aux) of the MLP."""
        raise NotImplementedError

    def edit_state(self, layer: Layer, name: str, state: Any) -> Any:
        """The state after the edit at "after_attention", "after_cross" or "residual"."""
        return state


def walk_layer(algebra: Algebra, layer: Layer, state: Any) -> tuple[Any, dict[str, SublayerValues]]:
    """One layer: (the state after it, the passage of each of its sublayers by kind)."""
    specs = residual_specs(layer.params, layer.config, layer.gains)
    start, passages = state, {}
    for kind in layer.config.kinds:
        spec = specs[kind]
        source = algebra.merge_streams(layer, spec, start if spec.parallel else state)
        branch_input = algebra.edit_branch_input(
            layer, kind, _branch_input(algebra, layer, spec, source)
        )
        part, aux = algebra.apply_branch(layer, kind, branch_input)
        joined = algebra.apply_norm(layer, spec.at_branch, part) if spec.norms_branch else part
        total = algebra.add_branch(layer, spec, state, joined)
        after = algebra.apply_norm(layer, spec, total) if spec.norms_sum else total
        normed = total if spec.norms_sum else source if spec.norms_input else None
        passages[kind] = SublayerValues(spec, state, branch_input, part, aux, normed, after)
        state = after if kind == "mlp" else algebra.edit_state(layer, f"after_{kind}", after)
    return algebra.edit_state(layer, "residual", state), passages


def _branch_input(algebra, layer, spec, state):
    """What the branch reads of a state: it normalised, or itself."""
    if not spec.norms_input:
        return state
    normed = algebra.apply_norm(layer, spec, state)
    if spec.unnormed is None:
        return normed
    if isinstance(spec.unnormed, np.bool_ | np.ndarray):  # on the host
        return state if spec.unnormed else normed
    return jax.tree.map(lambda own, a: jnp.where(spec.unnormed, own, a), state, normed)


def walk_layers(
    step: Callable[[Layer, Any], tuple[Any, Any]],
    state: Any,
    params: TransformerParams,
    inputs: PreparedInputs,
    config: TransformerConfig,
    *,
    extra: Any = None,
    gains: LayerGains | None = None,
    rows: tuple[int, int] | None = None,
) -> tuple[Any, Any]:
    """A scan over the layers: (the state after the last, what each step adds [l, ...]).

    Args:
        step: (layer, state) → (state, what it adds), such as a call of `walk_layer`.
        state: Before the first layer.
        params, inputs: From `prepare_inputs`.
        extra: `Layer.extra` of all layers, leaves [L, ...].
        gains: Of all layers; `layer_gains` by default.
        rows: First layer and the one after the last; all by default.
    """
    gains = layer_gains(config, inputs.x.dtype, params) if gains is None else gains
    swept = (jnp.arange(config.depth), gains, extra)
    first, last = (0, config.depth) if rows is None else rows
    if rows is not None:
        swept = jax.tree.map(lambda a: a[first:last], swept)
    stack = params.layers
    if config.layer_map:  # parameters are gathered layer by layer, never copied as a stack
        stack = jnp.asarray(config.layer_map[first:last])
    elif rows is not None:
        stack = jax.tree.map(lambda a: a[first:last], stack)

    def body(state, scanned):
        own, (index, own_gains, more) = scanned
        if config.layer_map:
            own = jax.tree.map(lambda a: a[own], params.layers)
        return step(Layer(own, own_gains, index, config, inputs, more), state)

    return jax.lax.scan(body, state, (stack, swept), unroll=config.unroll)


def walk_network(
    algebra: Algebra,
    state: Any,
    params: TransformerParams,
    inputs: PreparedInputs,
    config: TransformerConfig,
) -> Any:
    """The state after all layers and the final norm, where the algebra needs nothing beside it."""

    def step(layer, state):
        return walk_layer(algebra, layer, state)[0], None

    state, _ = walk_layers(step, state, params, inputs, config)
    return apply_final_norm(algebra, state, params, inputs, config)


def apply_final_norm(
    algebra: Algebra,
    state: Any,
    params: TransformerParams,
    inputs: PreparedInputs,
    config: TransformerConfig,
    extra: Any = None,
) -> Any:
    """The state after the last layer, as one stream, and the norm after it where there is one."""
    layer, spec = Layer(None, None, config.depth, config, inputs, extra), final_spec(params, config)
    state = algebra.merge_streams(layer, spec, state)
    return algebra.apply_norm(layer, spec, state) if config.final_norm else state
